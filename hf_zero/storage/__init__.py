"""Offload to disk: tensors are stored in files and loaded into memory in windows. This package is imported only if it
is used."""

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
