"""What a run will hold in memory."""

from hf_zero.planner.advice import Advice, advise
from hf_zero.planner.classes import TensorClass, by_field, render_classes, tensor_classes
from hf_zero.planner.prediction import Prediction, predict, predict_with


__all__ = [
    "Advice",
    "Prediction",
    "TensorClass",
    "advise",
    "by_field",
    "predict",
    "predict_with",
    "render_classes",
    "tensor_classes",
]
