"""Checkpoints that are the model: safetensors written and read in ranges, by all ranks, at known offsets."""

from hf_zero.checkpoint.checkpoint import Checkpoint, save_checkpoint
from hf_zero.checkpoint.file_layout import FileLayout, TensorEntry
from hf_zero.checkpoint.foreign import load_foreign
from hf_zero.checkpoint.load import LoadReport, load_weights
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.checkpoint.pretrained import check_pretrained, class_of, load_pretrained, pretrained_class
from hf_zero.checkpoint.safetensors_file import SafetensorsFile
from hf_zero.checkpoint.save import plan_weights, save_pretrained
from hf_zero.checkpoint.snapshot import Snapshots
from hf_zero.checkpoint.state import check_checkpoint, load_state, plan_state, save_state
from hf_zero.checkpoint.weight_files import WeightFiles


__all__ = [
    "Checkpoint",
    "FileLayout",
    "LoadReport",
    "Manifest",
    "SafetensorsFile",
    "Snapshots",
    "TensorEntry",
    "WeightFiles",
    "check_checkpoint",
    "check_pretrained",
    "class_of",
    "load_foreign",
    "load_pretrained",
    "load_state",
    "load_weights",
    "plan_state",
    "plan_weights",
    "pretrained_class",
    "save_checkpoint",
    "save_pretrained",
    "save_state",
]
