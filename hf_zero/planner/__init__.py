"""Predicts the memory of a run and the time of a step."""

from hf_zero.planner.classes import TensorClass, checkpoint_nbytes, render_classes, tensor_classes
from hf_zero.planner.prediction import Prediction, Predictor
from hf_zero.planner.search import Advice, Longest, Remedy, advise, longest_sequence, remedy
from hf_zero.planner.simulated_step import EVALUATED, REFERENCE, TRAINED
from hf_zero.planner.throughput import Ranking, Throughput, rank_ways
from hf_zero.planner.timeline import StepTime
from hf_zero.planner.topology import Cluster, Device, device_named


__all__ = [
    "EVALUATED",
    "REFERENCE",
    "TRAINED",
    "Advice",
    "Cluster",
    "Device",
    "Longest",
    "Prediction",
    "Predictor",
    "Ranking",
    "Remedy",
    "StepTime",
    "TensorClass",
    "Throughput",
    "advise",
    "checkpoint_nbytes",
    "device_named",
    "longest_sequence",
    "rank_ways",
    "remedy",
    "render_classes",
    "tensor_classes",
]
