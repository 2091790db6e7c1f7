"""Rows of texts or images, each with a class."""

from hf_zero.recipes.classification.inputs import Images, Texts
from hf_zero.recipes.classification.labelled import BadRows, Classes, Labelled
from hf_zero.recipes.classification.models import head_of, load_classifier, verify


__all__ = ["BadRows", "Classes", "Images", "Labelled", "Texts", "head_of", "load_classifier", "verify"]
