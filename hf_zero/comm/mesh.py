"""Two axes of ranks: those that hold different parts of the model, and those that hold the same and see other data."""

from datetime import timedelta

import torch.distributed as dist

from hf_zero.errors import ConfigError


def refuse_dividing(group: dist.ProcessGroup | None, dividing: dist.ProcessGroup) -> None:
    """Refuses data-parallel ranks that hold different parts of the model.

    Raises:
        `ConfigError`: naming them.
    """
    peers = set(dist.get_process_group_ranks(dividing)) & set(dist.get_process_group_ranks(group or dist.group.WORLD))
    if len(peers) > 1:
        raise ConfigError(
            f"group: ranks {sorted(peers)} hold different parts of the model, so they cannot be data-parallel ranks "
            "of one group; leave it out, or give the mesh's other axis, such as mesh['fsdp'].get_group()"
        )


def ranks_alike(dividing: dist.ProcessGroup, timeout_seconds: float | None) -> dist.ProcessGroup:
    """The group of the ranks of the world that hold the same parts as this one. All ranks of the world call it.

    Raises:
        `ConfigError`: where some rank belongs to no division like the others.
    """
    own = dist.get_process_group_ranks(dividing)
    divisions: list = [None] * dist.get_world_size()
    dist.all_gather_object(divisions, own)
    position = own.index(dist.get_rank())
    alike = sorted({ranks[position] for ranks in divisions if len(ranks) == len(own)})
    if len(alike) * len(own) != len(divisions):
        raise ConfigError(
            f"the {len(divisions)} ranks form no rectangle of data-parallel by {len(own)} tensor-parallel ranks; give "
            "hf_zero.shard the data-parallel ranks as `group`"
        )
    limit = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    return dist.new_group(alike, timeout=limit, use_local_synchronization=True)
