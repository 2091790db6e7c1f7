"""Placeholders of parameters whose values are sharded, and the class that raises when they are read or written."""

from collections.abc import Iterable
from functools import cache, partialmethod
from types import new_class
from typing import NoReturn, cast

import torch
from torch import Tensor, nn
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves

from hf_zero.errors import LifecycleError


AWAY = (
    "{name}: is used ({operator}) while its values are sharded over the ranks; read or write it inside `with "
    "hf_zero.gathered(parameter):` on all ranks (writeback=True keeps writes; if a loss reads it, run the backward "
    "inside, too), save with hf_zero.save_pretrained(model, folder), average weights over sharded.named_shards(), or "
    "use stage 2"
)

COMPILED = (
    "{name}: torch.compile(model) reads parameters whose values are sharded; compile the blocks instead of the "
    "model, with hf_zero.compile_blocks(model) or --torch_compile, or use stage 2"
)

NAME = "_hf_zero_name"  # attribute of a sharded parameter, for messages
ON_GRAD_READ = "_hf_zero_on_grad_read"  # attribute of a sharded parameter: a callback that runs before `.grad` is read

_PROPERTIES = """
    shape dtype device layout ndim nbytes itemsize name names output_nr grad_fn is_leaf retains_grad _version _base
    is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr
    is_vulkan is_xla is_xpu
""".split()
_WRITABLE_PROPERTIES = ["requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks"]
_METHODS = """
    size numel nelement dim ndimension element_size stride storage_offset get_device is_floating_point is_complex
    is_signed is_contiguous is_inference is_same_size _is_view requires_grad_ retain_grad register_hook
    register_post_accumulate_grad_hook _use_count new_empty new_full new_ones new_tensor new_zeros __hash__ __len__
    __dir__
""".split()
_FUNCTIONS = """
    empty_like full_like ones_like rand_like randint_like randn_like zeros_like is_complex is_floating_point
    is_same_size is_signed numel result_type
""".split()
# Functions that read no values. A view in the parameter's own shape is allowed, because AccumulateGrad nodes are
# reached through it.
_ANSWERED = {getattr(Tensor, name).__get__ for name in _PROPERTIES + _WRITABLE_PROPERTIES if hasattr(Tensor, name)}
_ANSWERED |= {getattr(Tensor, name).__set__ for name in _WRITABLE_PROPERTIES}
_ANSWERED |= {getattr(Tensor, name) for name in _METHODS} | {getattr(torch, name) for name in _FUNCTIONS}
_ANSWERED |= {torch.autograd.grad, torch.autograd.backward}
_GET_GRAD = Tensor.grad.__get__
_VIEWS_FOR_NODES = {Tensor.expand_as, Tensor.view_as}
_OF_DTENSORS = ("to_local", "full_tensor", "redistribute")  # methods that torch does not dispatch


class AwayParameter:
    """Base of the classes of parameters whose values are sharded. The object stays the same, and its shape, dtype,
    device, gradient and hooks can be used. Any other operator called on it in Python raises with its name, on any
    device and without reading a value. Autograd's use of saved tensors does not go through this class."""

    shown_class: type  # the parameter's class while it is unsharded

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in _ANSWERED or (func in _VIEWS_FOR_NODES and args[0] is args[1]):
            if func == _GET_GRAD and (call := vars(args[0]).get(ON_GRAD_READ)) is not None:
                call()
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        away = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, AwayParameter))
        _refuse(away, resolve_name(func) or getattr(func, "__name__", func))

    def __repr__(self) -> str:
        param = cast(Tensor, self)
        return f"{type(self).__name__}(shape={list(param.shape)}, dtype={param.dtype}, values are sharded)"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


def _refuse(away: AwayParameter, operator: object, *_args, **_kwargs) -> NoReturn:
    text = COMPILED if torch.compiler.is_compiling() else AWAY
    raise LifecycleError(text.format(name=vars(away).get(NAME, "a parameter"), operator=operator))


@cache
def _away_class(shown_class: type) -> type:
    def fill(namespace: dict) -> None:
        # libraries check class names, such as bitsandbytes' `Params4bit`
        namespace |= {"shown_class": shown_class, "__module__": shown_class.__module__}
        for method in _OF_DTENSORS if hasattr(shown_class, "_local_tensor") else ():
            namespace[method] = partialmethod(_refuse, method)

    return new_class(shown_class.__name__, (AwayParameter, shown_class), exec_body=fill)


def hide(params: Iterable[nn.Parameter]) -> None:
    """Makes the parameters raise when their values are used."""
    for param in params:
        param.__class__ = _away_class(param.__class__)


def show(params: Iterable[nn.Parameter]) -> None:
    """Undoes `hide` for hidden parameters."""
    for param in params:
        if isinstance(param, AwayParameter):
            param.__class__ = param.shown_class


def class_of(param: Tensor) -> type:
    """Returns the class of a parameter while it is unsharded and its gradient is not watched (`guards`)."""
    return param.shown_class if isinstance(param, AwayParameter) else vars(type(param)).get("watched", type(param))


def in_backward() -> bool:
    """Whether autograd's engine is running on this thread."""
    return torch._C._current_graph_task_id() != -1


def is_transformed() -> bool:
    """Whether a transform of `torch.func` is running, such as `grad` or `vmap`."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class Placeholders:
    """Creates the data of parameters whose values are sharded: NaN, or 0 for dtypes without NaN, of any shape, in the
    memory of one element."""

    def __init__(self, device: torch.device):
        self._device = device
        self._numbers: dict[torch.dtype, Tensor] = {}

    def of(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns a placeholder."""
        if dtype not in self._numbers:
            away = float("nan") if dtype.is_floating_point else 0
            self._numbers[dtype] = torch.full((), away, dtype=dtype, device=self._device)
        return self._numbers[dtype].expand(shape)
