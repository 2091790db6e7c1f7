"""The loss of a language model from its hidden states, computed for one range of the vocabulary at a time.

The logits of all tokens are often the largest tensor of a step: together with their gradient, they take 8 bytes per
token and word of the vocabulary. The chunked loss computes the logits of one range of the vocabulary at a time. The
forward accumulates the softmax denominator, and the backward recomputes each range (Cut Cross-Entropy, arXiv
2411.09009). The weight gradient of a range is one matrix product over all tokens, written directly to the buffer that
is reduced. No row is accumulated, so there are no additional rounding errors compared with the plain loss.

[Note: interception of the loss] transformers' models pass their logits to `loss_function`. If the model receives
labels, its head returns `DeferredLogits`, which record elementwise operations such as scaling or soft-capping. When
`loss_function` receives them, the head is called again, and now returns the loss of each token. Hooks on the head,
which gather its weight, therefore run around the computation that uses it. Any other operation computes all logits.
"""

import inspect
import logging
from collections.abc import Callable
from functools import update_wrapper

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hf_zero.activation.vocabulary_ranges import Steps, TokenLoss, stepped
from hf_zero.engine.direct import autocast_dtype
from hf_zero.engine.divided import is_dtensor
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.partition import vocabulary_module
from hf_zero.engine.patch import Installed, Patch, Uncopyable
from hf_zero.errors import UnsupportedError


logger = logging.getLogger(__name__)

# Bytes of the logits of a range: small enough for the cache of a CPU, large enough for efficient matmuls on
# accelerators.
CPU_NBYTES = 4 * 2**20
ACCELERATOR_NBYTES = 128 * 2**20
# Matmuls of narrower ranges are slow.
MIN_WIDTH = 256
# Loss functions of transformers that can be chunked, and whether they shift the labels.
_LOSSES = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}


def find_head(model: nn.Module) -> tuple[nn.Linear, list[nn.Module], nn.Module | None] | None:
    """Returns a model's head, the modules that pass its output to `loss_function`, and the outermost module around it
    whose forward accepts labels. Returns `None` if the model has no head that is a single plain linear module."""
    modules = [module for module in model.modules() if hasattr(type(module), "get_output_embeddings")]
    found = [vocabulary_module(module, "get_output_embeddings") for module in modules]
    heads = {id(head): head for head in found if type(head) is nn.Linear and not is_dtensor(head.weight)}
    if len(heads) != 1:
        return None
    [head] = heads.values()
    around = [module for module, own in zip(modules, found) if own is head or head in set(module.modules())]
    loss_owners = [module for module in around if _loss_name(module) in _LOSSES]
    return head, loss_owners, next((module for module in around if "labels" in _parameters(module)), None)


class ChunkedLoss(Installed):
    """Computes the loss of a model from its hidden states instead of its logits.

    Args:
        engine (`ZeroEngine`): The model's engine.
        head (`nn.Linear`): The head, whose output are the logits.
        loss_owners (`list[nn.Module]`): The modules that pass the logits to `loss_function`.
        owner (`nn.Module`, *optional*): The module whose forward accepts labels.
        is_auto (`bool`): If `True`, the chunked loss is used only if the logits would take more memory than the
            largest block and nothing else needs them. If `False`, it is always used, and other uses of the logits
            raise.

    Attributes:
        is_active (`bool`): Set it to `False` while logits are needed.
    """

    def __init__(
        self, engine: ZeroEngine, head: nn.Linear, loss_owners: list[nn.Module], owner: nn.Module | None, is_auto: bool
    ):
        super().__init__(engine)
        self.is_active = True
        self.is_auto = is_auto
        self._head = head
        self._is_open = False  # a forward with labels is running
        self._is_used = False  # in this forward
        self._wanted: tuple[Tensor, Steps] | None = None  # targets and steps, while the head computes a loss
        self._is_told = False
        self._max_nbytes = _largest_block_nbytes(engine, head.out_features)
        self._sink = engine.sinks.get(id(head.weight))
        self._own_hooks = _num_hooks(head)
        self._former = head.forward
        # `__call__` calls `_compiled_call_impl` instead of the hooks and the forward
        self._handles += [Patch(head, "_compiled_call_impl", self._call), Patch(head, "forward", self._forward)]
        for module in loss_owners:
            self._handles.append(Patch(module, "_loss_function", _Loss(self, module.loss_function)))
        if owner is not None:
            self._place = _parameters(owner).index("labels")
            self._handles.append(owner.register_forward_pre_hook(self._begin, with_kwargs=True))
            self._handles.append(owner.register_forward_hook(self._end, always_call=True))

    def _begin(self, _module, args: tuple, kwargs: dict) -> None:
        labels = args[self._place] if self._place < len(args) else kwargs.get("labels")
        has_own_head = kwargs.get("fused_lm_head")  # TRL's, which computes the loss in chunks, too
        self._is_open, self._is_used = self.is_active and labels is not None and not has_own_head, False

    def _end(self, _module, _args, output) -> None:
        was_open, self._is_open = self._is_open, False
        if was_open and not self.is_auto and output is not None and not self._is_used:
            self._tell("it computes its loss without loss_function")

    def _call(self, *args, **kwargs):
        """Calls the head, or returns deferred logits."""
        if self._wanted is None and self._is_open and len(args) == 1 and not kwargs:
            [hidden] = args
            if self._is_worth_it(hidden) and self._is_served(hidden):
                shape = (*hidden.shape[:-1], self._head.out_features)
                return DeferredLogits(self, hidden, shape, self._head.weight.dtype)
        return self._head._call_impl(*args, **kwargs)

    def _is_worth_it(self, hidden: Tensor) -> bool:
        nbytes = hidden.shape[:-1].numel() * self._head.out_features * 4
        return not self.is_auto or nbytes > max(self._max_nbytes, self._chunk_nbytes)

    def _is_served(self, hidden: Tensor) -> bool:
        """Returns whether the head's output can be deferred. If not, reports the reason."""
        reason = None
        if _num_hooks(self._head) != self._own_hooks:
            reason = "its head has a hook, which sees the logits"
        elif torch.compiler.is_compiling():
            reason = "its head is compiled"
        elif autocast_dtype(hidden.device.type) not in (None, self._head.weight.dtype):
            reason = "autocast is active, which casts the weight at each use"
        if reason is not None:
            self._tell(reason)
        return reason is None

    @property
    def _chunk_nbytes(self) -> int:
        return CPU_NBYTES if self._engine.comm.is_on_cpu else ACCELERATOR_NBYTES

    def _forward(self, hidden: Tensor) -> Tensor:
        """The head's forward: returns its output, or the losses if they are requested."""
        if self._wanted is None:
            return self._former(hidden)
        hidden = hidden.to(self._head.weight.dtype)  # autocast may have computed it in fp32
        targets, steps = self._wanted
        width = max(MIN_WIDTH, self._chunk_nbytes // (4 * max(1, hidden.shape[0])))
        is_sunk = self._sink is not None and self._sink.serves(self._head.weight, hidden)
        sink = self._sink if is_sunk else None
        return TokenLoss.apply(hidden, self._head.weight, self._head.bias, targets, steps, width, sink)

    def loss_of(self, hidden: Tensor, targets: Tensor, steps: Steps) -> Tensor:
        """Returns the negative log-likelihood of each target, fp32 `(num_tokens,)`. Calls the head, whose hooks gather
        its weight. The arguments are those of `TokenLoss`."""
        self._is_used = True
        self._wanted = targets, steps
        try:
            return self._head._call_impl(hidden)
        finally:
            self._wanted = None

    def logits_of(self, hidden: Tensor, reason: str) -> Tensor:
        """Computes all logits for an operation other than the loss.

        Raises:
            `UnsupportedError`: If chunked_loss is on, or if the forward has ended: the head's weight may have changed,
                and the other ranks may not gather it.
        """
        if not self._is_open:
            raise UnsupportedError(
                f"chunked_loss: logits of {type(self._engine.model).__name__} are read ({reason}) after its forward, "
                "which computed the loss without them; set chunked_loss to off"
            )
        self._tell(f"{reason} needs them")
        return self._head._call_impl(hidden)

    def _tell(self, reason: str) -> None:
        """Raises if chunked_loss is on; with auto, logs once that all logits are computed."""
        text = f"chunked_loss: {type(self._engine.model).__name__} uses its logits for more than the loss: {reason}"
        if not self.is_auto:
            raise UnsupportedError(f"{text}; remove chunked_loss")
        if not self._is_told:
            self._is_told = True
            logger.warning("hf_zero: %s; all are computed at once", text)


class _Loss(Uncopyable):
    """A model's `loss_function`, which is chunked for deferred logits."""

    def __init__(self, chunked: ChunkedLoss, function: Callable):
        update_wrapper(self, function)
        self._chunked = chunked
        self._function = function

    def __call__(self, logits: Tensor, labels: Tensor, *args, **kwargs):
        if isinstance(logits, DeferredLogits) and logits.whole is None:
            return self._chunked_loss(logits, labels, *args, **kwargs)
        return self._function(logits, labels, *args, **kwargs)

    def _chunked_loss(
        self,
        logits: "DeferredLogits",
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_,
    ) -> Tensor:
        if _LOSSES[self._function.__name__]:
            labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
        labels = labels.reshape(-1).to(logits.device)
        counts = labels != ignore_index
        num_words = logits.shape[-1]
        torch._assert_async(
            (~counts | ((labels >= 0) & (labels < num_words))).all(),
            f"a label is neither {ignore_index} nor a token of the vocabulary of size {num_words}",
        )
        targets = labels.masked_fill(~counts, -1)
        losses = self._chunked.loss_of(logits.hidden.flatten(0, -2), targets, logits.steps).masked_fill(~counts, 0)
        return losses.sum() / (counts.sum() if num_items_in_batch is None else num_items_in_batch)


# Attributes that are known without computing the logits.
_ATTRIBUTES = "shape dtype ndim layout requires_grad grad_fn is_leaf _base _version is_meta".split()
_KNOWN = {getattr(torch._C.TensorBase, name).__get__ for name in _ATTRIBUTES}
_KNOWN |= {Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point, Tensor.is_inference}
# Elementwise operations with numbers, which can be applied to a range of the logits.
_ELEMENTWISE = {"mul": torch.mul, "div": torch.div, "true_divide": torch.div, "tanh": torch.tanh}


class DeferredLogits(Tensor):
    """The output of a head that has not been called yet. Elementwise operations are recorded; all other operations
    compute the logits first.

    Args:
        chunked (`ChunkedLoss`): Computes the loss or the logits.
        hidden (`Tensor`): The hidden states, `(..., hidden_size)`.
        shape (`tuple`): Shape of the logits, `(..., vocab_size)`.
        dtype (`torch.dtype`): Dtype of the logits.
        steps (`tuple`): The elementwise operations so far, each a function of one tensor.

    Attributes:
        whole (`Tensor`, *optional*): The logits, once they are computed.
    """

    @staticmethod
    def __new__(cls, chunked: ChunkedLoss, hidden: Tensor, shape, dtype: torch.dtype, steps: Steps = ()):
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)

    def __init__(self, chunked: ChunkedLoss, hidden: Tensor, shape, dtype: torch.dtype, steps: Steps = ()):
        self._chunked = chunked
        self.hidden = hidden
        self.steps = steps
        self.whole: Tensor | None = None
        self._has_grad = torch.is_grad_enabled()  # the mode of the head's call

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def __repr__(self, **_) -> str:
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise UnsupportedError(f"chunked_loss: {func} reads logits; set chunked_loss to off")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        logits = args[0] if args else None
        if isinstance(logits, cls) and logits.whole is None:
            if func in _KNOWN:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            numbers = args[1:]
            if name == "float":
                return logits._then(Tensor.float, torch.float32)
            if name in _ELEMENTWISE and not kwargs and all(isinstance(arg, (int, float)) for arg in numbers):
                function = _ELEMENTWISE[name]
                return logits._then(lambda values: function(values, *numbers), logits.dtype)
        args, kwargs = tree_map_only(cls, lambda each: each._computed(name), (tuple(args), kwargs))
        return func(*args, **kwargs)

    def _then(self, step: Callable[[Tensor], Tensor], dtype: torch.dtype) -> "DeferredLogits":
        """Returns the result of one more elementwise operation."""
        return DeferredLogits(self._chunked, self.hidden, self.shape, dtype, (*self.steps, step))

    def _computed(self, reason: str) -> Tensor:
        """Returns the logits. `reason` is the operation that needs them."""
        if self.whole is None:
            with torch.set_grad_enabled(self._has_grad):
                self.whole = stepped(self._chunked.logits_of(self.hidden, reason), self.steps)
        return self.whole


def _loss_name(module: nn.Module) -> str | None:
    return getattr(getattr(module, "loss_function", None), "__name__", None)


def _num_hooks(head: nn.Module) -> int:
    forward, backward = ("_forward_pre_hooks", "_forward_hooks"), ("_backward_pre_hooks", "_backward_hooks")
    return sum(len(getattr(head, name)) for name in (*forward, *backward))


def _largest_block_nbytes(engine: ZeroEngine, vocab_size: int) -> int:
    """Returns the bytes of the largest block's parameters in the compute dtype, which do not depend on the stage or
    the number of ranks."""
    sizes = [0]
    for unit in engine.blocks:
        params = [param for flat in unit.flats for param in flat.params]
        if not any(param.shape[:1] == (vocab_size,) for param in params):  # skips embeddings
            sizes.append(sum(param.numel() * param.element_size() for param in params))
    return max(sizes)


def _parameters(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)
