"""Functions that all ranks call together: they succeed on every rank, or raise on every rank."""

from collections.abc import Callable
from typing import TypeVar

from hf_zero.comm.base import Comm
from hf_zero.errors import CheckpointError, CommError, HfZeroError


Result = TypeVar("Result")

# How errors of what writes the files of `torch.save` are signed, and those of what reads them.
TORCH_WRITER, TORCH_READER = ("PytorchStreamWriter", "inline_container"), "PytorchStreamReader"


def run_on_all_ranks(
    comm: Comm, subject: str, act: Callable[[], Result], kind: type[HfZeroError] = CheckpointError
) -> Result:
    """Runs `act` on this rank, and raises on all ranks when it has failed on one of them.

    A rank that fails alone would leave the others waiting in their next collective: here they hear of it, and raise.

    Args:
        subject (`str`): what is being done to what, the beginning of the message on ranks where all went well.
        act (`Callable`): this rank's part. It contains no collective that a failure of its own could keep it from.
        kind (`type`): what is raised where another rank failed, or the operating system refused something.

    Returns:
        What `act` returned on this rank.

    Raises:
        `CheckpointError`, or `kind`: another rank failed, or the operating system refused something on this one.
        `CommError`: another rank was interrupted, and will not come to what follows.
        `Exception`: whatever else `act` raised on this rank.
    """
    box: list[Result] = []
    collect_from_all_ranks(comm, subject, lambda: box.append(act()), kind)
    return box[0]


def collect_from_all_ranks(
    comm: Comm, subject: str, act: Callable[[], Result], kind: type[HfZeroError] = CheckpointError
) -> list[Result]:
    """Runs `act` as `run_on_all_ranks` does, and returns the results of all ranks, in rank order.

    The results are small and can be pickled.
    """
    result, error = None, None
    try:
        result = act()
    except BaseException as caught:  # an interrupt too: the other ranks must not wait for this one
        error = _readable(caught, subject, kind)
    is_leaving = not isinstance(error, (Exception, type(None)))
    own = (result, None if error is None else f"{type(error).__name__}: {error}", is_leaving)
    outcomes = comm.all_gather_object(own, what=subject)
    if error is not None:
        raise error
    for rank, (_, failure, is_leaving) in enumerate(outcomes):
        if is_leaving:
            raise CommError(f"{subject}: rank {rank} was interrupted ({failure.rstrip(': ')})")
    for rank, (_, failure, _) in enumerate(outcomes):
        if failure is not None:
            raise kind(f"{subject}: rank {rank} failed: {failure}")
    return [outcome for outcome, *_ in outcomes]


def on_first(comm: Comm, act: Callable[[], Result]) -> Callable[[], Result | None]:
    """Returns `act` on rank 0, and a function that does nothing on the other ranks."""
    return act if comm.rank == 0 else lambda: None


def reraise(failure: BaseException | None) -> None:
    """Raises an error that was caught before; it is an `act` for `run_on_all_ranks`."""
    if failure is not None:
        raise failure


def _is_of_torchs_writer(message: str) -> bool:
    return TORCH_READER not in message and any(sign in message for sign in TORCH_WRITER)


def _readable(error: BaseException, subject: str, kind: type[HfZeroError]) -> BaseException:
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        reason = f"{error.strerror or error}{where}"
    elif isinstance(error, RuntimeError) and _is_of_torchs_writer(str(error)):
        reason = "torch.save could not write a file"  # it does not say why the system refused
    else:
        return error
    readable = kind(f"{subject}: {reason}; check that the folder exists, is writable and has room")
    readable.__cause__ = error
    return readable
