"""Functions that all ranks call together, which succeed on every rank or raise on every rank."""

from collections.abc import Callable
from typing import TypeVar

from hf_zero.comm.base import Comm
from hf_zero.errors import CheckpointError, CommError, HfZeroError


Result = TypeVar("Result")

# Signatures of the errors of `torch.save`'s file writer, and of `torch.load`'s reader.
TORCH_WRITER, TORCH_READER = ("PytorchStreamWriter", "inline_container"), "PytorchStreamReader"


def run_on_all_ranks(
    comm: Comm, subject: str, act: Callable[[], Result], kind: type[HfZeroError] = CheckpointError
) -> Result:
    """Runs `act` on every rank, and raises on all ranks if it fails on any of them.

    Otherwise a rank that fails alone would leave the others waiting in their next collective.

    Args:
        subject (`str`): the operation and its object. Starts the message on ranks that did not fail themselves.
        act (`Callable`): the work of this rank. It must not contain a collective that its own failure would skip.
        kind (`type`): the exception for a failure of another rank or an error of the operating system.

    Returns:
        The result of `act` on this rank.

    Raises:
        `CheckpointError`, or `kind`: another rank failed, or the operating system raised an error on this one.
        `CommError`: another rank was interrupted and will not take part in what follows.
        `Exception`: any other exception that `act` raised on this rank.
    """
    box: list[Result] = []
    collect_from_all_ranks(comm, subject, lambda: box.append(act()), kind)
    return box[0]


def collect_from_all_ranks(
    comm: Comm, subject: str, act: Callable[[], Result], kind: type[HfZeroError] = CheckpointError
) -> list[Result]:
    """Like `run_on_all_ranks`, but returns the results of all ranks in rank order. Results must be small and
    picklable."""
    result, error = None, None
    try:
        result = act()
    except BaseException as caught:  # including interrupts: the other ranks must not wait for this one
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
    """Returns `act` on rank 0, and a function that does nothing on other ranks."""
    return act if comm.rank == 0 else lambda: None


def reraise(failure: BaseException | None) -> None:
    """Raises an exception that was caught earlier, if any. For use as `act` of `run_on_all_ranks`."""
    if failure is not None:
        raise failure


def _is_of_torchs_writer(message: str) -> bool:
    return TORCH_READER not in message and any(sign in message for sign in TORCH_WRITER)


def _readable(error: BaseException, subject: str, kind: type[HfZeroError]) -> BaseException:
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        reason = f"{error.strerror or error}{where}"
    elif isinstance(error, RuntimeError) and _is_of_torchs_writer(str(error)):
        reason = "torch.save could not write a file"  # torch does not report the reason of the system
    else:
        return error
    readable = kind(f"{subject}: {reason}; check that the folder exists, is writable and has room")
    readable.__cause__ = error
    return readable
