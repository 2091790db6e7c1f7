"""Checkpoints that are the model: safetensors written and read in ranges, by all ranks, at known offsets."""

from hf_zero.checkpoint.file_layout import FileLayout, TensorEntry
from hf_zero.checkpoint.load import LoadReport, load_weights
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.checkpoint.pretrained import check_pretrained, load_pretrained, pretrained_class
from hf_zero.checkpoint.safetensors_file import SafetensorsFile
from hf_zero.checkpoint.save import save_pretrained
from hf_zero.checkpoint.state import load_state, save_state
from hf_zero.checkpoint.weight_files import WeightFiles


__all__ = [
    "FileLayout",
    "LoadReport",
    "Manifest",
    "SafetensorsFile",
    "TensorEntry",
    "WeightFiles",
    "check_pretrained",
    "load_pretrained",
    "load_state",
    "load_weights",
    "pretrained_class",
    "save_pretrained",
    "save_state",
]
