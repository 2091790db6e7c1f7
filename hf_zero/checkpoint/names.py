"""The tensors of a model under the names that transformers saves."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, dtype, nn

from hf_zero.checkpoint.safetensors import TensorEntry
from hf_zero.engine import ParamInfo


@dataclass(frozen=True)
class SavedTensor:
    """A parameter or buffer of a model, with its names."""

    name: str  # the engine's name of the parameter, or the first name of the buffer
    key: str  # name in saved files
    aliases: tuple[str, ...]  # all names in the model; several if it is tied
    dtype: dtype  # dtype in saved files
    shape: tuple[int, ...]  # shape of the full tensor
    buffer: Tensor | None = None  # replicated on every rank; None for a parameter

    @property
    def entry(self) -> TensorEntry:
        return TensorEntry(self.key, self.dtype, self.shape)


def saved_tensors(model: nn.Module, parameters: Sequence[ParamInfo]) -> list[SavedTensor]:
    """Returns the tensors to save, in the order of `model.state_dict()`.

    Tied tensors appear once, under the name that the model's class declares as the source of the tie, or the first
    name if none is declared. Excludes non-persistent buffers and `_keys_to_ignore_on_save`. Parameters may be
    placeholders, since no values are read.
    """
    info_of = {info.name: info for info in parameters}
    tie_targets = set(getattr(model, "all_tied_weights_keys", None) or ())
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    named = dict(named_tensors(model))
    names_of: dict[int, list[str]] = {}
    for name, tensor in named.items():
        names_of.setdefault(id(tensor), []).append(name)
    tensors = []
    for key, tensor in named.items():
        aliases = tuple(names_of[id(tensor)])
        info = next((info_of[alias] for alias in aliases if alias in info_of), None)
        is_parameter = isinstance(tensor, nn.Parameter)
        if (is_parameter and info is None) or left_out.intersection(aliases):
            continue
        if key != next((alias for alias in aliases if alias not in tie_targets), aliases[0]):
            continue
        if info is not None:
            tensors.append(SavedTensor(info.name, key, aliases, info.save_dtype, tuple(info.shape)))
        else:
            tensors.append(SavedTensor(key, key, aliases, tensor.dtype, tuple(tensor.shape), tensor.detach()))
    return tensors


def renamed(tensors: Sequence[SavedTensor], keys: Mapping[str, str | Sequence[str]]) -> list[SavedTensor]:
    """Returns the tensors that have a name in `keys`, with the key given there. Further keys become aliases."""
    chosen = []
    for saved in tensors:
        given: list[str] = []
        for name in dict.fromkeys((saved.name, *saved.aliases)):
            found = keys.get(name, ())
            given += [found] if isinstance(found, str) else found
        if given:
            chosen.append(replace(saved, key=given[0], aliases=(*saved.aliases, *given[1:])))
    return chosen


def shortened(names: Collection[str]) -> str:
    """Formats names for a message: the first five and the number of others."""
    return ", ".join(list(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters and persistent buffers under all their names, in state dict order."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = "." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}{dot}{name}", parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}{dot}{name}", buffer
