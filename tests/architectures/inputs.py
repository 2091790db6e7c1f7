"""Inputs for any head, from the signature of its forward and its configuration."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.architectures.labels import make_labels
from tests.architectures.source import BATCH, LENGTH, NUM_CHOICES, TARGET_LENGTH, TEXT_HIGH, Source


def make_inputs(model: nn.Module, task: str, seed: int) -> dict[str, Any]:
    """A batch with labels.

    Args:
        model (`nn.Module`): not sharded.
        task (`str`): a key of `walk.TASKS`.
        seed (`int`): equal seeds give equal batches.
    """
    source = Source(model, task, seed)
    inputs: dict[str, Any] = {}
    if source.takes("input_ids", "inputs") or task in ("causal LM",):
        inputs |= _tokens(source)
    for name, make in INPUT_MAKERS.items():
        if source.takes(name) and name not in source.special.get("without", ()):
            inputs[name] = make(source)
    if "input_ids" in inputs:
        inputs |= _placeholders(source, inputs)
    for name, make in FOLLOWING.items():
        if source.takes(name) and name not in source.special.get("without", ()):
            inputs[name] = make(source, inputs)
    if "input_features" in inputs and "input_ids" not in inputs and source.takes("attention_mask"):
        inputs["attention_mask"] = torch.ones(BATCH, _frames(source), dtype=torch.long)
    if source.task in ("RNN-T", "TDT"):
        inputs["decoder_input_ids"] = source.ints(5, TEXT_HIGH, BATCH, TARGET_LENGTH)
    inputs |= make_labels(source, inputs)
    for name, make in source.special.get("make", {}).items():
        if source.takes(name) or "kwargs" in source.parameters:
            inputs[name] = make(source, inputs)
    inputs = {name: value for name, value in inputs.items() if value is not None}
    if task == "multiple choice":
        inputs = {name: value if name == "labels" else _choices(value) for name, value in inputs.items()}
    return inputs


def _choices(value: Tensor) -> Tensor:
    """Each sample's value for its first choice, and another sample's for the second."""
    return torch.stack([value.roll(shift, dims=0) for shift in range(NUM_CHOICES)], dim=1)


# Text


def _tokens(source: Source) -> dict[str, Tensor]:
    length = source.special.get("length", LENGTH)
    vocab = source.field("vocab_size", "src_vocab_size", default=TEXT_HIGH)
    ordinary = source.ordinary(min(TEXT_HIGH, vocab))
    ids = ordinary[source.ints(0, len(ordinary), BATCH, length)]
    inputs = {"input_ids" if source.takes("input_ids") else "inputs": ids}
    if source.takes("attention_mask") and not source.takes("pixel_values", "input_features", "input_values"):
        mask = torch.ones_like(ids)
        pad = source.field("pad_token_id")
        if source.task != "sequence classification" or isinstance(pad, int):
            mask[1, length - int(source.ints(1, 4)) :] = 0
            ids.masked_fill_(mask == 0, pad if isinstance(pad, int) and 0 <= pad < vocab else 0)
        inputs["attention_mask"] = mask
    if source.task == "sequence classification" and source.config.is_encoder_decoder:
        ids[:, 3] = source.field("eos_token_id", default=1)  # where the classifier looks
    return inputs


def _bbox(source: Source) -> Tensor:
    corner = source.ints(0, 20, BATCH, source.special.get("length", LENGTH), 2)
    return torch.cat([corner, corner + source.ints(1, 20, *corner.shape)], dim=-1)


# Images, sound and others


def _pixels(source: Source) -> Tensor:
    height, width = source.size()
    if "pixels" in source.special:
        return source.special["pixels"](source)
    if source.takes("image_grid_thw"):
        volume = source.field("temporal_patch_size", default=1) * source.patch() ** 2 * source.channels()
        return source.floats(BATCH * 16, volume)
    if source.takes("spatial_shapes"):
        return source.floats(BATCH, 16, source.patch() ** 2 * source.channels())
    if source.task == "video classification" or source.takes("pixel_values_videos") and not source.takes("input_ids"):
        return source.floats(BATCH, source.field("num_frames", default=4), source.channels(), height, width)
    if source.takes("pixel_attention_mask") and source.takes("input_ids"):
        return source.floats(BATCH, 1, source.channels(), height, width)
    return source.floats(BATCH, source.channels(), height, width)


def _video(source: Source) -> Tensor | None:
    if source.takes("pixel_values"):
        return None  # beside text, images are enough
    frames = source.field("num_frames", "frames_per_clip", default=4)
    return source.floats(BATCH, frames, source.field("in_chans", "num_channels", default=3), *source.size())


def _grid(source: Source) -> Tensor:
    return torch.tensor([[1, 4, 4]] * BATCH)


def _pixel_attention_mask(source: Source) -> Tensor:
    if source.takes("spatial_shapes"):
        return torch.ones(BATCH, 16, dtype=torch.long)
    return torch.ones(BATCH, 1, *source.size(), dtype=torch.long)


def _waves(source: Source) -> Tensor:
    return source.floats(BATCH, 6400)


def _frames(source: Source) -> int:
    return source.special.get("frames") or 2 * source.field("max_source_positions", default=64)


def _features(source: Source) -> Tensor:
    frames = _frames(source)
    if source.special.get(
        "mels_first", source.takes("input_features") and source.field("max_source_positions") is not None
    ):
        return source.floats(BATCH, source.mels(), frames)
    return source.floats(BATCH, frames, source.mels())


INPUT_MAKERS: dict[str, Callable[[Source], Any]] = {
    "bbox": _bbox,
    "pixel_values": _pixels,
    "pixel_values_videos": _video,
    "pixel_attention_mask": _pixel_attention_mask,
    "image_grid_thw": _grid,
    "spatial_shapes": lambda source: torch.tensor([[4, 4]] * BATCH),
    "image_sizes": lambda source: torch.tensor([list(source.size())] * BATCH),
    "image_merge_sizes": lambda source: torch.tensor([2] * BATCH),
    "target_sizes": lambda source: torch.tensor([[4, 4]] * BATCH),
    "input_values": _waves,
    "input_features": _features,
    "input_features_mask": lambda source: torch.ones(BATCH, _frames(source), dtype=torch.long),
    "feature_attention_mask": lambda source: torch.ones(BATCH, _frames(source), dtype=torch.long),
    "visual_feats": lambda source: source.floats(BATCH, 4, source.field("visual_feat_dim")),
    "visual_pos": lambda source: source.floats(BATCH, 4, source.field("visual_pos_dim")),
    "visual_embeds": lambda source: source.floats(BATCH, 4, source.field("visual_embedding_dim")),
    "past_values": lambda source: source.floats(BATCH, source.field("context_length"), source.channels_of_series()),
}


def _placeholders(source: Source, inputs: dict) -> dict[str, Tensor]:
    """Puts as many placeholders between the tokens as the model makes features of its images or sound."""
    ids = inputs["input_ids"]
    for kind in ("image", "audio"):
        token = source.special.get(f"{kind}_token", source.field(f"{kind}_token_id", f"{kind}_token_index"))
        count = _count_features(source, inputs, kind)
        if token is None or not count:
            continue
        holes = torch.full((BATCH, count), token)
        ids = torch.cat([ids[:, :3], holes, ids[:, 3:]], dim=1)
    found: dict[str, Tensor] = {"input_ids": ids}
    if source.takes("attention_mask") and source.takes("input_ids") and "attention_mask" not in inputs:
        found["attention_mask"] = torch.ones_like(ids)
    return found


def _count_features(source: Source, inputs: dict, kind: str) -> int:
    """How many placeholders stand for each sample's image or sound."""
    if f"num_{kind}" in source.special:
        return source.special[f"num_{kind}"]
    name = f"get_{kind}_features"
    found = [getattr(module, name) for module in source.model.modules() if hasattr(module, name)]
    # outer modules hand their arguments on, and do not name them all
    get = max(found, key=lambda get: len(inspect.signature(get).parameters), default=None)
    main = {"image": ("pixel_values",), "audio": ("input_features", "input_values")}[kind]
    if get is None or not any(name in inputs for name in main):
        return 0
    wanted = inspect.signature(get).parameters
    names = {*main, *wanted} - {"input_ids", "attention_mask"}
    given = {name: value for name, value in inputs.items() if name in names}
    with torch.no_grad():
        features = get(**given)
    features = getattr(features, "pooler_output", features)
    if isinstance(features, (tuple, list)):
        rows = sum(item.numel() // item.shape[-1] for item in features)
    else:
        rows = features.numel() // features.shape[-1]
    return rows // BATCH


def _token_kinds(source: Source, inputs: dict) -> Tensor | None:
    ids = inputs.get("input_ids")
    if ids is None:
        return None
    token = source.field("image_token_id", "image_token_index")
    return (ids == token).long() if token is not None else torch.zeros_like(ids)


FOLLOWING: dict[str, Callable[[Source, dict], Any]] = {
    "mm_token_type_ids": _token_kinds,
    "token_type_ids": lambda source, inputs: _token_kinds(source, inputs) if source.takes("pixel_values") else None,
}
