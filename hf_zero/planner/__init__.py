"""Predicts the memory of a run and the time of a step."""

from hf_zero.planner.advice import Advice, advise
from hf_zero.planner.classes import TensorClass, by_field, render_classes, tensor_classes
from hf_zero.planner.longest import Longest, longest_sequence
from hf_zero.planner.prediction import Prediction, Predictor, predict
from hf_zero.planner.remedies import Remedy, remedy
from hf_zero.planner.simulated_step import EVALUATED, REFERENCE, TRAINED, refuse_impossible
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
    "by_field",
    "device_named",
    "longest_sequence",
    "predict",
    "rank_ways",
    "refuse_impossible",
    "remedy",
    "render_classes",
    "tensor_classes",
]
