"""What a run will hold in memory, and how long a step will take."""

from hf_zero.planner.advice import Advice, advise
from hf_zero.planner.classes import TensorClass, by_field, render_classes, tensor_classes
from hf_zero.planner.longest import Longest, longest_sequence
from hf_zero.planner.prediction import Prediction, predict, predict_rows, predict_with
from hf_zero.planner.remedies import Remedy, remedy
from hf_zero.planner.simulated_step import refuse_impossible
from hf_zero.planner.throughput import Ranking, Throughput, rank_ways
from hf_zero.planner.timeline import StepTime
from hf_zero.planner.topology import Cluster, Device, device_named


__all__ = [
    "Advice",
    "Cluster",
    "Device",
    "Longest",
    "Prediction",
    "Ranking",
    "Remedy",
    "StepTime",
    "TensorClass",
    "Throughput",
    "advise",
    "by_field",
    "device_named",
    "longest_sequence",
    "predict",
    "predict_rows",
    "predict_with",
    "rank_ways",
    "refuse_impossible",
    "remedy",
    "render_classes",
    "tensor_classes",
]
