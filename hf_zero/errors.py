"""The exceptions of hf_zero, one class per kind. A message states the subject, what was found, what was expected, and
what to do."""

import difflib
from collections.abc import Iterable, Iterator


def size_text(nbytes: int) -> str:
    """Formats a size for messages: 17 bytes, 3.4 KiB, 812.0 MiB, 15.4 GiB."""
    if nbytes < 1024:
        return f"{nbytes} bytes"
    unit = min((nbytes.bit_length() - 1) // 10, 4)
    return f"{nbytes / 1024**unit:,.1f} {('KiB', 'MiB', 'GiB', 'TiB')[unit - 1]}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the name in `known` that is most similar to `name` or starts similarly, or `None` if none is similar."""
    known = sorted(known)
    heads = {key[: len(name) + 1]: key for key in reversed(known)}
    begins = [heads[head] for head in difflib.get_close_matches(name, list(heads), n=1, cutoff=0.85)]
    return next(iter(difflib.get_close_matches(name, known, n=1) or begins), None)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception and its chain of causes and contexts, each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


class HfZeroError(Exception):
    """Base class of all exceptions that hf_zero raises deliberately."""


class ConfigError(HfZeroError, ValueError):
    """An invalid setting, raised before anything is loaded."""


class DataError(HfZeroError, ValueError):
    """Input data that cannot be used for training: a missing column, an empty dataset, an unreadable row."""


class CheckpointError(HfZeroError, RuntimeError):
    """A checkpoint that cannot be read or written: truncated, wrong shape, no space, no permission."""


class MissingCheckpointError(CheckpointError, ValueError):
    """A missing checkpoint. Also a `ValueError`, like the one that Trainer raises."""


class StorageError(HfZeroError, RuntimeError):
    """An error of the files used for offload to disk: no such folder, no space, a failed read or write."""


class LifecycleError(HfZeroError, RuntimeError):
    """A call at the wrong time, such as reading sharded parameters as if they were gathered."""


class NonFiniteError(HfZeroError, FloatingPointError):
    """Gradients with an infinity or a NaN, for which no step was taken. Names the first unit."""


class UnsupportedError(HfZeroError, NotImplementedError):
    """A feature that cannot be sharded exactly, such as double backward or an unknown optimizer."""


class CommError(HfZeroError, RuntimeError):
    """A collective that failed or timed out. Names the unit, the rank and the rank that it waited for."""


class HubError(HfZeroError, RuntimeError):
    """A hub that cannot be reached or rejects a request: wrong token, no permission, no such repository."""
