"""What a run holds in memory, measured and predicted."""

from hf_zero.planner.advice import Advice, advise
from hf_zero.planner.memory_report import MemoryReport, TensorClass, by_field, measure, render_classes, tensor_classes
from hf_zero.planner.prediction import Prediction, predict, predict_with


__all__ = [
    "Advice",
    "MemoryReport",
    "Prediction",
    "TensorClass",
    "advise",
    "by_field",
    "measure",
    "predict",
    "predict_with",
    "render_classes",
    "tensor_classes",
]
