"""Inputs and labels for any head, from the signature of its forward, its configuration and its task."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.architectures.overrides import INPUTS
from tests.architectures.tiny import NUM_LABELS


BATCH, LENGTH, TARGET_LENGTH = 2, 12, 12
NUM_CHOICES = 2
IMAGE = 64  # for models whose configuration does not say: those that halve it five times
TEXT_HIGH = 60  # ordinary tokens are below: special ones lie at both ends of the vocabulary
NESTED = (
    "text_config", "thinker_config", "llm_config", "decoder", "text_encoder", "language_config", "vision_config",
    "audio_config", "encoder_config", "encoder", "audio_encoder", "backbone_config", "vision_encoder", "speech_config",
    "audio_encoder_config", "text_encoder_config", "question_encoder", "image_config", "vlm_config",
)  # fmt: skip


class Source:
    """Makes the inputs of one model; all are drawn from one generator, so that a seed gives one batch.

    Args:
        model (`nn.Module`): whose forward they are for.
        task (`str`): the head's task.
        seed (`int`): of the generator.
    """

    def __init__(self, model: nn.Module, task: str, seed: int):
        self.model, self.task = model, task
        self.config = model.config
        self.parameters = inspect.signature(model.forward).parameters
        self.generator = torch.Generator().manual_seed(seed)
        self.special = INPUTS.get(self.config.model_type, {})

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def takes(self, *names: str) -> bool:
        return any(name in self.parameters for name in names)

    def field(self, *names: str, default: Any = None) -> Any:
        """The first of these fields that the configuration has, or one nested in it."""
        for name in names:
            for config in _configs(self.config):
                value = getattr(config, name, None)
                if value is not None:
                    return value
        return default

    def ordinary(self, high: int) -> Tensor:
        """The tokens below `high` that no field of the configuration names."""
        special = set()
        for config in _configs(self.config):
            for name, value in vars(config).items():
                if "token" in name and isinstance(value, int):
                    special.add(value)
        return torch.tensor([token for token in range(min(5, high // 2), high) if token not in special])

    def size(self) -> tuple[int, int]:
        """Height and width of an image."""
        if "size" in self.special:
            return self.special["size"]
        size = self.field("image_size", "img_size", default=IMAGE)
        if isinstance(size, dict):
            size = (size.get("height", IMAGE), size.get("width", IMAGE))
        if self.takes("image_grid_thw", "image_grid_hw"):
            size = 4 * self.patch()
        return (size, size) if isinstance(size, int) else tuple(size)[-2:]

    def patch(self) -> int:
        patch = self.special.get("patch") or self.field("patch_size", default=8)
        return patch if isinstance(patch, int) else patch[-1]

    def channels(self) -> int:
        return self.field("num_channels", "in_channels", "num_image_channels", default=3)

    def channels_of_series(self) -> int:
        return self.field("num_input_channels", default=1)

    def mels(self) -> int:
        return self.field("num_mel_bins", "n_mels", "n_mel_bins", "feature_size", "input_feat_per_channel", default=32)


def _configs(config, depth: int = 0):
    """A configuration and those nested in it, outermost first."""
    yield config
    for name in NESTED:
        nested = getattr(config, name, None)
        if hasattr(nested, "to_dict") and depth < 3:
            yield from _configs(nested, depth + 1)


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


# Labels


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
