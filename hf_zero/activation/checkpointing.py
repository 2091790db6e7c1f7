"""Hooks on gradient checkpointing that see only the inputs of checkpointed blocks.

transformers' models call blocks through `_gradient_checkpointing_func`, which `gradient_checkpointing_enable` puts
onto each module, at any time. Both of torch's ways to checkpoint save a block's positional tensors through the hooks
on saved tensors that are in force around the call; what is computed inside has hooks of its own, or no gradients.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from hf_zero.activation.store import Store
from hf_zero.engine.engine import ZeroEngine, in_backward
from hf_zero.engine.hooks import tensors_in
from hf_zero.engine.patch import Uncopyable
from hf_zero.errors import LifecycleError, UnsupportedError


FLAG = "gradient_checkpointing"
FUNCTION = "_gradient_checkpointing_func"


def refuse_without_switch(model: nn.Module) -> None:
    """Refuses a model whose blocks transformers cannot checkpoint."""
    if not any(hasattr(module, FLAG) for module in model.modules()):
        raise UnsupportedError(
            f"{type(model).__name__}: no module has a {FLAG!r} switch, so inputs of checkpointed blocks cannot be "
            "told from other activations; leave partition_activations out"
        )


class Checkpointing(Uncopyable):
    """Hands the inputs of a model's checkpointed blocks to a store, until it is removed."""

    def __init__(self, engine: ZeroEngine, store: Store):
        self.store = store
        self._engine = engine
        self._modules = [module for module in engine.model.modules() if hasattr(module, FLAG)]
        self._is_open = False  # the function around a block is under way
        self._has_seen = False  # and has saved something
        # what a module's forward calls is made ready before it: the model may be entered anywhere
        self._handles = [
            module.register_forward_pre_hook(partial(self._prepare, [m for m in module.modules() if hasattr(m, FLAG)]))
            for module in self._modules
        ]
        self._handles.append(engine.model.register_forward_pre_hook(self._refuse_unused))

    def _prepare(self, modules: list[nn.Module], *_) -> None:
        for module in modules:
            function = module.__dict__.get(FUNCTION)
            if function is not None and not wraps(function, Around):
                module.__dict__[FUNCTION] = Around(self, function)

    def _refuse_unused(self, *_) -> None:
        if not (self._engine.model.training and torch.is_grad_enabled()):
            return
        if self._engine.compiled_with is not None:
            raise UnsupportedError(
                "offload_activations and partition_activations: compiled blocks keep their inputs inside their "
                "graphs; leave compilation out, or these settings"
            )
        divides = self._engine.config.partition_activations
        if divides and not any(getattr(module, FLAG) for module in self._modules):
            raise LifecycleError(
                "partition_activations acts on the inputs of checkpointed blocks, and none is checkpointed; call "
                "model.gradient_checkpointing_enable() before training, or leave it out"
            )

    def remove(self) -> None:
        """Removes the hooks. Inputs that are in the store stay until their backward."""
        while self._handles:
            self._handles.pop().remove()
        for module in self._modules:
            unwrap(module, Around)

    @contextmanager
    def saving(self, inputs: tuple) -> Iterator[None]:
        """Treats tensors that autograd saves inside the context as the inputs of a checkpointed block.

        Checkpoints within checkpoints, and those that are made anew in backward, belong to the outermost.

        Args:
            inputs (`tuple`): what the block is given by position.
        """
        if self._is_open or in_backward() or not torch.is_grad_enabled():
            yield
            return
        self._is_open, self._has_seen = True, False
        try:
            self.store.begin_call()
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self._is_open = False
        tensors = tensors_in(inputs)
        if not tensors or (not self._has_seen and any(_is_kept(tensor) for tensor in tensors)):
            raise UnsupportedError(
                "offload_activations and partition_activations: a checkpointed block's inputs are "
                + (
                    "kept elsewhere already; leave out `offload` of activation_checkpointing_kwargs, or these settings"
                    if tensors
                    else "given by keyword, where they cannot be told from others; leave these settings out"
                )
            )

    def _pack(self, tensor: Tensor):
        self._has_seen = True
        if _is_kept(tensor):
            return tensor.shape, tensor.stride(), self.store, self.store.save(tensor)
        return tensor.detach()


def _is_kept(tensor: Tensor) -> bool:
    """Whether a saved tensor goes to the store. Masks, positions and rotary embeddings, which all blocks share and
    which need no gradient, do not."""
    return tensor.requires_grad and not isinstance(tensor, nn.Parameter) and tensor.is_floating_point()


def _unpack(packed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    shape, stride, store, ticket = packed
    values = store.take(ticket)
    return values if (values.shape, values.stride()) == (shape, stride) else values.as_strided(shape, stride)


class CheckpointWrapper(Uncopyable):
    """A wrapper of a module's checkpoint function, which may have several, one around the other.

    Args:
        function (`Callable`): such as `torch.utils.checkpoint.checkpoint`, or another wrapper of it.
    """

    def __init__(self, function: Callable):
        self.function = function


def wraps(function: Callable, kind: type[CheckpointWrapper]) -> bool:
    """Whether a checkpoint function has a wrapper of this kind."""
    return isinstance(function, kind) or (isinstance(function, CheckpointWrapper) and wraps(function.function, kind))


def unwrap(module: nn.Module, kind: type[CheckpointWrapper]) -> None:
    """Removes the wrapper of this kind from a module's checkpoint function, if it has one."""
    outer: CheckpointWrapper | None = None
    function = module.__dict__.get(FUNCTION)
    while isinstance(function, CheckpointWrapper) and not isinstance(function, kind):
        outer = function
        function = outer.function
    if isinstance(function, kind):
        if outer is None:
            module.__dict__[FUNCTION] = function.function
        else:
            outer.function = function.function


class Around(CheckpointWrapper):
    """A wrapper of a checkpoint function that sees its saved tensors."""

    def __init__(self, checkpointing: Checkpointing, function: Callable):
        super().__init__(function)
        self._checkpointing = checkpointing

    def __call__(self, block: Callable, *args, **kwargs):
        with self._checkpointing.saving(args):
            return self.function(block, *args, **kwargs)
