"""The errors of hf_zero, one class for each kind. A message says the subject, what was found, what was expected, and
what to do."""

import difflib
from collections.abc import Iterable, Iterator


def size_text(nbytes: int) -> str:
    """Returns a size in words, for messages: 17 bytes, 3.4 KiB, 812.0 MiB, 15.4 GiB."""
    if nbytes < 1024:
        return f"{nbytes} bytes"
    unit = min((nbytes.bit_length() - 1) // 10, 4)
    return f"{nbytes / 1024**unit:,.1f} {('KiB', 'MiB', 'GiB', 'TiB')[unit - 1]}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the name in `known` that is most similar to `name`, or begins like it; `None` where none is similar."""
    known = sorted(known)
    heads = {key[: len(name) + 1]: key for key in reversed(known)}
    begins = [heads[head] for head in difflib.get_close_matches(name, list(heads), n=1, cutoff=0.85)]
    return next(iter(difflib.get_close_matches(name, known, n=1) or begins), None)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, its cause, the cause of that and so on, each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


class HfZeroError(Exception):
    """Base of all errors that hf_zero raises on purpose."""


class ConfigError(HfZeroError, ValueError):
    """A setting that cannot work, refused before anything is loaded."""


class DataError(HfZeroError, ValueError):
    """Input data that cannot be trained on: a missing column, an empty data set, an unreadable row."""


class CheckpointError(HfZeroError, RuntimeError):
    """A checkpoint that cannot be read or written: truncated, another shape, no space, no permission."""


class MissingCheckpointError(CheckpointError, ValueError):
    """A checkpoint that is missing. It is a `ValueError` too, as Trainer raises one."""


class StorageError(HfZeroError, RuntimeError):
    """An error of the files that tensors rest in during training: no such folder, no room, a read or write that the
    disk refused."""


class LifecycleError(HfZeroError, RuntimeError):
    """A call at the wrong time, such as a read of sharded data as if it were whole."""


class NonFiniteError(HfZeroError, FloatingPointError):
    """Gradients with an infinity or a NaN, on which no step was taken: names the rank and the first unit."""


class UnsupportedError(HfZeroError, NotImplementedError):
    """Something that cannot be sharded exactly, such as a double backward or an unknown optimizer."""


class CommError(HfZeroError, RuntimeError):
    """A collective that failed or did not finish: names the unit, the rank and whom it waited for."""


class HubError(HfZeroError, RuntimeError):
    """A hub that cannot be reached, or refuses: a wrong token, no permission, no such repository."""
