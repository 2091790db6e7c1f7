"""The granularity in which an optimizer's parameters may be cut: elements, blocks, or whole parameters."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.engine.divided import is_divided
from hf_zero.errors import ConfigError, LifecycleError, UnsupportedError
from hf_zero.optim.combined import CombinedOptimizer


# Optimizers whose update of an element depends on that element's own history alone, by class name.
ELEMENTWISE = frozenset(
    "SGD Adam AdamW Adagrad RMSprop NAdam RAdam Adamax ASGD Rprop Adadelta Lion Lion32bit FusedAdam "
    "AdEMAMix AdamWScheduleFree RAdamScheduleFree SGDScheduleFree".split()
)

# Optimizers whose state is quantised in blocks of elements that share a scale (torchao's and bitsandbytes').
BLOCKWISE = frozenset(
    "Adam8bit AdamW8bit Adam4bit AdamW4bit AdamFp8 AdamWFp8 PagedAdam8bit PagedAdamW8bit Lion8bit PagedLion8bit "
    "RMSprop8bit AdEMAMix8bit".split()
)

# Optimizers that look at a parameter as a whole, but at no other.
WHOLE = frozenset("Muon Adafactor".split())

# Both packages quantise the state of a parameter from so many elements on.
MIN_QUANTISED_NUMEL = 4096
# Elements of a block in bitsandbytes; torchao's optimizers say theirs.
BLOCK_NUMEL = 256


@dataclass(frozen=True)
class ShardGranularity:
    """The sizes in which the parameters of an optimizer may be cut."""

    block: int  # cuts lie at multiples of so many elements, counted from the parameter's first; 0: it is never cut
    min_numel: int = 0  # of every piece

    @property
    def is_elementwise(self) -> bool:
        return self.block == 1


ELEMENT = ShardGranularity(1)
PARAMETER = ShardGranularity(0)


def inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Returns the optimizers that a combined one is made of, or the optimizer itself. Raises [`ConfigError`] for what
    is no optimizer."""
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        raise ConfigError(
            f"ShardedOptimizer: {str(optimizer)[:60]!r} is of type {type(optimizer).__name__}; give a class such as "
            "torch.optim.AdamW, or an optimizer on model.parameters()"
        )
    return optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [optimizer]


def granularity_of(optimizer: torch.optim.Optimizer) -> ShardGranularity:
    """Returns how finely the parameters of an optimizer may be cut. Raises [`UnsupportedError`] where that is not
    known."""
    cls = type(optimizer)
    refuse_unknown(cls)
    if getattr(cls, "elementwise", False):
        return ELEMENT
    if cls.__name__ in WHOLE or getattr(cls, "whole_parameters", False):
        return PARAMETER
    if _has_overrides(optimizer) or getattr(getattr(optimizer, "args", None), "optim_bits", None) == 8:
        return ShardGranularity(
            BLOCK_NUMEL, optimizer.args.min_8bit_size
        )  # the class may be named as the one with 32 bits
    if cls.__name__ in BLOCKWISE:
        return ShardGranularity(optimizer.block_size, MIN_QUANTISED_NUMEL)
    return ELEMENT


def refuse_unknown(cls: type) -> None:
    """Refuses optimizers that are not known to update elements, blocks or parameters by themselves."""
    known = ELEMENTWISE | BLOCKWISE | WHOLE
    declares = issubclass(cls, CombinedOptimizer) or any(
        getattr(cls, name, False) for name in ("elementwise", "whole_parameters")
    )
    if cls.__name__ not in known and not declares:
        raise UnsupportedError(
            f"optimizer {cls.__name__}: is not known to update each element, block or parameter by itself, so it "
            f"cannot run on shards; use one of {', '.join(sorted(known))}, or set `elementwise = True` or "
            "`whole_parameters = True` on a class that does"
        )


def refuse_divided(optimizer: torch.optim.Optimizer, granularities: list[ShardGranularity]) -> None:
    """Refuses optimizers of whole parameters where tensor-parallel ranks divide these."""
    for group, granularity in zip(optimizer.param_groups, granularities):
        if granularity == PARAMETER and any(is_divided(param) for param in group["params"]):
            raise UnsupportedError(
                f"optimizer {type(optimizer).__name__}: updates whole parameters, of which tensor-parallel ranks have "
                "a part each; use one that updates each element by itself, such as AdamW"
            )


def has_early_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fresh optimizer has state already, because its class makes it when it is built (Adagrad). Raises
    [`LifecycleError`] when it has state because it has stepped."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state[p] for p in params if p in optimizer.state]
    if any(float(state.get("step", 1)) > 0 for state in states):
        raise LifecycleError(
            f"{type(optimizer).__name__}: has stepped on whole parameters already; give a fresh optimizer"
        )
    return bool(states)


def _has_overrides(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer of bitsandbytes has overrides for some parameters."""
    manager = getattr(optimizer, "mng", None)
    return manager is not None and bool(manager.pid2config or manager.module_weight_config_triple)


def refuse_in_files(
    inner_of: Iterable[torch.optim.Optimizer],
    others: Collection[torch.optim.Optimizer],
    try_state: Callable[[int, torch.dtype], dict],
) -> None:
    """Refuses optimizers, one for each group, whose masters or state cannot come from the disk a piece at a time:
    `others`, which are not elementwise, and those that by `try_state` stack state of a few elements of a group."""
    for group, inner in enumerate(inner_of):
        if inner in others or hasattr(inner, "eval"):
            reason = "needs more than a part of the masters at a time"
        elif any(isinstance(v, Tensor) and v.dim() > 1 for v in try_state(group, torch.float32).values()):
            reason = "keeps more than one value for each element in one tensor of its state"
        else:
            continue
        raise ConfigError(
            f"offload_dir: {type(inner).__name__} {reason}; use another elementwise optimizer, such as AdamW, or "
            "offload to the host's memory, without offload_dir"
        )
