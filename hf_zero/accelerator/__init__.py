"""ZeRO for accelerate, with and without a Trainer."""

from hf_zero.accelerator.accelerator import ZeroAccelerator


__all__ = ["ZeroAccelerator"]
