"""Labels for any head, by its task."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.architectures.source import BATCH, NUM_CHOICES, TARGET_LENGTH, TEXT_HIGH, Source
from tests.architectures.tiny import NUM_LABELS


def make_labels(source: Source, inputs: dict) -> dict[str, Any]:
    """What the head is to be told beside its inputs."""
    make = LABELS.get(source.task)
    labels = make(source, inputs) if make is not None else {}
    return {name: value for name, value in labels.items() if source.takes(name)}


def _language(source: Source, inputs: dict) -> dict[str, Tensor]:
    ids = inputs.get("input_ids")
    if source.config.is_encoder_decoder or ids is None or source.task in ("RNN-T", "TDT"):
        high = min(TEXT_HIGH, source.field("decoder_vocab_size", "vocab_size", default=TEXT_HIGH))
        target = source.ints(min(5, high // 2), high, BATCH, TARGET_LENGTH)
        target[0, int(source.ints(4, 6 if source.task == "CTC" else TARGET_LENGTH)) :] = -100
        if source.task == "CTC":
            target[1, 6:] = -100
        return {"labels": target}
    kept = ids < TEXT_HIGH
    if source.takes("attention_mask") and inputs["attention_mask"].shape == ids.shape:
        kept = kept & (inputs["attention_mask"] == 1)
    return {"labels": ids.masked_fill(~kept, -100)}


def _positions(source: Source, inputs: dict) -> dict[str, Tensor]:
    start = source.ints(1, 4, BATCH)
    return {"start_positions": start, "end_positions": start + source.ints(1, 4, BATCH)}


def _classes(source: Source, inputs: dict) -> dict[str, Tensor]:
    return {
        "labels": source.ints(0, _num_labels(source), BATCH),
        "return_loss": True,
        "target_values": source.ints(0, _num_labels(source), BATCH),
    }


def _num_labels(source: Source) -> int:
    return NUM_CHOICES if source.task == "multiple choice" else getattr(source.config, "num_labels", NUM_LABELS)


def _token_classes(source: Source, inputs: dict) -> dict[str, Tensor]:
    return {"labels": source.ints(0, _num_labels(source), *inputs["input_ids"].shape)}


def _boxes(source: Source, inputs: dict) -> dict[str, Any]:
    def of_one_image() -> dict[str, Tensor]:
        return {
            "class_labels": source.ints(0, _num_labels(source), 2),
            "boxes": 0.2 + 0.2 * source.floats(2, 4).sigmoid(),
            "masks": source.ints(0, 2, 2, *source.size()).float(),
        }

    return {"labels": [of_one_image() for _ in range(BATCH)]}


def _segments(source: Source, inputs: dict) -> dict[str, Any]:
    return {
        "mask_labels": [source.ints(0, 2, 2, *source.size()).float() for _ in range(BATCH)],
        "class_labels": [source.ints(0, _num_labels(source), 2) for _ in range(BATCH)],
    }


def _pixel_classes(source: Source, inputs: dict) -> dict[str, Tensor]:
    return {"labels": source.ints(0, _num_labels(source), BATCH, *source.size())}


def _masked_patches(source: Source, inputs: dict) -> dict[str, Tensor]:
    count = (source.size()[0] // source.patch()) ** 2
    mask = torch.zeros(BATCH, count, dtype=torch.bool)
    mask[:, ::3] = True
    return {"bool_masked_pos": mask}


def _pretraining(source: Source, inputs: dict) -> dict[str, Tensor]:
    pair = {"next_sentence_label": source.ints(0, 2, BATCH), "sentence_order_label": source.ints(0, 2, BATCH)}
    if "input_ids" in inputs:
        return {**_language(source, inputs), **pair}
    return {"labels": source.ints(0, 2, BATCH)}


LABELS: dict[str, Callable[[Source, dict], dict]] = {
    "causal LM": _language,
    "masked LM": _language,
    "seq2seq LM": _language,
    "speech seq2seq": _language,
    "image-text-to-text": _language,
    "multimodal LM": _language,
    "CTC": _language,
    "RNN-T": _language,
    "TDT": _language,
    "text to waveform": _language,
    "visual question answering": _language,
    "causal image modeling": _language,
    "sequence classification": _classes,
    "image classification": _classes,
    "video classification": _classes,
    "audio classification": _classes,
    "speaker verification": _classes,
    "multiple choice": _classes,
    "next sentence prediction": _classes,
    "zero-shot image classification": _classes,
    "time series classification": _classes,
    "token classification": _token_classes,
    "question answering": _positions,
    "document question answering": _positions,
    "object detection": _boxes,
    "zero-shot object detection": _boxes,
    "image segmentation": _boxes,
    "instance segmentation": _segments,
    "universal segmentation": _segments,
    "semantic segmentation": _pixel_classes,
    "depth estimation": lambda source, inputs: {"labels": source.floats(BATCH, *source.size()).exp()},
    "masked image modeling": _masked_patches,
    "pretraining": _pretraining,
}
