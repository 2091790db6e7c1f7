"""Files in which tensors rest between uses."""

from hf_zero.storage.disk import NUM_BUFFERS, Disk, DiskTensor, Extent, Record, windows
from hf_zero.storage.speed import Speed
from hf_zero.storage.swap_file import SwapFile, in_pages


__all__ = ["NUM_BUFFERS", "Disk", "DiskTensor", "Extent", "Record", "Speed", "SwapFile", "in_pages", "windows"]
