"""`ZeroTrainer`: the Hugging Face `Trainer` over sharded models."""

import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset
from tqdm.auto import tqdm
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback
from transformers.trainer_utils import SaveStrategy

from hf_zero.accelerator import ZeroAccelerator
from hf_zero.activation import refuse_undividable
from hf_zero.checkpoint import load_pretrained, pretrained_class
from hf_zero.checkpoint.adapters import is_adapter_model, refuse_adapters
from hf_zero.checkpoint.pretrained import refuse_quantized_model
from hf_zero.comm.ranks import transport_errors
from hf_zero.compat import check_overrides
from hf_zero.engine import ShardedModel, engine_of, gathered, materialize
from hf_zero.engine.partition import refuse_what_cannot_be_sharded
from hf_zero.errors import ConfigError
from hf_zero.optim import granularity_of, inner_optimizers, refuse_unknown
from hf_zero.planner import render_classes, tensor_classes
from hf_zero.trainer.arguments import ZeroArgumentsMixin
from hf_zero.trainer.batches import evened, gather_by_setting
from hf_zero.trainer.checks import check_schedule
from hf_zero.trainer.losses import LossMixin
from hf_zero.trainer.restoring import CompareLoss, RestoringMixin, show_rates
from hf_zero.trainer.saving import Saver, SavingMixin
from hf_zero.trainer.signals import StopOnSignal
from hf_zero.trainer.tensor_parallel import apart, arrange, refuse_settings_of_divided
from hf_zero.trainer.trainer_base import ZeroTrainerBase
from hf_zero.trainer.training_arguments import ZeroSeq2SeqTrainingArguments, ZeroTrainingArguments
from hf_zero.trainer.whole import saves_whole


logger = logging.getLogger(__name__)

OVERRIDES = (
    *("create_accelerator_and_postprocess", "train", "_move_model_to_device", "_get_dataloader"),
    "evaluation_loop",
)
# Of Trainer these are replaced and not called: what a class behind the mixin does in them would be left out.
REPLACED = ("save_model", "_save_optimizer_and_scheduler", "_load_from_checkpoint", "_load_best_model")
LOADING = REPLACED[2:]  # what a class with a `_save` of its own has for that


class TellMemory(TrainerCallback):
    """A callback that prints one line per tensor class on rank 0, on stderr: purpose, dtype, bytes per rank."""

    def __init__(self, trainer: ZeroTrainerBase):
        self._trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        engine, optimizer = self._trainer._engine, self._trainer._prepared_optimizer
        ranks = f"{engine.comm.num_ranks} rank{'s' if engine.comm.num_ranks > 1 else ''}"
        if engine.comm.num_replicas > 1:
            ranks += f" in shard groups of {engine.comm.shard_group.num_ranks}"
        lines = render_classes(tensor_classes(engine, optimizer))  # on every rank: what fails here fails on all
        late = "".join(f"\n  and the state of {name}, from the first step on" for name in optimizer.late_state)
        if state.is_world_process_zero:
            text = f"hf_zero: stage {engine.stage} over {ranks}; beside activations each holds\n{lines}{late}"
            tqdm.write(text, file=sys.stderr)


class ZeroTrainerMixin(SavingMixin, RestoringMixin, LossMixin):
    """Makes any subclass of `Trainer` train with ZeRO: `class MyTrainer(ZeroTrainerMixin, TheirTrainer)`.

    Its arguments must carry the flags of `ZeroArgumentsMixin`. The model is sharded in place when it is first
    prepared, for training or evaluation; it is never wrapped. In place of a model, its name on the Hub or its folder
    can be given: no rank then ever holds it whole.

    Attributes:
        leaves_model (`bool`): set it before `train` where `save_model` comes after it: whether the disk has room for
            that model too is then known before the first step.

    Raises:
        `ConfigError`: for a model or arguments that cannot be sharded.
    """

    arguments_class: type[ZeroArgumentsMixin] = ZeroTrainingArguments  # made where none are given

    def __init_subclass__(cls, **kwargs):
        """Refuses bases in an order in which methods of `Trainer` would go before ours: no model would be sharded."""
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(ZeroTrainerBase):
            bases = ", ".join(base.__name__ for base in cls.__bases__)
            raise ConfigError(
                f"{cls.__name__}({bases}): methods of Trainer would go before those of ZeroTrainerMixin; give the "
                "bases in the order (ZeroTrainerMixin, TheirTrainer), or (TheirTrainer, ZeroTrainer)"
            )

    def __init__(self, *args, **kwargs):
        given = _by_name(type(self), args, kwargs)
        settings, model = given.get("args"), given.get("model")
        if settings is None:
            settings = given["args"] = self._default_arguments(model)
        self._check_arguments(settings)
        _refuse_replaced(type(self), settings)
        self._refuse_loss(settings, given.get("compute_loss_func"))
        _check_schedule(type(self), given)
        if isinstance(model, (str, os.PathLike)):
            given["model"] = self._model_of(model, settings)
        for name in ("model", "ref_model"):
            if isinstance(given.get(name), nn.Module):
                # a reference is frozen later, and so is the base of the adapter that TRL makes of `peft_config`
                is_ready = name == "model" and given.get("peft_config") is None
                _refuse_model(name, given[name], settings, is_ready=is_ready)
        _refuse_optimizers(**{key: given[key] for key in ("optimizers", "optimizer_cls_and_kwargs") if key in given})
        with transport_errors("making the trainer"):  # ranks take turns in it, where it prepares data
            try:
                super().__init__(**given)
            except ValueError as error:
                named = _named(self, error)
                if named is None:
                    raise
                raise named from error
        self.is_distributed_loading_by_transformers = False  # whose own ways to train it are not ours
        self._mixed_mesh_grads = False  # else Trainer reads `p.grad` to find out, where no gradient is
        _refuse_model("model", self.model, self.args, is_ready=True)
        if is_adapter_model(self.model):
            refuse_adapters(self.model, self._tell_what_is_lost())

        if isinstance(model, (str, os.PathLike)) and self.args.world_size == 1 and self.args.zero_offload == "none":
            materialize(self.model)  # one process holds it whole anyway: it can be read and copied, as under Trainer
        show_rates(self.lr_scheduler)
        self.stop_on_signal = StopOnSignal(self)

    def _tell_what_is_lost(self) -> Callable[[str], object] | None:
        """Returns what to do with a sentence on what checkpoints of adapters leave out; `None`: raise it."""
        if saves_whole(type(self)):
            return lambda _: None
        if self.args.save_strategy != SaveStrategy.NO:
            return None
        return logger.warning if self.args.process_index == 0 else lambda _: None

    def _check_arguments(self, args) -> None:
        if not isinstance(args, ZeroArgumentsMixin):
            raise ConfigError(
                f"args: {type(args).__name__} has no zero_stage; use ZeroTrainingArguments, or mix ZeroArgumentsMixin "
                "into your class"
            )

    def _default_arguments(self, model) -> ZeroArgumentsMixin:
        """Makes arguments where none are given, as Trainer does."""
        return self.arguments_class(output_dir="tmp_trainer")

    def _model_of(self, name: str | os.PathLike, args: ZeroArgumentsMixin) -> nn.Module:
        """Makes the model of this name or folder. Its weights stay in files."""
        settings = getattr(args, "model_init_kwargs", None) or {}
        return load_pretrained(pretrained_class(name, **settings), name, **settings)

    def create_accelerator_and_postprocess(self, **kwargs) -> None:
        with apart(self.model):
            super().create_accelerator_and_postprocess(**kwargs)
        ZeroAccelerator.adopt(
            self.accelerator,
            self.args.zero_config(),
            self.args.device,
            trains=lambda model: model is self.model,  # `evaluate` prepares it too
        )
        arrange(self.accelerator, self.model)
        self.accelerator.drops_logits = False  # but where `compute_loss` says so
        gather_by_setting(self)  # the one that Trainer took is that of accelerate's own class
        self.accelerator.clips = lambda: bool(self.args.max_grad_norm)  # which callbacks may change
        self._saver = Saver(in_background=self.args.zero_async_save)

    def _move_model_to_device(self, model, device) -> None:
        """Does nothing, since the engine moves the part of each rank."""

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None, **kwargs):
        """Trains as `Trainer.train` does. `True` resumes from the newest checkpoint that is as it was saved. SIGTERM
        and SIGUSR1 end the training after the step under way, with a checkpoint and the exit code 128 + the signal's
        number."""
        own = (self.stop_on_signal, CompareLoss(self), TellMemory(self))
        for callback in own:  # only now: people list a trainer's callbacks
            self.add_callback(callback)
        try:
            # signals from now on: checkpoints are read for minutes before the first step
            with self.stop_on_signal.received(), transport_errors("training"):
                checkpoint = self._checkpoint_of(resume_from_checkpoint)
                self._start, self._resumed_pass = self.resumed.position, self.resumed.passed
                self._accumulation_before = self.resumed.accumulation
                given = {"trial": trial, "ignore_keys_for_eval": ignore_keys_for_eval}
                kwargs |= {name: value for name, value in given.items() if value is not None}
                output = super().train(checkpoint, **kwargs)
                if (engine := engine_of(self.model)) is not None:
                    engine.finish_updates()  # raises what a device tells of the last steps
                return output
        finally:
            self.accelerator.borrows = None
            for callback in own:
                self.remove_callback(callback)

    def _get_dataloader(
        self, dataset, description, batch_size, sampler_fn=None, is_training=False, dataloader_key=None, **kwargs
    ):
        """Makes a loader as Trainer does. Of a stream to train on each rank takes its batches, not its files. Workers
        of ranks that share batches draw alike."""
        streams = getattr(sys.modules.get("datasets"), "IterableDataset", ())  # who has one has imported it
        if is_training and isinstance(dataset, streams):
            dataset = WholeStream(dataset)
        loader = super()._get_dataloader(
            dataset, description, batch_size, sampler_fn, is_training, dataloader_key, **kwargs
        )
        if is_training:
            _seed_alike(loader, self.accelerator.num_sharing)
        return loader

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval", **kwargs
    ):
        """Evaluates as Trainer does. A rank whose data ends early continues with batches that do not count. With
        `bf16_full_eval` and `fp16_full_eval` the model is shown in that dtype, and trained further as it was."""
        dtype = torch.float16 if self.args.fp16_full_eval else torch.bfloat16 if self.args.bf16_full_eval else None
        engine, shown, whole = self.accelerator.shard(self.model), nullcontext(), nullcontext()
        # sentence-transformers': a rank embeds more than others
        if saves_whole(type(self)) and getattr(self, "evaluator", None) is not None:
            whole = gathered(self.model)
        engine.finish_updates()  # what is measured is what a checkpoint of now would hold
        if dtype is not None and not self.is_in_train:
            if self._zero_optimizer is not None:
                self._zero_optimizer.eval()  # schedule-free ones: Trainer does it when the model is shown already
            shown = ShardedModel(self.model).computing_in(dtype)
        with transport_errors(description), shown, whole, evened(self, dataloader) as dataloader:
            return super().evaluation_loop(
                dataloader,
                description,
                prediction_loss_only=prediction_loss_only,
                ignore_keys=ignore_keys,
                metric_key_prefix=metric_key_prefix,
                **kwargs,
            )


check_overrides(ZeroTrainerMixin, Trainer, OVERRIDES)


def _seed_alike(loader: Any, num_sharing: int) -> None:
    """Lets workers of neighbouring ranks, of which so many share batches, draw the same random numbers, where Trainer
    seeds those of each rank by its number."""
    own = getattr(loader, "base_dataloader", loader)
    seeds: Any = getattr(own, "worker_init_fn", None)
    if num_sharing > 1 and "rank" in getattr(seeds, "keywords", {}):
        own.worker_init_fn = partial(seeds, rank=seeds.keywords["rank"] // num_sharing)


def _by_name(cls: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns a trainer's arguments by name, in the order of the first class that names its model: `DPOTrainer` takes
    a reference model before the arguments, `Trainer` does not."""
    own = cls.__mro__.index(ZeroTrainerMixin) + 1
    signatures = [list(inspect.signature(base.__init__).parameters)[1:] for base in cls.__mro__[own:]]
    names = next(names for names in signatures if "model" in names)
    if len(args) > len(names):
        raise TypeError(f"{cls.__name__} takes at most {len(names)} arguments, {len(args)} were given")
    return {**dict(zip(names, args)), **kwargs}


def _refuse_replaced(cls: type, args: ZeroArgumentsMixin) -> None:
    """Refuses a class whose own way to save or load would silently never be called, or not on each host."""
    if args.save_on_each_node and saves_whole(cls):
        raise ConfigError(
            f"save_on_each_node: {cls.__name__} has a _save of its own, which only rank 0 calls; leave it out, and "
            "save to a disk that all hosts share"
        )
    behind = cls.__mro__[cls.__mro__.index(ZeroTrainerMixin) : cls.__mro__.index(Trainer)]
    for theirs in [theirs for theirs in behind if theirs not in ZeroTrainerMixin.__mro__]:
        refused = [name for name in REPLACED if not (name in LOADING and saves_whole(cls))]
        name = next((name for name in refused if name in vars(theirs)), None)
        if name is not None:
            raise ConfigError(
                f"{theirs.__name__}.{name}: would not be called, since ZeroTrainerMixin saves and loads by all ranks; "
                f"if it calls super().{name}, put it first: class Mine({theirs.__name__}, ZeroTrainer)"
            )


def _named(trainer: Trainer, error: ValueError) -> ConfigError | None:
    """Returns the reason why a trainer refuses a model in one line, or `None` where it is unknown."""
    strategy = getattr(getattr(trainer, "args", None), "eval_strategy", "no")
    if "eval_dataset" in str(error) and strategy != "no" and getattr(trainer, "eval_dataset", None) is None:
        return ConfigError(
            f"eval_strategy {getattr(strategy, 'value', strategy)}: there is nothing to evaluate on; give the trainer "
            "an eval_dataset, or --eval_strategy no"
        )
    return None


def _check_schedule(cls: type, given: dict[str, Any]) -> None:
    """Checks the schedule, unless one is given or a subclass makes its own."""
    optimizer, schedule = given.get("optimizers") or (None, None)
    makers = ("create_scheduler", "create_optimizer_and_scheduler")
    if schedule is not None or any(getattr(cls, name) is not getattr(Trainer, name) for name in makers):
        return
    kwargs: dict[str, Any] = (given.get("optimizer_cls_and_kwargs") or (None, {}))[1]
    rate = kwargs.get("lr") if optimizer is None else getattr(optimizer, "defaults", {}).get("lr")
    check_schedule({**vars(given["args"]), **({} if rate is None else {"learning_rate": float(rate)})})


def _refuse_model(name: str, model: nn.Module, args: ZeroArgumentsMixin, *, is_ready: bool) -> None:
    """Refuses a loaded model that cannot be sharded before anything is done with it. What requires gradients now is
    what will be trained, where it `is_ready`."""
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise ConfigError(f"{name}: was loaded with device_map, which spreads it over devices; load it without")
    if args.zero_stage == 3:
        refuse_quantized_model(model)
    if engine_of(model) is None:
        refuse_settings_of_divided(name, model, args)
        if args.zero_sequence_parallel > 1 and name == "model":
            refuse_undividable(model, args.zero_sequence_parallel)
        refuse_what_cannot_be_sharded(model, args.device, is_ready=is_ready)


def _refuse_optimizers(optimizers=(None, None), optimizer_cls_and_kwargs=None) -> None:
    """Refuses an optimizer that cannot run on shards before anything is done with the model."""
    if optimizers[0] is not None:
        for inner in inner_optimizers(optimizers[0]):
            granularity_of(inner)
    made_by = optimizer_cls_and_kwargs[0] if optimizer_cls_and_kwargs is not None else None
    if isinstance(made_by, type) and issubclass(made_by, torch.optim.Optimizer):  # a factory's is looked at when made
        refuse_unknown(made_by)


class WholeStream(IterableDataset):
    """A stream of `datasets` of which accelerate gives each rank its batches, in turn.

    Of the stream itself it would give each rank some of the files, where there are as many files as ranks: the rank
    with the fewest rows would end first, and which rows a step has would depend on the number of ranks.
    """

    def __init__(self, rows: Any):
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def set_epoch(self, epoch: int) -> None:
        """Says how many passes there were before: a stream that is shuffled has another order in each."""
        self._rows.set_epoch(epoch)


class ZeroTrainer(ZeroTrainerMixin, Trainer):
    """`transformers.Trainer` with ZeRO. Takes `ZeroTrainingArguments`, and everything that `Trainer` takes."""


class ZeroSeq2SeqTrainer(ZeroTrainerMixin, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` with ZeRO. Takes `ZeroSeq2SeqTrainingArguments`."""

    arguments_class = ZeroSeq2SeqTrainingArguments
