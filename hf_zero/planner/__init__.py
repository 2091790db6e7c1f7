"""What a run holds in memory."""

from hf_zero.planner.classes import TensorClass, render_classes, tensor_classes
from hf_zero.planner.report import MemoryReport, measure


__all__ = ["MemoryReport", "TensorClass", "measure", "render_classes", "tensor_classes"]
