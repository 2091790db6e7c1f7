"""Hooks on gradient checkpointing that see only the inputs of checkpointed blocks.

transformers' models call blocks through `_gradient_checkpointing_func`, which `gradient_checkpointing_enable` sets on
each module, at any time. Both implementations of torch's checkpoint (reentrant or not) save a block's positional
tensors through the saved-tensors hooks around the call. Computations inside the block have other hooks, or no
gradients.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from hf_zero.activation.installed import Installed
from hf_zero.activation.saved_tensors import coming, staying
from hf_zero.activation.store import Store
from hf_zero.engine.engine import ZeroEngine, in_backward
from hf_zero.engine.hooks import tensors_in
from hf_zero.engine.patch import Uncopyable
from hf_zero.errors import LifecycleError, UnsupportedError


FLAG = "gradient_checkpointing"
FUNCTION = "_gradient_checkpointing_func"


def refuse_without_switch(model: nn.Module) -> None:
    """Raises for a model whose blocks transformers cannot checkpoint."""
    if not any(hasattr(module, FLAG) for module in model.modules()):
        raise UnsupportedError(
            f"{type(model).__name__}: no module has the attribute {FLAG!r}, so checkpointed inputs cannot be "
            "distinguished from other activations; remove partition_activations"
        )


class Checkpointing(Installed):
    """Passes the inputs of a model's checkpointed blocks to a store."""

    def __init__(self, engine: ZeroEngine, store: Store):
        super().__init__(engine)
        self.store = store
        self._modules = [module for module in engine.model.modules() if hasattr(module, FLAG)]
        self._is_open = False  # a checkpoint function is running
        self._has_seen = False  # it has saved a tensor
        # wrap the functions of a module before its forward: any module may be called directly
        for module in self._modules:
            within = [each for each in module.modules() if hasattr(each, FLAG)]
            self._handles.append(module.register_forward_pre_hook(partial(self._prepare, within)))
        self._handles.append(engine.model.register_forward_pre_hook(self._refuse_unused))

    def _prepare(self, modules: list[nn.Module], *_) -> None:
        put_around(modules, self._save)

    def _refuse_unused(self, *_) -> None:
        if not (self._engine.model.training and torch.is_grad_enabled()):
            return
        divides = self._engine.config.partition_activations
        if divides and not any(getattr(module, FLAG) for module in self._modules):
            raise LifecycleError(
                "partition_activations: partitions checkpointed inputs, but gradient checkpointing is off; "
                "call model.gradient_checkpointing_enable() before training, or remove it"
            )

    def remove(self) -> None:
        super().remove()
        take_off(self._modules, self._save)

    def _save(self, function: Callable, block: Callable, *args, **kwargs):
        """Calls a checkpoint function. The tensors that autograd saves during the call are the inputs of the block.

        Ignores nested checkpoints and recomputations in backward, which belong to the outermost checkpoint."""
        if self._is_open or in_backward() or not torch.is_grad_enabled():
            return function(block, *args, **kwargs)
        self._is_open, self._has_seen = True, False
        try:
            self.store.begin_call()
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed()):
                output = function(block, *args, **kwargs)
        finally:
            self._is_open = False
        tensors = tensors_in(args)
        if not tensors or (not self._has_seen and any(_is_kept(tensor) for tensor in tensors)):
            raise UnsupportedError(
                "offload_activations and partition_activations: a checkpointed block's inputs are "
                + (
                    "already stored elsewhere; remove `offload` of activation_checkpointing_kwargs, or these settings"
                    if tensors
                    else "passed by keyword, which is not supported; remove these settings"
                )
            )
        return output

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        self._has_seen = True
        if _is_kept(tensor):
            return coming(tensor, partial(self.store.take, self.store.save(tensor)), 0)
        return staying(tensor)


def _is_kept(tensor: Tensor) -> bool:
    """Returns whether a saved tensor goes to the store. Masks, positions and rotary embeddings, which all blocks share
    and which require no gradient, do not."""
    return tensor.requires_grad and not isinstance(tensor, nn.Parameter) and tensor.is_floating_point()


class CheckpointFunction(Uncopyable):
    """A module's checkpoint function, such as `torch.utils.checkpoint.checkpoint`, with wrappers.

    Attributes:
        around (`list[Callable]`): The wrappers, innermost first. Each is called with the wrapped function and its
            arguments.
    """

    def __init__(self, function: Callable):
        self.function = function
        self.around: list[Callable] = []

    def __call__(self, block: Callable, *args, **kwargs):
        function = self.function
        for call in self.around:
            function = partial(call, function)
        return function(block, *args, **kwargs)


def put_around(modules: list[nn.Module], call: Callable) -> None:
    """Adds a wrapper to the modules' checkpoint functions, unless they have it already."""
    for module in modules:
        function = module.__dict__.get(FUNCTION)
        if function is None:
            continue
        if not isinstance(function, CheckpointFunction):
            function = module.__dict__[FUNCTION] = CheckpointFunction(function)
        if call not in function.around:
            function.around.append(call)


def take_off(modules: list[nn.Module], call: Callable) -> None:
    """Removes a wrapper from the modules' checkpoint functions."""
    for module in modules:
        function = module.__dict__.get(FUNCTION)
        if isinstance(function, CheckpointFunction):
            function.around = [each for each in function.around if each != call]
            if not function.around:
                module.__dict__[FUNCTION] = function.function
