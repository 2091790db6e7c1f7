"""`plan MODEL`: what each rank of a run will take, from the model's config alone."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

from hf_zero.checkpoint import class_of
from hf_zero.config import choose
from hf_zero.errors import ConfigError
from hf_zero.planner import Prediction, advise, predict_with
from hf_zero.planner.advice import GIB
from hf_zero.recipes.loading import one_line, quiet, resolve_config
from hf_zero.recipes.lora import AdapterArguments, adapt, check_adapter
from hf_zero.trainer import ZeroArgumentsMixin
from hf_zero.trainer.checks import SUPPORTED_OPTIMS


POSITIONAL = ("model", "a hub id, a folder, or a config.json; weights are not needed")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Arguments(AdapterArguments, ZeroArgumentsMixin):
    """What `plan` takes beside the model: the settings of the run, under the names that a task has for them."""

    num_processes: int = field(default=1, metadata={"help": "How many ranks."})
    bf16: bool = field(default=False, metadata={"help": "bf16 compute copy, fp32 masters."})
    fp16: bool = field(default=False, metadata={"help": "Likewise in fp16."})
    dtype: str = field(default="float32", metadata={"help": "The dtype that the weights are loaded in."})
    optim: str = field(default="adamw_torch_fused", metadata={"help": "The optimizer."})
    max_length: int = field(default=1024, metadata={"help": "Tokens of a sequence."})
    per_device_train_batch_size: int = field(default=8, metadata={"help": "Sequences of a rank's micro-batch."})
    gradient_checkpointing: bool = field(default=False, metadata={"help": "Blocks keep their inputs alone."})
    use_cpu: bool = field(default=False, metadata={"help": "Ranks train on CPUs, not on a GPU each."})
    memory: float | None = field(
        default=None, metadata={"help": "GiB that one device has, to find what fits; by default this machine's GPU's."}
    )
    ddp_timeout: int = field(default=1800, metadata={"help": "Of no account here."})

    def __post_init__(self):
        for key in ("max_length", "per_device_train_batch_size"):
            if getattr(self, key) < 1:
                raise ConfigError(f"--{key} {getattr(self, key)}: expected 1 or more")
        if self.memory is not None and self.memory <= 0:
            raise ConfigError(f"--memory {self.memory}: expected the GiB of one device")
        if self.num_processes < 1:
            raise ConfigError(f"--num_processes {self.num_processes}: expected 1 or more")
        choose("dtype", self.dtype, DTYPES)
        check_adapter(self)


def run(model: str, arguments: Arguments) -> None:
    """Prints what each rank takes, and where the memory of a device is known, which settings fit it.

    Args:
        model (`str`): where its config is.
        arguments ([`Arguments`]): as parsed.

    Raises:
        ConfigError: there is no such model, or a setting is not valid.
    """
    config = arguments.zero_config()
    subject = empty_model(model, dtype=DTYPES[arguments.dtype])
    batch = example_batch(subject, arguments.per_device_train_batch_size, arguments.max_length)
    subject = adapt(subject, arguments, task_type=None)
    predict = partial(
        predict_with,
        subject,
        num_ranks=arguments.num_processes,
        batch=_cast(batch, config.compute_dtype),
        make_optimizer=optimizer_of(arguments.optim),
        on_cpu=arguments.use_cpu,
    )
    prediction = predict(config, gradient_checkpointing=arguments.gradient_checkpointing)
    print(_heading(model, arguments, prediction))
    print(prediction.render())
    memory = _memory_nbytes(arguments)
    if memory:
        advice = advise(
            lambda config, checkpointing: predict(config, gradient_checkpointing=checkpointing),
            config,
            memory,
            gradient_checkpointing=arguments.gradient_checkpointing,
        )
        print(advice.render())


def _heading(model: str, arguments: Arguments, prediction: Prediction) -> str:
    trained = prediction.num_trained / 1e6
    return (
        f"{model}: {prediction.num_parameters / 1e6:,.1f} M parameters, {trained:,.1f} M trained, "
        f"{arguments.per_device_train_batch_size} x {arguments.max_length} tokens; "
        f"stage {prediction.config.stage} over {prediction.num_ranks} rank(s), each:"
    )


def _memory_nbytes(arguments: Arguments) -> int:
    if arguments.memory is not None:
        return int(arguments.memory * GIB)
    if arguments.use_cpu or not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(0).total_memory


def _cast(batch: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}


def empty_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Builds a model on the meta device.

    Args:
        name (`str`): a hub id, `package:...`, a folder, or the path of a `config.json`.
        dtype (`torch.dtype`): of its parameters.

    Raises:
        ConfigError: there is none, or it names no class that transformers has.
    """
    source = resolve_config(name, "model")
    with one_line(name, "building the model of its config"), quiet(), torch.device("meta"):
        config = AutoConfig.from_pretrained(source)
        config.use_cache = False  # as `Trainer` has it
        return _class_of(name, config)._from_config(config, dtype=dtype).train()


def _class_of(name: str, config: PretrainedConfig) -> type[PreTrainedModel]:
    found = class_of(config)
    if found is None:
        raise ConfigError(
            f"model {name!r}: its config names no class of transformers in `architectures`; add one, such as "
            '"architectures": ["LlamaForCausalLM"]'
        )
    return found


def optimizer_of(optim: str) -> partial:
    """What makes the optimizer that `--optim` names.

    Raises:
        ConfigError: it does not run on shards, or its package is not installed.
    """
    choose("optim", optim, dict.fromkeys(sorted(SUPPORTED_OPTIMS)))
    try:
        training = TrainingArguments(output_dir=str(Path.cwd()), optim=optim, use_cpu=True)
        kind, kwargs = Trainer.get_optimizer_cls_and_kwargs(training)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"optim: {' '.join(str(error).split())}") from error
    return partial(kind, **kwargs)


def example_batch(model: PreTrainedModel, batch_size: int, length: int) -> dict[str, Tensor]:
    """Makes a batch without data for a model, with labels: sequences of full length, none padded.

    Args:
        model (`PreTrainedModel`): its class says which labels it takes.
        batch_size (`int`): rows.
        length (`int`): tokens of a row; for an encoder and decoder, of each.

    Raises:
        ConfigError: for a model that takes neither tokens nor images.
    """
    kind = type(model).__name__
    if model.main_input_name == "pixel_values":
        inputs = {"pixel_values": _empty(batch_size, *_image_shape(model), dtype=model.dtype)}
    elif model.main_input_name == "input_ids":
        inputs = {name: _empty(batch_size, length) for name in ("input_ids", "attention_mask")}
    else:
        raise ConfigError(f"model: {kind} takes {model.main_input_name}, and only tokens and images are planned")
    if "For" not in kind and not kind.endswith("HeadModel"):
        return inputs  # without a head there is no loss
    by_row = any(word in kind for word in ("SequenceClassification", "ImageClassification"))
    return {**inputs, "labels": _empty(batch_size) if by_row else _empty(batch_size, length)}


def _image_shape(model: PreTrainedModel) -> tuple[int, int, int]:
    size = getattr(model.config, "image_size", 224)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return getattr(model.config, "num_channels", 3), height, width


def _empty(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")
