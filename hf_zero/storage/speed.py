"""The speed of a disk, measured before it is trained on."""

import logging
import mmap
import time
from dataclasses import dataclass
from functools import partial

import torch

from hf_zero.comm import Comm
from hf_zero.comm.agreement import collect_from_all_ranks
from hf_zero.errors import StorageError
from hf_zero.storage.swap_file import SwapFile


logger = logging.getLogger(__name__)

PROBE_NBYTES = 64 * 2**20
SLOW_NBYTES_PER_S = 500e6  # what the slowest disks on a PCI or SATA bus do; others turn, or are behind a network


@dataclass(frozen=True)
class Speed:
    """The speed of the slowest rank's disk, while all ranks read or write at once.

    Args:
        read (`float`): bytes per second.
        write (`float`): likewise.
    """

    read: float
    write: float

    @classmethod
    def measure(cls, file: SwapFile, comm: Comm) -> "Speed":
        """Writes and reads the beginning of a file that has nothing in it yet: zeros. Collective.

        Raises:
            `StorageError`: the disk refuses.
        """
        nbytes = min(PROBE_NBYTES, file.nbytes)
        memory = torch.frombuffer(mmap.mmap(-1, max(1, nbytes)), dtype=torch.uint8)[:nbytes]

        def timed(move) -> float:
            start = time.perf_counter()
            move(0, memory).wait()
            return time.perf_counter() - start

        # steps write what was written before, which takes less time than the first write into reserved space
        _, write, read = (
            nbytes / max(*collect_from_all_ranks(comm, file.where, partial(timed, move), StorageError), 1e-9)
            for move in (file.write, file.write, file.read)
        )
        return cls(read=read, write=write)

    def seconds(self, nbytes: int) -> float:
        """Returns how long it takes to read so many bytes and to write them."""
        return nbytes / self.read + nbytes / self.write

    def log(self, file: SwapFile, what: str) -> None:
        """Logs what it means for a step, in which everything in the file is read and written once.

        Args:
            file (`SwapFile`): where all that is needed has been reserved.
            what (`str`): what rests there.
        """
        seconds = self.seconds(file.nbytes)
        way = "past the page cache" if file.is_direct else "through the page cache"
        line = f"{file.where}: {file.nbytes / 1e9:.2f} GB of {what} rest there, moved {way}"
        if seconds > 1:  # of little it is not known how fast much would be
            line += (
                f", read at {self.read / 1e6:.0f} MB/s and written at {self.write / 1e6:.0f} MB/s; an optimizer step "
                f"takes at least {seconds:.1f} s"
            )
        if min(self.read, self.write) < SLOW_NBYTES_PER_S and seconds > 1:
            logger.warning("%s; that is slow for an offload_dir: give one on a local NVMe disk", line)
        else:
            logger.info(line)
