"""The granularity at which an optimizer's parameters may be split: elements, blocks, or full parameters."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.engine.divided import is_divided
from hf_zero.errors import ConfigError, LifecycleError, UnsupportedError
from hf_zero.optim.combined import CombinedOptimizer


# Optimizers that update each element from its own history only, by package and class name. A class with the same name
# in another package may combine elements, for example in a normalized mask or centralized gradients.
ELEMENTWISE = {
    "torch": frozenset("SGD Adam AdamW Adagrad RMSprop NAdam RAdam Adamax ASGD Rprop Adadelta".split()),
    "bitsandbytes": frozenset(
        "SGD SGD32bit Adam Adam32bit PagedAdam PagedAdam32bit AdamW AdamW32bit PagedAdamW PagedAdamW32bit Adagrad "
        "Adagrad32bit RMSprop RMSprop32bit Lion Lion32bit PagedLion PagedLion32bit AdEMAMix AdEMAMix32bit "
        "PagedAdEMAMix PagedAdEMAMix32bit".split()
    ),
    "schedulefree": frozenset(("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree")),
    "lion_pytorch": frozenset(("Lion",)),
    "apex": frozenset(("FusedAdam",)),
    "deepspeed": frozenset(("FusedAdam",)),
}

# Optimizers with quantized state, in blocks of elements that share a scale.
BLOCKWISE = {
    "torchao": frozenset("Adam8bit AdamW8bit Adam4bit AdamW4bit AdamFp8 AdamWFp8".split()),
    "bitsandbytes": frozenset(
        "Adam8bit AdamW8bit PagedAdam8bit PagedAdamW8bit Lion8bit PagedLion8bit RMSprop8bit AdEMAMix8bit".split()
    ),
}

# Optimizers that combine the elements of a parameter, but not several parameters.
WHOLE = {"torch": frozenset(("Muon", "Adafactor")), "transformers": frozenset(("Adafactor",))}

# Both packages quantize the state of parameters with at least this many elements.
MIN_QUANTISED_NUMEL = 4096
# Elements of a block in bitsandbytes; torchao's optimizers have an attribute for it.
BLOCK_NUMEL = 256


@dataclass(frozen=True)
class ShardGranularity:
    """The sizes of pieces into which the parameters of an optimizer may be split."""

    block: int  # pieces end at multiples of this, counted from the start of the parameter; 0: parameters are not split
    min_numel: int = 0  # minimum size of a piece

    @property
    def is_elementwise(self) -> bool:
        return self.block == 1


ELEMENT = ShardGranularity(1)
PARAMETER = ShardGranularity(0)


def inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Returns the optimizers in a combined one, or the optimizer itself. Raises [`ConfigError`] for other objects."""
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        raise ConfigError(
            f"ShardedOptimizer: {str(optimizer)[:60]!r} is of type {type(optimizer).__name__}; pass a class such as "
            "torch.optim.AdamW, or an optimizer on model.parameters()"
        )
    return optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [optimizer]


def granularity_of(optimizer: torch.optim.Optimizer) -> ShardGranularity:
    """Returns the granularity of an optimizer. Raises [`UnsupportedError`] for unknown optimizers."""
    cls = type(optimizer)
    refuse_unknown(cls)
    if _declares(cls, "elementwise"):
        return ELEMENT
    if _is_listed(cls, WHOLE) or _declares(cls, "whole_parameters") or _looks_at_whole(optimizer):
        return PARAMETER
    if _has_overrides(optimizer) or getattr(getattr(optimizer, "args", None), "optim_bits", None) == 8:
        # the class may be named like its 32-bit variant
        return ShardGranularity(BLOCK_NUMEL, optimizer.args.min_8bit_size)
    if _is_listed(cls, BLOCKWISE):
        return ShardGranularity(optimizer.block_size, MIN_QUANTISED_NUMEL)
    return ELEMENT


def refuse_unknown(cls: type) -> None:
    """Raises [`UnsupportedError`] for optimizers that are not known to update elements, blocks or parameters
    independently."""
    tables = (ELEMENTWISE, BLOCKWISE, WHOLE)
    declares = (
        issubclass(cls, CombinedOptimizer) or _declares(cls, "elementwise") or _declares(cls, "whole_parameters")
    )
    if not declares and not any(_is_listed(cls, table) for table in tables):
        known = sorted({name for table in tables for names in table.values() for name in names})
        raise UnsupportedError(
            f"optimizer {cls.__module__}.{cls.__qualname__}: is not known to update each element, block or parameter "
            f"by itself, so it cannot run on shards; use one of {', '.join(known)} from {', '.join(ELEMENTWISE)}, "
            "torchao or transformers, or set `elementwise = True` or `whole_parameters = True` on this class if it "
            "does"
        )


def _is_listed(cls: type, table: Mapping[str, Collection[str]]) -> bool:
    """Whether a class is in a table, by its name and the package that defines it."""
    return cls.__name__ in table.get(cls.__module__.partition(".")[0], ())


def _declares(cls: type, name: str) -> bool:
    """Whether a class itself sets the attribute. Base classes do not count: a subclass may combine more elements."""
    return bool(vars(cls).get(name, False))


def _looks_at_whole(optimizer: torch.optim.Optimizer) -> bool:
    """Whether settings make an elementwise or blockwise optimizer combine all elements of a parameter: bitsandbytes'
    bounds on the norms of updates and gradients, or lion_pytorch's cautious mask."""
    manager, args = getattr(optimizer, "mng", None), getattr(optimizer, "args", None)
    own = [vars(args)] if hasattr(args, "__dict__") else []
    overrides = [*manager.pid2config.values(), *manager.index2config.values()] if manager is not None else []
    overrides += [config for *_, config in getattr(manager, "module_weight_config_triple", ())]
    return any(
        settings.get("max_unorm", 0.0) > 0.0
        or settings.get("percentile_clipping", 100) < 100
        or settings.get("cautious_factor", 1.0) < 1.0
        for settings in (*own, *overrides, *optimizer.param_groups)
    )


def refuse_divided(optimizer: torch.optim.Optimizer, granularities: list[ShardGranularity]) -> None:
    """Raises [`UnsupportedError`] for optimizers of full parameters if tensor-parallel ranks divide the parameters."""
    for group, granularity in zip(optimizer.param_groups, granularities):
        if granularity == PARAMETER and any(is_divided(param) for param in group["params"]):
            raise UnsupportedError(
                f"optimizer {type(optimizer).__name__}: updates full parameters, but tensor-parallel ranks hold parts "
                "of them; use an elementwise optimizer, such as AdamW"
            )


def has_early_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fresh optimizer already has state, because its class creates it in the constructor (Adagrad). Raises
    [`LifecycleError`] if it has state because it has stepped."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state[p] for p in params if p in optimizer.state]
    if any(float(state.get("step", 1)) > 0 for state in states):
        raise LifecycleError(
            f"{type(optimizer).__name__}: has already stepped on full parameters; pass a fresh optimizer"
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
    """Raises [`ConfigError`] for optimizers whose masters or state cannot be read from disk in pieces.

    Args:
        inner_of (iterable): the optimizer of each group.
        others (collection): the optimizers that are not elementwise.
        try_state (`Callable`): returns the state that a group's optimizer creates for a few elements; stacked state of
            several values per element is not supported.
    """
    for group, inner in enumerate(inner_of):
        if inner in others or hasattr(inner, "eval"):
            reason = "needs all masters at once"
        elif any(isinstance(v, Tensor) and v.dim() > 1 for v in try_state(group, torch.float32).values()):
            reason = "stacks several values per element in one state tensor"
        else:
            continue
        raise ConfigError(
            f"offload_dir: {type(inner).__name__} {reason}; use another elementwise optimizer, such as AdamW, or "
            "offload to host memory, without offload_dir"
        )
