"""Rows with a class, of texts or images: what is read of them, and which classes there are."""

from hf_zero.recipes.classification.classes import Classes
from hf_zero.recipes.classification.images import Images
from hf_zero.recipes.classification.labelled import BadRows, Labelled
from hf_zero.recipes.classification.models import head_of, load_classifier, verify
from hf_zero.recipes.classification.texts import Texts


__all__ = ["BadRows", "Classes", "Images", "Labelled", "Texts", "head_of", "load_classifier", "verify"]
