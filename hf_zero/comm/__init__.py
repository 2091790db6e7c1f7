"""Every collective of the package: one interface, one implementation per kind of backend, bytes counted."""

from hf_zero.comm.base import Comm, Counters, Pending
from hf_zero.comm.bus import Bus, Job, Transfer
from hf_zero.comm.distributed import DistributedComm
from hf_zero.comm.world import connect


__all__ = ["Bus", "Comm", "Counters", "DistributedComm", "Job", "Pending", "Transfer", "connect"]
