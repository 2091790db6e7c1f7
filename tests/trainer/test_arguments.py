"""What cannot work is refused before anything is loaded, with the nearest thing that does."""

import dataclasses
import inspect
import pickle

import pytest
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments

from hf_zero import ZeroArgumentsMixin, ZeroTrainer, ZeroTrainerMixin, ZeroTrainingArguments
from hf_zero.errors import ConfigError, UnsupportedError
from tests import models
from tests.distributed import ranks
from tests.trainer.harness import make


pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)


def _arguments(tmp_path, **settings) -> ZeroTrainingArguments:
    return ZeroTrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, **settings)


REFUSED = [
    ({"zero_stage": 7}, "zero_stage: 7 .*nearest is '3'"),
    ({"zero_stage": -1}, "zero_stage: -1 .*nearest is '0'"),
    ({"zero_reduce_dtype": "bfloat16"}, "zero_reduce_dtype: 'bfloat16' .*nearest is 'bf16'"),
    ({"zero_gather_dtype": "int4"}, "zero_gather_dtype: 'int4' .*nearest is 'int8'"),
    ({"zero_gather_dtype": "int8", "zero_stage": 2}, "gather_dtype: .* found stage 2; use stage 3"),
    ({"zero_gather_dtype": "int8", "zero_shard_size": 1}, "gather_dtype: .* found shard_size 1; use stage 3 over"),
    ({"zero_bucket_mb": 0}, "zero_bucket_mb: 0 .*expected 1 or more .*or auto"),
    ({"zero_bucket_mb": "large"}, "zero_bucket_mb: large is not a size; .*or auto"),
    ({"zero_bucket_mb": None}, "zero_bucket_mb: None is not a size; .*or auto"),
    ({"zero_bucket_mb": 2.5}, "zero_bucket_mb: 2.5 is not a size; .*or auto"),
    ({"zero_bucket_mb": True}, "zero_bucket_mb: True is not a size; .*or auto"),
    ({"zero_keep_gathered": True}, "zero_keep_gathered: True .*give 0 or more, or auto"),
    ({"zero_keep_gathered": "some"}, "zero_keep_gathered: 'some' .*give 0 or more, or auto"),
    ({"zero_tiled_mlp": 2.5}, "zero_tiled_mlp: 2.5 is of type float; give a whole number, or auto"),
    ({"zero_shard_size": 0}, "zero_shard_size: 0 is not a number of ranks; give 1 or more, or auto"),
    ({"zero_shard_size": "host"}, "zero_shard_size: .host. is not a number .*or auto"),
    ({"zero_shard_size": "2", "zero_stage": 0}, "zero_shard_size: .*stage 0 shards nothing"),
    ({"zero_prefetch_units": -1}, "zero_prefetch_units: -1 .*give 0 or more"),
    ({"optim": "galore_adamw"}, "optim: galore_adamw is not known .*adafactor.*adamw_torch.*MuonWithAdamW"),
    ({"optim": "lomo"}, "optim: lomo is not known .*adafactor.*adamw_torch.*MuonWithAdamW"),
    ({"fsdp": "full_shard"}, "--fsdp: .*--zero_stage"),
    ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "--deepspeed: .*--zero_stage"),
    ({"parallelism_config": object()}, "--parallelism_config: .*zero_sequence_parallel"),
    ({"zero_autocast": True}, "zero_autocast: .*add --bf16"),
    ({"zero_partition_activations": True}, "partition_activations: .* gradient checkpointing is off; add --gradient"),
    (
        {"zero_partition_activations": True, "gradient_checkpointing": True, "torch_compile": True},
        "zero_partition_activations: compiled blocks .*; remove --torch_compile",
    ),
    ({"zero_offload_activations": True, "torch_compile": True}, "offload_activations: compiled .*; remove --torch_c"),
    ({"zero_tiled_mlp": "auto", "torch_compile": True}, "zero_tiled_mlp: compiled blocks keep .* remove --torch_co"),
    ({"zero_chunked_loss": "on", "label_smoothing_factor": 0.1}, "zero_chunked_loss: label_smoothing_factor needs"),
    ({"zero_chunked_loss": "on", "zero_autocast": True, "bf16": True}, "zero_chunked_loss: --zero_autocast casts the"),
    ({"zero_chunked_loss": "of"}, "zero_chunked_loss: 'of' is not one of auto, on, off"),
    ({"zero_nonfinite": "stopp"}, "zero_nonfinite: 'stopp' is not one of stop, skip, ignore"),
    ({"fp16": True}, "fp16: .*CPU.*--bf16"),
]


def test_several_ranks_do_not_look_for_a_batch_size(tmp_path, monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "2" if name == "WORLD_SIZE" else "0")
    with pytest.raises(ConfigError, match="auto_find_batch_size: when one rank runs out .*hf-zero plan, and set it"):
        _arguments(tmp_path, auto_find_batch_size=True)


@pytest.mark.parametrize("settings, message", REFUSED)
def test_settings_that_cannot_work_are_refused_in_one_line(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        _arguments(tmp_path, **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "variable",
    [
        "ACCELERATE_USE_FSDP",
        "ACCELERATE_USE_DEEPSPEED",
        "ACCELERATE_USE_MEGATRON_LM",
        "ACCELERATE_USE_PARALLELISM_CONFIG",
    ],
)
def test_environment_switches_of_other_engines_are_refused(tmp_path, monkeypatch, variable):
    monkeypatch.setenv(variable, "true")
    with pytest.raises(ConfigError, match=f"{variable}: .*--zero_stage"):
        _arguments(tmp_path)
    monkeypatch.setenv(variable, "false")
    _arguments(tmp_path)


def test_accelerate_launchs_mixed_precision_is_the_flag(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert _arguments(tmp_path).zero_config().compute_dtype is torch.bfloat16
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert _arguments(tmp_path).zero_config().compute_dtype is None
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ConfigError, match="ACCELERATE_MIXED_PRECISION: fp8 .*bf16"):
        _arguments(tmp_path)


def test_a_world_size_without_ranks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2 but RANK, LOCAL_RANK, .* not set; .*torchrun"):
        _arguments(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE: 'two' .*torchrun"):
        _arguments(tmp_path)


@ranks(2, timeout=240)
def test_a_world_size_that_disagrees_with_the_process_group_is_refused(tmp_path):
    import os

    os.environ["WORLD_SIZE"] = "3"
    try:
        with pytest.raises(ConfigError, match="WORLD_SIZE is 3 but this process sees 2 rank"):
            make(3, tmp_path, models.build("bert"))
    finally:
        os.environ["WORLD_SIZE"] = "2"


def test_flags_are_parsed_from_a_command_line(tmp_path):
    parser = HfArgumentParser(ZeroTrainingArguments)
    line = f"--output_dir {tmp_path} --use_cpu --zero_stage 2 --zero_reduce_dtype bf16 --zero_bucket_mb 4 --bf16 "
    line += "--zero_keep_gathered auto --zero_shared_memory false --zero_tiled_mlp 4 --gradient_checkpointing "
    line += "--zero_partition_activations --zero_offload_activations"
    (args,) = parser.parse_args_into_dataclasses(line.split())
    config = args.zero_config()
    assert (config.stage, config.reduce_dtype, config.bucket_nbytes) == (2, torch.bfloat16, 4 * 2**20)
    assert config.compute_dtype is torch.bfloat16
    assert config.prefetch_units == 1
    assert (config.keep_gathered, config.shared_memory, config.tiled_mlp) == ("auto", False, 4)
    assert config.partition_activations and config.offload_activations
    assert "zero_stage" in parser.format_help()


def test_the_help_of_every_setting_is_what_the_docstring_says():
    settings = [each for each in dataclasses.fields(ZeroTrainingArguments) if each.name.startswith("zero_")]
    helps = {each.name: each.metadata["help"] for each in settings}
    assert all(text[0].isupper() and "`" not in text for text in helps.values())
    assert helps["zero_offload_fraction"] == "Fraction of the model to offload, rounded to whole blocks."
    assert helps["zero_resume_strict"] in " ".join(HfArgumentParser(ZeroTrainingArguments).format_help().split())


def test_a_stage_may_be_given_as_text(tmp_path):
    assert _arguments(tmp_path, zero_stage="1").zero_config().plan(2) is not None


def test_a_model_spread_by_device_map_is_refused(tmp_path):
    model = models.build("bert")
    model.hf_device_map = {"bert": 0, "classifier": "cpu"}
    with pytest.raises(ConfigError, match="device_map"):
        ZeroTrainer(model=model, args=_arguments(tmp_path))


def test_arguments_without_a_stage_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="ZeroTrainingArguments"):
        ZeroTrainer(model=models.build("bert"), args=TrainingArguments(output_dir=str(tmp_path), use_cpu=True))


def test_a_trainer_without_zero_refuses_arguments_with_it(tmp_path):
    args = _arguments(tmp_path)
    with pytest.raises(ConfigError, match=r"ZeroTrainingArguments has ZeRO settings, .*; use hf_zero\.ZeroTrainer"):
        Trainer(model=models.build("bert"), args=args)
    assert ZeroTrainer(model=models.build("bert"), args=args).place_model_on_device is False
    # which trainer they are given to counts, and not which had them before
    for again in (args, dataclasses.replace(args), pickle.loads(pickle.dumps(args))):
        with pytest.raises(ConfigError, match="has ZeRO settings"):
            Trainer(model=models.build("bert"), args=again)


def test_arguments_that_no_trainer_has_seen_can_be_looked_at(tmp_path):
    args = _arguments(tmp_path)
    assert {"place_model_on_device", "zero_stage"} <= dict(inspect.getmembers(args)).keys()
    assert hasattr(args, "place_model_on_device")


def test_a_class_whose_own_way_to_save_would_not_be_called_is_refused(tmp_path):
    saves = type("Saves", (Trainer,), {"save_model": lambda *_, **__: None})
    behind = type("Mine", (ZeroTrainerMixin, saves), {})
    wanted = r"Saves\.save_model: would not be called, .* put it first: class Mine\(Saves, ZeroTrainer\)"
    with pytest.raises(ConfigError, match=wanted):
        behind(model=models.build("bert"), args=_arguments(tmp_path))


class LoadsMore(Trainer):
    """Reads more than Trainer, as TRL's GRPO does."""

    read = ()

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint=checkpoint)
        self.read = (*self.read, checkpoint)


def test_what_a_class_behind_the_mixin_loads_beside_the_optimizer_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_zero.trainer.checkpoints.Checkpoints.load_optimizer", lambda *_: None)
    cls = type("Mine", (ZeroTrainerMixin, LoadsMore), {})
    trainer = cls(model=models.build("bert"), args=_arguments(tmp_path))
    trainer._load_optimizer_and_scheduler("checkpoint")
    assert trainer.read == ("checkpoint",)


def test_bases_in_an_order_that_would_shard_nothing_are_refused():
    with pytest.raises(ConfigError, match=r"Mine\(.*\): methods of Trainer would precede those of ZeroTrainerMixin"):
        type("Mine", (Trainer, ZeroTrainerMixin), {})
    with pytest.raises(
        ConfigError, match=r"Own\(TrainingArguments, ZeroArgumentsMixin\): ZeroArgumentsMixin must come before"
    ):
        type("Own", (TrainingArguments, ZeroArgumentsMixin), {})


class Whitening(torch.optim.Optimizer):
    """Would look at whole matrices."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})


def test_an_optimizer_that_looks_at_whole_parameters_is_refused_by_name(tmp_path):
    model = models.build("bert")
    with pytest.raises(UnsupportedError, match="Whitening"):
        ZeroTrainer(model=model, args=_arguments(tmp_path), optimizers=(Whitening(model.parameters()), None))
    with pytest.raises(UnsupportedError, match="Whitening"):
        ZeroTrainer(model=model, args=_arguments(tmp_path), optimizer_cls_and_kwargs=(Whitening, {"lr": 1e-3}))


def test_an_output_dir_that_cannot_be_written_is_refused_before_a_model_is_loaded(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="output_dir .*: .*file is not writable .Not a directory."):
        ZeroTrainingArguments(output_dir=str(tmp_path / "file" / "out"), use_cpu=True)
