"""What a run holds in memory."""

from hf_zero.planner.report import MemoryReport, measure


__all__ = ["MemoryReport", "measure"]
