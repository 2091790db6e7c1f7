"""The tensors that a model folder holds, under the names that transformers itself writes."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_zero.checkpoint.format import TensorEntry
from hf_zero.engine import ParamInfo


@dataclass(frozen=True)
class SavedTensor:
    """A parameter or buffer of a model and the names it goes by.

    Args:
        name (`str`): the engine's name of the parameter, or the first name of the buffer.
        key (`str`): its name in files that are written here.
        aliases (`tuple[str, ...]`): every name it has in the model: more than one when it is tied.
        dtype (`torch.dtype`): as saved.
        shape (`tuple[int, ...]`): of the whole tensor.
        buffer (`Tensor`, *optional*): the buffer itself, whole on every rank; `None` for a parameter.
    """

    name: str
    key: str
    aliases: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    buffer: Tensor | None = None

    @property
    def entry(self) -> TensorEntry:
        return TensorEntry(self.key, self.dtype, self.shape)

    def fill_buffer(self, read: Callable[[Tensor], None]) -> None:
        """Overwrites the buffer by what `read` puts into a 1-D tensor. One that is not contiguous has no flat view."""
        assert self.buffer is not None, f"{self.name} is a parameter"
        flat = self.buffer.new_empty(self.buffer.numel())
        read(flat)
        self.buffer.copy_(flat.view(self.shape))


def saved_tensors(model: nn.Module, parameters: Sequence[ParamInfo]) -> list[SavedTensor]:
    """The tensors of a model folder, in the order of `model.state_dict()`.

    Tied tensors appear once, under the name that the model's class declares as the source of the tie (its first name
    where nothing is declared). Buffers that the model does not persist and keys that it asks to leave out are absent.

    Args:
        model (`nn.Module`): parameters may be placeholders: identities and names count, no value is read.
        parameters (`Sequence[ParamInfo]`): the engine's parameters.
    """
    info_of = {info.name: info for info in parameters}
    tie_targets = set(getattr(model, "all_tied_weights_keys", None) or ())
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tensors = []
    for aliases, tensor in _tensors_with_aliases(model):
        info = next((info_of[alias] for alias in aliases if alias in info_of), None)
        is_parameter = isinstance(tensor, nn.Parameter)
        if (is_parameter and info is None) or left_out.intersection(aliases):
            continue
        key = next((alias for alias in aliases if alias not in tie_targets), aliases[0])
        if info is not None:
            tensors.append(SavedTensor(info.name, key, aliases, info.save_dtype, tuple(info.shape)))
        else:
            tensors.append(SavedTensor(key, key, aliases, tensor.dtype, tuple(tensor.shape), tensor.detach()))
    position = {name: index for index, (name, _) in enumerate(named_tensors(model))}
    return sorted(tensors, key=lambda saved: position[saved.key])


def renamed(tensors: Sequence[SavedTensor], keys: Mapping[str, str]) -> list[SavedTensor]:
    """Returns the tensors of which a name is in `keys`, under the key given there; further names are aliases."""
    chosen = []
    for saved in tensors:
        given = [keys[name] for name in dict.fromkeys((saved.name, *saved.aliases)) if name in keys]
        if given:
            aliases = (*saved.aliases, *given[1:])
            chosen.append(SavedTensor(saved.name, given[0], aliases, saved.dtype, saved.shape, saved.buffer))
    return chosen


def shortened(names: Collection[str], limit: int = 5) -> str:
    """Shortens a list of names for a message: the first few, and how many more."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(list(names)[:limit]) + more


def _tensors_with_aliases(model: nn.Module) -> list[tuple[tuple[str, ...], Tensor]]:
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return [(tuple(names[identity]), tensor) for identity, tensor in tensors.items()]


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers under all their names, in the order of the state dict."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = "." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}{dot}{name}", parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}{dot}{name}", buffer
