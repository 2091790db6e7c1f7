"""A task: its rows, model and trainer, and its facts for `plan`.

Each task is a subclass of [`Task`], and has all of its facts. `tasks.TASKS` says where it is.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.planner import TRAINED
from hf_zero.recipes.lora import head_of
from hf_zero.recipes.models import DTYPES, config_of, named_model, resolve_config
from hf_zero.trainer.checks import check_activations


if TYPE_CHECKING:
    from hf_zero.recipes.data.rows import Data


class Task:
    """A kind of training. `run.py` calls its methods in every process, in the order in which they stand here."""

    name: ClassVar[str]  # a key of `TASKS`
    Arguments: Any  # dataclass of its keys, over `SourceArguments`
    Training: Any  # class of its training arguments
    defaults: ClassVar[Mapping[str, Any]] = {}  # of its training arguments, in place of those of their class
    decisive: Any = ()  # names of training arguments that decide what is learned: a run that resumes has to keep them
    holds_out: ClassVar[bool] = False  # whether it evaluates on some of its training rows if no others are given
    sums_tokens: ClassVar[bool] = False  # whether its loss is a sum over tokens, and so over parts of sequences
    scores: ClassVar[bool] = False  # whether its model computes one vector for a row, and generates no text
    generates: ClassVar[bool] = False  # whether answers are generated during training
    # Facts for `plan`
    rows_of_one: ClassVar[int] = 1  # how many rows of a batch are made of one row of data
    fused_head: ClassVar[bool] = False  # whether TRL's head computes the loss, without holding all logits
    takes_labels: ClassVar[bool] = True  # whether the model computes the loss, and not the trainer
    reads_logits: ClassVar[bool] = False  # whether the loss needs all logits, whatever `chunked_loss` says

    def check(self, arguments: Any, training: Mapping[str, Any]) -> None:
        """Refuses settings that cannot work, before a process is started. `training` has the fields of `Training`."""

    def check_zero(self, config: ZeroConfig, training: Mapping[str, Any]) -> None:
        """Refuses settings of ZeRO that the loss, or another setting, does not allow."""
        names = ("offload_activations", "chunked_loss", "tiled_mlp", "sequence_parallel")
        check_activations({**training, **{f"zero_{name}": getattr(config, name) for name in names}})
        if config.sequence_parallel > 1 and not self.sums_tokens:
            raise ConfigError(
                f"zero_sequence_parallel: the loss of {self.name} is computed from whole sequences; leave it out"
            )
        if config.chunked_loss == "on" and self.scores:
            raise ConfigError(
                f"zero_chunked_loss: the loss of {self.name} is of one number for each row; leave it out"
            )

    def load_data(self, arguments: Any, training: Any) -> "Data":
        """Reads and encodes the rows. No model is loaded yet."""
        raise NotImplementedError

    def load_model(self, arguments: Any, training: Any, data: "Data") -> nn.Module:
        """Makes the model. Where possible its weights are still in files, or not initialized yet."""
        raise NotImplementedError

    def make_trainer(self, model: nn.Module, arguments: Any, training: Any, data: "Data") -> Any:
        """Makes the trainer."""
        raise NotImplementedError

    def before(self, trainer: Any, data: "Data", say: Callable[..., None]) -> None:
        """Runs on all ranks before training. `say` prints on rank 0."""

    def after(self, trainer: Any, data: "Data", arguments: Any, say: Callable[..., None]) -> None:
        """Runs on all ranks when the model is saved."""

    # For `plan`

    def check_plan(self, arguments: Any) -> None:
        """Refuses runs that are not planned."""

    def model_name(self, arguments: Any) -> str:
        """Returns the name of the model, or of the config of a new one."""
        return named_model(arguments)[1]

    def load_config(self, arguments: Any) -> PretrainedConfig:
        """Reads the config of the model. Weights are not needed."""
        return config_of(arguments, resolve_config)

    def auto_class(self, config: PretrainedConfig) -> Any:
        """Returns the class that makes the model of a config."""
        return AutoModelForCausalLM

    def empty_model(self, arguments: Any, config: PretrainedConfig) -> PreTrainedModel:
        """Builds the model on the current device, in the dtype in which its weights would be loaded."""
        dtype = getattr(arguments, "dtype", "float32")
        options: dict[str, Any] = {"dtype": (config.dtype or torch.float32) if dtype == "auto" else DTYPES[dtype]}
        if getattr(arguments, "attn_implementation", None) == "eager":  # the others need what sdpa needs
            options["attn_implementation"] = "eager"
        text = config.get_text_config()
        if self.scores and getattr(text, "pad_token_id", None) is None:
            text.pad_token_id = 0  # a run sets its tokenizer's
        return self.auto_class(config).from_config(config, **options)

    def new_modules(self, model: PreTrainedModel) -> list[str]:
        """Returns the names of the modules that a saved model does not have, and an adapter trains in full."""
        return head_of(model) if self.scores else []

    def has_fused_head(self, training: Mapping[str, Any]) -> bool:
        """Whether TRL's head computes the loss of a run."""
        return self.fused_head and not training["label_smoothing_factor"]

    def forwards(self, training: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns what a step computes of each batch, in order, without generating."""
        return (TRAINED,)

    def images(self, config: PretrainedConfig, num_rows: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns an image for each row if the model takes images of one size."""
        vision = getattr(config, "vision_config", None)
        size = getattr(vision, "image_size", None)
        if not isinstance(size, int):
            return {}
        shape = (num_rows, getattr(vision, "num_channels", 3), size, size)
        return {"pixel_values": torch.empty(shape, dtype=dtype, device="meta")}

    def num_tokens(self, arguments: Any, training: Mapping[str, Any], config: PretrainedConfig) -> int:
        """Returns the number of tokens of a row. Raises [`ConfigError`] where the rows decide it."""
        if self.generates:
            raise ConfigError(
                f"plan: how long prompts are is in the rows of {self.name}; give --num_tokens, of a prompt with its "
                f"answer, such as {512 + training['max_completion_length']}"
            )
        length = {**training, **vars(arguments)}.get("max_length")
        if length is None:
            raise ConfigError("max_length: rows of any length are not planned; give --num_tokens")
        return min(length, getattr(config.get_text_config(), "max_position_embeddings", None) or length)
