"""Checkpoints as model folders: all ranks write and read ranges of safetensors files at known offsets."""

from hf_zero.checkpoint.load import load_weights
from hf_zero.checkpoint.manifest import Manifest, SavedRun, check_checkpoint, check_pretrained
from hf_zero.checkpoint.pretrained import class_of, load_pretrained, pretrained_class
from hf_zero.checkpoint.safetensors import WeightFiles
from hf_zero.checkpoint.save import plan_weights, save_checkpoint, save_pretrained
from hf_zero.checkpoint.staging import Checkpoint, Snapshots
from hf_zero.checkpoint.state import load_state, plan_state


__all__ = [
    "Checkpoint",
    "Manifest",
    "SavedRun",
    "Snapshots",
    "WeightFiles",
    "check_checkpoint",
    "check_pretrained",
    "class_of",
    "load_pretrained",
    "load_state",
    "load_weights",
    "plan_state",
    "plan_weights",
    "pretrained_class",
    "save_checkpoint",
    "save_pretrained",
]
