"""bitsandbytes' settings for single parameters: Trainer asks for 32 bits for embeddings."""

from collections.abc import Iterable

import torch

from hf_zero.optim.flat_slices import FlatSlice


def carry_overrides(optimizer: torch.optim.Optimizer, slices: Iterable[FlatSlice]) -> None:
    """Applies bitsandbytes' overrides for parameters to the slices of them.

    The optimizer gets a manager of its own: the package's is one for all optimizers of the process, and goes by `id`s
    of parameters that may be gone.

    Args:
        optimizer (`torch.optim.Optimizer`): any; only those of bitsandbytes have such settings.
        slices (iterable of `FlatSlice`): what it updates.
    """
    manager = getattr(optimizer, "mng", None)
    if manager is None:
        return
    settings = dict(manager.pid2config)
    for module, name, values in manager.module_weight_config_triple:
        settings[id(getattr(module, name))] = values
    optimizer.mng = own = object.__new__(type(manager))
    own.initialize()
    for flat_slice in slices:
        found = [settings.get(id(flat_slice.flat.params[index])) for index in flat_slice.indices]
        if found and found[0] is not None:
            own.pid2config[id(flat_slice.param)] = found[0]
