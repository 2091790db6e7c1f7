"""bitsandbytes' settings for single parameters: Trainer asks for 32 bits for embeddings."""

from collections.abc import Iterable

import torch

from hf_zero.optim.runs import Run


def carry_overrides(optimizer: torch.optim.Optimizer, runs: Iterable[Run]) -> None:
    """Lets what was said of parameters hold for the runs of them.

    The optimizer gets a manager of its own: the package's is one for all optimizers of the process, and goes by `id`s
    of parameters that may be gone.

    Args:
        optimizer (`torch.optim.Optimizer`): any; only those of bitsandbytes have such settings.
        runs (iterable of `Run`): what it updates.
    """
    manager = getattr(optimizer, "mng", None)
    if manager is None:
        return
    settings = dict(manager.pid2config)
    for module, name, values in manager.module_weight_config_triple:
        settings[id(getattr(module, name))] = values
    optimizer.mng = own = object.__new__(type(manager))
    own.initialize()
    for run in runs:
        found = [settings.get(id(run.flat.params[index])) for index in run.indices]
        if found and found[0] is not None:
            own.pid2config[id(run.param)] = found[0]
