"""Predicts the memory of a run and the time of a step."""

from hf_zero.planner.classes import TensorClass, checkpoint_nbytes, render_classes, tensor_classes
from hf_zero.planner.prediction import Prediction, Predictor
from hf_zero.planner.search import Longest, Remedy, Table, compare, longest_sequence, remedy
from hf_zero.planner.simulated_step import EVALUATED, REFERENCE, TRAINED
from hf_zero.planner.throughput import Throughput
from hf_zero.planner.timeline import StepTime
from hf_zero.planner.topology import Cluster, Device, device_named


__all__ = [
    "EVALUATED",
    "REFERENCE",
    "TRAINED",
    "Cluster",
    "Device",
    "Longest",
    "Prediction",
    "Predictor",
    "Remedy",
    "StepTime",
    "Table",
    "TensorClass",
    "Throughput",
    "checkpoint_nbytes",
    "compare",
    "device_named",
    "longest_sequence",
    "remedy",
    "render_classes",
    "tensor_classes",
]
