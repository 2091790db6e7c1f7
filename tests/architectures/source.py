"""What the inputs of one model are drawn from."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from tests.architectures.overrides import INPUTS


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
