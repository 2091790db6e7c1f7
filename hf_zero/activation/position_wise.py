"""The proof that a module computes each position by itself, from the operations of one call without data.

The module is called on the meta device, and each operation on what comes from its input has to be known to keep
positions apart: elementwise operations, products with weights, changes of shape, reductions and choices behind the
dimensions of the positions. Any other operation ends the proof. So does one that is another, or is given another
number, where there are more positions: a number that is taken from the shape is not in the operations otherwise.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_zero.engine.divided import is_dtensor
from hf_zero.engine.opaque import is_opaque


# Sizes of the input's leading dimensions, with which the operations have to be the same.
POSITIONS = (3, 7)
MORE_POSITIONS = (1, 4099)  # as tiles are
# They read elements in the order of the shape, and write them in the same order.
_SAME_ORDER = {"view", "_unsafe_view", "reshape", "clone", "detach", "alias", "contiguous", "_to_copy", "lift_fresh"}
_RANDOM = {"native_dropout", "bernoulli", "bernoulli_", "rand_like", "empty_like", "zeros_like", "ones_like"}
# Operations along one dimension or several, with the name of the argument that says which.
_ALONG = {
    **dict.fromkeys(("mean", "sum", "amax", "_softmax", "_log_softmax", "slice", "select", "split"), "dim"),
    **dict.fromkeys(("split_with_sizes", "unbind", "cat", "stack", "var", "linalg_vector_norm"), "dim"),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), "normalized_shape"),
}
_PRODUCTS = {"mm", "addmm", "linear"}
NOT_KNOWN = "is not known to keep positions apart"
FOLLOWS_SHAPE = "what it computes follows the number of positions"
NO_SAME_SHAPE = "its forward does not map a tensor to one of the same shape"


class _Mixes(Exception):
    """An operation that is not known to keep positions apart."""


class _PositionTrace(TorchDispatchMode):
    """Follows what comes from the input through all operations.

    Args:
        given (`Tensor`): the input, `(*positions, hidden_size)`.

    Attributes:
        steps (`list`): the operations, each with what it was given besides tensors, as far as that is no shape.
        num_products (`int`): how many products with weights there were.
        width (`int`): the most features that one of them gave.
    """

    def __init__(self, given: Tensor, own: list[Tensor]):
        super().__init__()
        self._kept_values = {_memory_of(tensor) for tensor in (given, *own)}
        self.steps: list[tuple] = []
        self._positions = tuple(given.shape[:-1])
        # of each tensor that is known, by `id`, how many of its first dimensions are positions
        self._num_leading: dict[int, int | None] = {**{id(tensor): None for tensor in own}, id(given): given.dim() - 1}
        self._kept = [given]  # so that no other tensor gets the `id` of one that is known
        self.num_products = self.width = 0

    def leading(self, tensor) -> int | None:
        """Returns how many of the first dimensions of a tensor are positions; `None` where it does not come from the
        input."""
        return self._num_leading.get(id(tensor))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name, leaves = func.overloadpacket.__name__, tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any(id(tensor) not in self._num_leading for tensor in tensors):
            raise _Mixes(f"{name} of a tensor that is neither given nor its own {NOT_KNOWN}")
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self._num_leading |= {id(result): self.leading(result) for result in made}
        self._kept += made
        if name not in _SAME_ORDER:
            self.steps.append((func, [leaf for leaf in leaves if not isinstance(leaf, Tensor)]))
        if any(self.leading(tensor) is not None for tensor in tensors):
            for result in made:
                self._follow(func, name, args, kwargs, tensors, result)
        elif torch.Tag.nondeterministic_seeded in func.tags:
            raise _Mixes(f"{name} {NOT_KNOWN}")  # it is drawn once in a call, and there is a call for each tile
        if any(_memory_of(tensor) in self._kept_values for tensor in _written(func, args, kwargs)):
            raise _Mixes(f"{name} writes to its input, or to its own tensors")
        return out

    def _follow(self, func, name: str, args: tuple, kwargs: dict, tensors: list[Tensor], result: Tensor) -> None:
        if name in _PRODUCTS:
            count = self._of_product(name, args, result)
        elif name in _SAME_ORDER:
            count = self._prefix(result)
        elif name in _ALONG:
            count = self._of_choice(func, name, args, kwargs, result)
        elif name in _RANDOM or torch.Tag.pointwise in func.tags:
            count = self._of_elements(tensors, result)
        else:
            count = None
        if count is None or (func._schema.is_mutable and self.leading(args[0]) is None):
            raise _Mixes(f"{name} {NOT_KNOWN}")
        self._num_leading[id(result)] = count

    def _prefix(self, tensor: Tensor) -> int | None:
        """Returns how many leading dimensions are the positions, apart or as one; `None` where they are not."""
        merged = 1
        for size in self._positions:
            merged *= size
        shape, num = tuple(tensor.shape), len(self._positions)
        if shape[:num] == self._positions:
            return num
        return 1 if shape[:1] == (merged,) else None

    def _of_product(self, name: str, args: tuple, result: Tensor) -> int | None:
        rows = args[1] if name == "addmm" else args[0]
        others = [arg for arg in args if isinstance(arg, Tensor) and arg is not rows]
        count = self.leading(rows)
        is_plain = count is not None and all(self.leading(other) is None for other in others)
        if not is_plain or (name == "addmm" and args[0].dim() > 1) or rows.dim() == count:
            return None
        self.num_products += 1
        self.width = max(self.width, result.shape[-1])
        return count

    def _of_choice(self, func, name: str, args: tuple, kwargs: dict, result: Tensor) -> int | None:
        given = dict(zip((arg.name for arg in func._schema.arguments), args)) | kwargs
        parts = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
        counts = {self.leading(part) for part in parts}
        count = counts.pop()
        if counts or count is None or any(self.leading(x) is not None for x in tree_leaves((args[1:], kwargs))):
            return None
        num_dims = result.dim() if name == "stack" else parts[0].dim()
        if _ALONG[name] == "normalized_shape":
            dims = list(range(num_dims - len(given["normalized_shape"]), num_dims))
        else:
            dims = given.get("dim", 0)
            dims = [dims] if isinstance(dims, int) else dims
        if not dims or any((dim + num_dims if dim < 0 else dim) < count for dim in dims):
            return None
        return count if self._prefix(result) == count else None

    def _of_elements(self, tensors: list[Tensor], result: Tensor) -> int | None:
        count = self._prefix(result)
        for tensor in tensors:
            leading = self.leading(tensor)
            if leading is not None and (leading != count or tensor.dim() != result.dim()):
                return None
            if leading is None and count is not None:
                beyond = tensor.dim() - (result.dim() - count)  # dimensions that stand where positions do
                if any(size != 1 for size in tensor.shape[: max(0, beyond)]):
                    return None
        return count


def _memory_of(tensor: Tensor) -> int:
    """Returns what tells a tensor's memory, which it shares with its views, from others."""
    return tensor.untyped_storage()._cdata


def _written(func, args: tuple, kwargs: dict) -> Iterator[Tensor]:
    """Yields the tensors that an operation is given and writes to."""
    given = dict(zip((arg.name for arg in func._schema.arguments), args)) | kwargs
    for arg in func._schema.arguments:
        if arg.alias_info is not None and arg.alias_info.is_write:
            yield from (leaf for leaf in tree_leaves(given.get(arg.name)) if isinstance(leaf, Tensor))


def position_wise_mlp(module: nn.Module) -> str | None:
    """Tries to prove that a module is a position-wise MLP.

    It is one when its forward maps one tensor `(..., hidden_size)` to a tensor of the same shape, each position by
    itself, through at least two products with weights, of which one gives more features than `hidden_size`.

    Args:
        module (`nn.Module`): with its parameters in memory, or away.

    Returns:
        `str`, *optional*: what stands in the way; `None` where it is proven.
    """
    params = [*module.parameters()]
    if any(is_opaque(param) or is_dtensor(param) for param in params):
        return "its weights are quantized, or divided over tensor-parallel ranks"
    reasons: list[str] = []
    for hidden_size in sorted({size for param in params if param.dim() > 1 for size in param.shape}):
        found = [_try(module, hidden_size, num_dims) for num_dims in (len(POSITIONS), 1)]
        if not any(found):
            return None
        reasons += filter(None, found)
    mixes = (reason for reason in reasons if reason.endswith(NOT_KNOWN))  # it came so far with its own width alone
    return next(mixes, reasons[-1] if reasons else NO_SAME_SHAPE)


def has_one_argument(module: nn.Module) -> bool:
    """Whether a module's forward can be called with one tensor, and holds weights for two products."""
    try:
        params = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [param for param in params if param.default is param.empty and param.kind not in kinds]
    num_matrices = sum(param.dim() > 1 for param in module.parameters())
    return len(needed) == 1 and needed[0].kind is not inspect.Parameter.KEYWORD_ONLY and num_matrices > 1


def _try(module: nn.Module, hidden_size: int, num_dims: int) -> str:
    """Calls a module without data, with positions of so many dimensions. Returns what stands in the way; an empty text
    where it is an MLP."""
    steps: list[list] = []
    for positions in (POSITIONS, MORE_POSITIONS):
        reason = _call(module, hidden_size, positions[-num_dims:], steps)
        if reason:
            return reason
    return "" if steps[0] == steps[1] else FOLLOWS_SHAPE


def _call(module: nn.Module, hidden_size: int, positions: tuple[int, ...], steps: list[list]) -> str:
    """Calls a module without data, and adds its operations to `steps`. Returns as `_try` does."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    on_meta = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}
    dtype = next((param.dtype for param in module.parameters() if param.dim() > 1), None)
    given = torch.empty(*positions, hidden_size, dtype=dtype, device="meta")
    trace = _PositionTrace(given, list(on_meta.values()))
    try:
        with torch.no_grad(), _in_training(module), torch.random.fork_rng(devices=[]), trace:
            out = torch.func.functional_call(module, on_meta, (given,))
    except _Mixes as error:
        return str(error)
    except Exception as error:  # the module's own, of any kind
        return f"its forward cannot be called without data ({type(error).__name__})"
    if not isinstance(out, Tensor) or trace.leading(out) != len(positions) or out.shape != given.shape:
        return NO_SAME_SHAPE
    if trace.num_products < 2 or trace.width <= hidden_size:
        return "it has no inner activations that are wider than its output"
    steps.append(trace.steps)
    return ""


@contextmanager
def _in_training(module: nn.Module) -> Iterator[None]:
    """Lets a module compute as in training inside the context."""
    before = [(each, each.training) for each in module.modules()]
    module.train()
    try:
        yield
    finally:
        for each, training in before:
            each.training = training
