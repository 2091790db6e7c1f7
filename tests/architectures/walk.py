"""The cases: every model type of transformers' own mappings, with every head that computes a loss."""

from dataclasses import dataclass
from functools import cache


# task -> transformers' mapping, in the order in which a type's main head is chosen
TASKS = {
    "causal LM": "CAUSAL_LM",
    "image-text-to-text": "IMAGE_TEXT_TO_TEXT",
    "multimodal LM": "MULTIMODAL_LM",
    "seq2seq LM": "SEQ_TO_SEQ_CAUSAL_LM",
    "speech seq2seq": "SPEECH_SEQ_2_SEQ",
    "masked LM": "MASKED_LM",
    "image classification": "IMAGE_CLASSIFICATION",
    "CTC": "CTC",
    "RNN-T": "RNNT",
    "TDT": "TDT",
    "audio classification": "AUDIO_CLASSIFICATION",
    "video classification": "VIDEO_CLASSIFICATION",
    "object detection": "OBJECT_DETECTION",
    "zero-shot object detection": "ZERO_SHOT_OBJECT_DETECTION",
    "semantic segmentation": "SEMANTIC_SEGMENTATION",
    "image segmentation": "IMAGE_SEGMENTATION",
    "instance segmentation": "INSTANCE_SEGMENTATION",
    "universal segmentation": "UNIVERSAL_SEGMENTATION",
    "masked image modeling": "MASKED_IMAGE_MODELING",
    "causal image modeling": "CAUSAL_IMAGE_MODELING",
    "depth estimation": "DEPTH_ESTIMATION",
    "normal estimation": "NORMAL_ESTIMATION",
    "pose estimation": "POSE_ESTIMATION",
    "pointmap estimation": "POINTMAP_ESTIMATION",
    "image matting": "IMAGE_MATTING",
    "image to image": "IMAGE_TO_IMAGE",
    "keypoint detection": "KEYPOINT_DETECTION",
    "keypoint matching": "KEYPOINT_MATCHING",
    "mask generation": "MASK_GENERATION",
    "zero-shot image classification": "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "visual question answering": "VISUAL_QUESTION_ANSWERING",
    "document question answering": "DOCUMENT_QUESTION_ANSWERING",
    "table question answering": "TABLE_QUESTION_ANSWERING",
    "table recognition": "TABLE_RECOGNITION",
    "text recognition": "TEXT_RECOGNITION",
    "text to spectrogram": "TEXT_TO_SPECTROGRAM",
    "text to waveform": "TEXT_TO_WAVEFORM",
    "time series prediction": "TIME_SERIES_PREDICTION",
    "time series classification": "TIME_SERIES_CLASSIFICATION",
    "time series regression": "TIME_SERIES_REGRESSION",
    "retrieval": "RETRIEVAL",
    "sequence classification": "SEQUENCE_CLASSIFICATION",
    "token classification": "TOKEN_CLASSIFICATION",
    "question answering": "QUESTION_ANSWERING",
    "multiple choice": "MULTIPLE_CHOICE",
    "next sentence prediction": "NEXT_SENTENCE_PREDICTION",
    "pretraining": "PRETRAINING",
    "audio frame classification": "AUDIO_FRAME_CLASSIFICATION",
    "speaker verification": "AUDIO_XVECTOR",
    "decision": "DECISION",
    "backbone": "BACKBONE",
    "image features": "IMAGE",
    "text encoding": "TEXT_ENCODING",
}

# Heads without a loss: walked where a model type has no other.
FEATURES = ("backbone", "image features", "text encoding")


@dataclass(frozen=True)
class Case:
    """One model class under one head.

    Args:
        model_type (`str`): transformers' name of the architecture.
        task (`str`): a key of `TASKS`.
        class_name (`str`): the class that transformers' mapping has for both.
    """

    model_type: str
    task: str
    class_name: str

    @property
    def key(self) -> tuple[str, str]:
        return self.model_type, self.task

    @property
    def name(self) -> str:
        return f"{self.model_type}: {self.task}"


@cache
def cases() -> tuple[Case, ...]:
    """All of them, a class once, in the order of `TASKS` for each model type."""
    from transformers.models.auto import modeling_auto

    found: dict[str, dict[str, Case]] = {}
    for task, mapping in TASKS.items():
        # other versions of transformers have fewer tasks; the page's own version has all, as a test says
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {}).items():
            if task in FEATURES and model_type in found:
                continue
            name = names if isinstance(names, str) else names[0]
            found.setdefault(model_type, {}).setdefault(name, Case(model_type, task, name))
    return tuple(case for model_type in sorted(found) for case in found[model_type].values())
