"""Finds flags with which a run fits, by predicting it again with them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from hf_zero.config import ZeroConfig
from hf_zero.errors import HfZeroError, size_text
from hf_zero.planner.advice import USABLE_SHARE, nothing_fits
from hf_zero.planner.prediction import Prediction


# Candidate numbers of ranks that share each sequence.
GROUP_SIZES = (2, 4, 8)


@dataclass(frozen=True)
class Flag:
    """A flag that reduces the memory of a run."""

    text: str  # as on the command line
    settings: Mapping[str, Any] = field(default_factory=dict)  # fields of `ZeroConfig`
    checkpoints: bool = False  # whether it enables gradient checkpointing


@dataclass(frozen=True)
class Remedy:
    """Flags with which a run fits, or with which it still does not fit."""

    flags: list[Flag]  # if it fits, all of them are necessary
    before: Prediction  # the run without the flags
    after: Prediction  # the run with the flags
    limit: int  # memory available to tensors, in bytes

    @property
    def fits(self) -> bool:
        """Whether the run fits with the flags."""
        return self.after.needed_nbytes <= self.limit

    @property
    def text(self) -> str:
        """The flags as on the command line."""
        return " ".join(flag.text for flag in self.flags)

    def render(self) -> str:
        """Returns two lines: the use of memory, and the flags to add."""
        step, after = self.before.step, size_text(self.after.needed_nbytes)
        taken = {"model states": self.before.resting_nbytes}
        if step is not None:
            taken |= {"activations": step.activation_nbytes, "logits": step.head_nbytes}
        largest_first = sorted(taken.items(), key=lambda pair: -pair[1])
        parts = ", ".join(f"{name} take {size_text(max(0, nbytes))}" for name, nbytes in largest_first)
        needed = size_text(self.before.needed_nbytes)
        lines = [f"it does not fit into {size_text(self.limit)} for tensors: it needs {needed}, of which {parts}"]
        if self.fits:
            return "\n".join([*lines, f"it fits with {self.text}: {after}"])
        least = f"with {self.text} it takes {after}" if self.flags else "no flags take less"
        return "\n".join([*lines, nothing_fits(least)])


def further_flags(prediction: Prediction) -> Iterator[Flag]:
    """Yields the flags that may be added to a run in order of increasing cost: none, then communication of parameters,
    computation, copies to the host, fewer sequences, and updates on the host."""
    config, num_ranks = prediction.config, prediction.num_ranks
    for stage in range(config.stage + 1, 4):
        yield Flag(f"--zero_stage {stage}", {"stage": stage})
    if config.chunked_loss == "off":  # not "on", which trainers with their own loss reject
        yield Flag("--zero_chunked_loss auto", {"chunked_loss": "auto"})
    if config.tiled_mlp == 1:
        yield Flag("--zero_tiled_mlp auto", {"tiled_mlp": "auto"})
    if not prediction.gradient_checkpointing:
        yield Flag("--gradient_checkpointing", checkpoints=True)
    if not config.offload_activations:
        yield Flag("--zero_offload_activations", {"offload_activations": True})
    for parts in GROUP_SIZES:
        if parts > config.sequence_parallel and num_ranks % parts == 0:
            yield Flag(f"--zero_sequence_parallel {parts}", {"sequence_parallel": parts})
    if config.offload == "none":
        yield Flag("--zero_offload optimizer", {"offload": "optimizer"})
    if config.offload != "params":
        yield Flag("--zero_offload params", {"offload": "params"})


def remedy(
    predict: Callable[[ZeroConfig, bool], Prediction],
    prediction: Prediction,
    memory_nbytes: int,
    *,
    refuse: Callable[[ZeroConfig, bool], object] = lambda *_: None,
) -> Remedy | None:
    """Finds the cheapest flags with which a run fits, and removes those that are not necessary, the most expensive
    first. Returns `None` if the run already fits, or its memory is not known.

    Args:
        predict (`Callable`): predicts the run, given its settings and whether blocks are checkpointed.
        prediction (`Prediction`): the prediction without further flags.
        memory_nbytes (`int`): memory of one device, of which tensors may take `USABLE_SHARE`.
        refuse (`Callable`): takes the same arguments as `predict`; raises an `HfZeroError` for invalid settings.
    """
    limit = int(USABLE_SHARE * memory_nbytes)
    if prediction.needed_nbytes <= limit or prediction.step is None:
        return None
    trial = _Trial(predict, prediction, limit, refuse)
    flags = trial.possible(further_flags(prediction))
    while (after := trial.predicted(flags)) is None:  # some settings are only rejected in a step
        flags = trial.without_refused(flags)
    if not trial.fits(flags):
        return Remedy(_last_of_each(flags), prediction, after, limit)
    too_few, enough = 0, len(flags)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if trial.fits(flags[:middle]) else (middle, enough)
    kept = flags[:enough]
    for flag in kept[-2::-1]:
        fewer = [each for each in kept if each is not flag]
        kept = fewer if trial.fits(fewer) else kept
    after = trial.predicted(kept)
    assert after is not None  # it fits
    return Remedy(kept, prediction, after, limit)


class _Trial:
    """Cached predictions of a run with added flags. The arguments are those of `remedy`."""

    def __init__(self, predict: Callable, asked: Prediction, limit: int, refuse: Callable):
        self._predict, self._asked, self._limit, self._refuse = predict, asked, limit, refuse
        self._found: dict[tuple[ZeroConfig, bool], Prediction | None] = {self._with([]): asked}

    def possible(self, flags: Iterator[Flag]) -> list[Flag]:
        """Returns the flags that are valid, each together with those before it."""
        found: list[Flag] = []
        for flag in flags:
            try:
                self._refuse(*self._with([*found, flag]))
            except HfZeroError:
                continue
            found.append(flag)
        return found

    def without_refused(self, flags: list[Flag]) -> list[Flag]:
        """Returns `flags`, which are not valid together, without the first one that is not valid in combination with
        the flags before it."""
        possible, refused = 0, len(flags)
        while refused - possible > 1:
            middle = (possible + refused) // 2
            is_refused = self.predicted(flags[:middle]) is None
            possible, refused = (possible, middle) if is_refused else (middle, refused)
        return flags[:possible] + flags[refused:]

    def fits(self, flags: list[Flag]) -> bool:
        found = self.predicted(flags)
        return found is not None and found.needed_nbytes <= self._limit

    def predicted(self, flags: list[Flag]) -> Prediction | None:
        """Returns the prediction, or `None` if the settings are not valid or the memory is not known."""
        try:
            way = self._with(flags)
        except HfZeroError:  # for example, offloaded parameters at a stage below 3
            return None
        if way not in self._found:
            self._found[way] = None
            with suppress(HfZeroError):
                found = self._predict(*way)
                self._found[way] = None if found.step is None else found
        return self._found[way]

    def _with(self, flags: list[Flag]) -> tuple[ZeroConfig, bool]:
        settings = {key: value for flag in flags for key, value in flag.settings.items()}
        switch = self._asked.gradient_checkpointing or any(flag.checkpoints for flag in flags)
        return replace(self._asked.config, **settings), switch


def _last_of_each(flags: list[Flag]) -> list[Flag]:
    """Removes flags that are overridden by later ones."""
    return list({flag.text.split()[0]: flag for flag in flags}.values())
