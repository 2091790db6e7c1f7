"""The tensors of a model, under the names that transformers writes."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, dtype, nn

from hf_zero.checkpoint.format import TensorEntry
from hf_zero.engine import ParamInfo


@dataclass(frozen=True)
class SavedTensor:
    """A parameter or buffer of a model, with its names."""

    name: str  # the engine's name of the parameter, or the first name of the buffer
    key: str  # in files that are written here
    aliases: tuple[str, ...]  # every name that it has in the model: more than one when it is tied
    dtype: dtype  # as saved
    shape: tuple[int, ...]  # of the whole tensor
    buffer: Tensor | None = None  # whole on every rank; None for a parameter

    @property
    def entry(self) -> TensorEntry:
        return TensorEntry(self.key, self.dtype, self.shape)

    def fill_buffer(self, read: Callable[[Tensor], None]) -> None:
        """Overwrites the buffer with what `read` puts into a 1-D tensor, also a buffer that is not contiguous."""
        assert self.buffer is not None, f"{self.name} is a parameter"
        flat = self.buffer.new_empty(self.buffer.numel())
        read(flat)
        self.buffer.copy_(flat.view(self.shape))


def saved_tensors(model: nn.Module, parameters: Sequence[ParamInfo]) -> list[SavedTensor]:
    """Returns the tensors of a model folder, in the order of `model.state_dict()`.

    Tied tensors appear once, under the name that the model's class declares as the source of the tie (its first name
    where nothing is declared). Buffers that the model does not persist and keys that it asks to leave out are absent.
    Parameters may be placeholders: identities and names count, no value is read.
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
    """Returns the tensors that have a name in `keys`, under the key given there. Other keys and names are aliases."""
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
    """Returns a list of names for a message: the first five, and how many more there are."""
    return ", ".join(list(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters and persistent buffers under all their names, in the order of the state dict."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = "." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}{dot}{name}", parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}{dot}{name}", buffer
