"""Offload to disk: tensors are stored in files and loaded into memory in windows."""

from hf_zero.storage.disk import DiskOffload, DiskPrefetcher, DiskTensor, Swap


__all__ = ["DiskOffload", "DiskPrefetcher", "DiskTensor", "Swap"]
