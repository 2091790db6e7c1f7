"""Offload to disk: tensors rest in files and come into memory in windows. The room is imported only when it is
used."""

from hf_zero.storage.disk import DiskBuffers, DiskOffload, DiskPrefetcher, DiskTensor, Extent, Swap, windows
from hf_zero.storage.swap_file import Speed, SwapFile, in_pages


__all__ = [
    "DiskBuffers",
    "DiskOffload",
    "DiskPrefetcher",
    "DiskTensor",
    "Extent",
    "Speed",
    "Swap",
    "SwapFile",
    "in_pages",
    "windows",
]
