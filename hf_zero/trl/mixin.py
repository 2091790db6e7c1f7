"""Mixins for TRL's configs and trainers, which also load models, add adapters, keep reference models and generate."""

import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn
from trl import (
    DPOTrainer,
    GRPOTrainer,
    KTOTrainer,
    LogCompletionsCallback,
    RLOOTrainer,
    SFTTrainer,
    SyncRefModelCallback,
)
from trl.import_utils import is_vllm_available
from trl.trainer import callbacks
from trl.trainer.utils import get_config_model_id

from hf_zero.checkpoint import save_pretrained
from hf_zero.checkpoint.adapters import load_model, read_for_adapter
from hf_zero.checkpoint.manifest import STATE_FOLDER, run_of
from hf_zero.checkpoint.names import named_tensors
from hf_zero.checkpoint.pretrained import lazy_loading, refuse_placing, resolve
from hf_zero.checkpoint.trusted import load_safely
from hf_zero.comm.agreement import run_on_all_ranks
from hf_zero.compat import check_overrides, replaced
from hf_zero.engine import gathered, materialize, placeholders, require_engine
from hf_zero.engine.access import unit_of
from hf_zero.engine.source import source_of
from hf_zero.errors import ConfigError
from hf_zero.trainer import ZeroArgumentsMixin, ZeroTrainerMixin


logger = logging.getLogger(__name__)

OVERRIDES = (
    *("add_callback", "_precompute_ref_logps"),
    *("_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler"),
)
# In `STATE_FOLDER`: the weights of a reference model that follows the policy, and completions of a rank that the next
# steps still use.
REFERENCE, GENERATED = "reference", "generated_{}.pt"
COUNTERS = ("_total_train_tokens", "_step")  # attributes of TRL's trainers that a checkpoint contains


@dataclass
class ZeroTrlArgumentsMixin(ZeroArgumentsMixin):
    """The settings of `hf_zero.ZeroArgumentsMixin` for a TRL config. List it before the config in the bases."""

    def _take_launchers_precision(self) -> None:
        super()._take_launchers_precision()
        if self.bf16 is None:
            self.bf16: bool = not self.fp16  # TRL's default, which TRL sets only after our checks

    def _refuse_unsupported(self) -> None:
        super()._refuse_unsupported()
        if getattr(self, "activation_offloading", False) and (self.use_cpu or not torch.accelerator.is_available()):
            raise ConfigError("activation_offloading: requires an accelerator, but the run uses none; remove it")
        if getattr(self, "use_vllm", False):
            self._check_vllm()
        for name in ("use_transformers_continuous_batching", "use_transformers_paged"):
            if getattr(self, name, False):
                raise ConfigError(
                    f"{name}: generates in a separate thread, which sharded models do not support; remove it"
                )

    def _check_vllm(self) -> None:
        without = "or remove use_vllm to generate with transformers and gathered weights"
        if self.vllm_mode != "server":
            raise ConfigError(
                f"vllm_mode {self.vllm_mode}: every process would hold a full model in addition to its shard; start "
                f"`vllm serve` on other devices and pass --vllm_mode server, {without}"
            )
        if not is_vllm_available():
            raise ConfigError(f"use_vllm: vLLM is not installed; pip install 'trl[vllm]', {without}")


class ZeroTrlTrainerMixin(ZeroTrainerMixin):
    """Makes a TRL trainer train with ZeRO: `class MyTrainer(ZeroTrlTrainerMixin, TheirTrainer)`.

    In addition to `ZeroTrainerMixin`: the weights of models that the trainer loads by name (policy, reference, reward
    models) stay in files until each rank reads its own shard. Models that are only evaluated are sharded like the
    policy. The policy is gathered while transformers generates; a vLLM server receives its weights unit by unit.
    Checkpoints contain a reference model that follows the policy and completions that the next steps use, which TRL
    does not save.

    Raises:
        `ConfigError`: If a model cannot be sharded or an argument is not supported.
    """

    config_class: type = ZeroTrlArgumentsMixin  # `args` must be instances of its hf_zero and TRL bases
    summed_losses = (*ZeroTrainerMixin.summed_losses, SFTTrainer)
    chunked_losses = (*ZeroTrainerMixin.chunked_losses, SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer, RLOOTrainer)

    def __init__(self, *args, **kwargs):
        with lazy_loading(()), fit_for_lazy_loading(type(self)):
            super().__init__(*args, **kwargs)

    def _check_arguments(self, args) -> None:
        parts = [base for base in self.config_class.__mro__ if base is ZeroArgumentsMixin or _is_of_trl(base)]
        if not all(isinstance(args, base) for base in parts):
            name = self.config_class.__name__
            raise ConfigError(f"args: {type(args).__name__} is not a {name}; use hf_zero.trl.{name}")
        if args.zero_chunked_loss == "on" and args.process_index == 0:
            logger.warning(
                "zero_chunked_loss: TRL computes log-probabilities in chunks itself, so 'on' changes nothing"
            )
        if args.zero_sequence_parallel > 1 and not isinstance(self, SFTTrainer):
            raise ConfigError(
                f"zero_sequence_parallel: {type(self).__name__} computes its loss from full sequences; remove it, or "
                "use ZeroSFTTrainer"
            )
        refuse_placing("model_init_kwargs", getattr(args, "model_init_kwargs", None) or {})

    def _default_arguments(self, model) -> ZeroArgumentsMixin:
        is_name = isinstance(model, (str, os.PathLike))
        name = os.fspath(model) if is_name else get_config_model_id(model.config)
        kind = self.config_class.__name__.removeprefix("Zero").removesuffix("Config")
        # TRL's default is bf16, which requires `use_cpu` on a machine without accelerator
        use_cpu = not torch.accelerator.is_available()
        return self.config_class(f"{os.path.basename(name)}-{kind}", use_cpu=use_cpu)

    def _model_of(self, name: str | os.PathLike, args: ZeroArgumentsMixin) -> str:
        """Checks the name and returns it. TRL loads the model, since class and dtype depend on the trainer."""
        settings = getattr(args, "model_init_kwargs", None) or {}
        args.model_init_kwargs = {**settings, "device_map": None}  # TRL's default is "auto" with one GPU
        return str(resolve(name, **settings))

    def add_callback(self, callback, **kwargs) -> None:
        if isinstance(callback, SyncRefModelCallback):
            callback.sync_target_model = sync_reference
        if isinstance(callback, LogCompletionsCallback):
            callback.on_step_end = partial(_with_whole_weights, callback.on_step_end)
        super().add_callback(callback, **kwargs)

    def _generate(self, *args, **kwargs) -> Any:
        """Generates like TRL with the policy gathered, since ranks with tool calls generate more often than others. A
        vLLM server already has the weights."""
        with nullcontext() if getattr(self, "use_vllm", False) else gathered(self.model):
            return super()._generate(*args, **kwargs)

    def _precompute_ref_logps(self, *args, **kwargs) -> Any:
        """Precomputes the reference log-probabilities like TRL, with forwards of the sharded model. Batches are always
        evened out, since ranks must run the same number of forwards; TRL drops the padding rows."""
        self.accelerator.shard(self.model)
        with replaced(self.accelerator.dataloader_config, even_batches=True):
            return super()._precompute_ref_logps(*args, **kwargs)

    def _facts(self) -> dict:
        facts = super()._facts()
        facts["extra"]["trl"] = {name: getattr(self, name) for name in COUNTERS if hasattr(self, name)}
        facts["extra"]["generation"] = self._generation()
        return facts

    def _generation(self) -> list[int]:
        """Returns the settings that must be unchanged to reuse saved completions; the first is the number of
        micro-batches that share them."""
        args: Any = self.args
        steps = getattr(args, "steps_per_generation", None) or args.gradient_accumulation_steps
        return [steps * getattr(self, "num_iterations", 1), args.per_device_train_batch_size, args.world_size]

    def _save_other_models(self, folder: Path) -> None:
        if (reference := self._following()) is not None and not self.args.save_only_model:
            save_pretrained(require_engine(reference), folder / STATE_FOLDER / REFERENCE)

    def _save_optimizer_and_scheduler(self, output_dir: str, **kwargs) -> None:
        super()._save_optimizer_and_scheduler(output_dir, **kwargs)
        generated = getattr(self, "_buffered_inputs", None)
        if generated is not None and self._step % self._generation()[0]:
            torch.save(generated, Path(output_dir, STATE_FOLDER, GENERATED.format(self.args.process_index)))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None, **kwargs) -> None:
        super()._load_optimizer_and_scheduler(checkpoint, **kwargs)
        run = None if checkpoint is None else run_of(checkpoint)
        if checkpoint is None or run is None:
            return
        folder = Path(checkpoint, STATE_FOLDER)
        if (reference := self._following()) is not None:
            load_model(require_engine(reference), str(folder / REFERENCE))
        for name, value in (run.extra.get("trl") or {}).items():
            setattr(self, name, value)
        path = folder / GENERATED.format(self.args.process_index)

        def load() -> None:
            if run.extra.get("generation") == self._generation() and path.is_file():  # otherwise TRL generates again
                self._buffered_inputs = load_safely(path, self.accelerator.device)

        run_on_all_ranks(self._ranks(), f"loading {path.name}", load)

    def _following(self) -> nn.Module | None:
        """Returns the reference model that is synced with the policy, if there is one."""
        callbacks = self.callback_handler.callbacks
        return next((each.ref_model for each in callbacks if isinstance(each, SyncRefModelCallback)), None)


check_overrides(ZeroTrlTrainerMixin, DPOTrainer, OVERRIDES)  # representative of TRL's trainers
check_overrides(ZeroTrlTrainerMixin, GRPOTrainer, ("_generate",))


def _is_of_trl(cls: type) -> bool:
    return cls.__module__.startswith("trl.")


@torch.no_grad()
def sync_reference(model: nn.Module, reference: nn.Module, alpha: float) -> None:
    """Moves a reference model towards the policy by the fraction `alpha` (TR-DPO, arXiv 2404.09656); 1 copies the
    policy. Both models are sharded and gathered unit by unit. All ranks must call it."""
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    for _, group in groupby(pairs, key=lambda pair: unit_of(pair[0])):
        sources, targets = zip(*group)
        with gathered(sources), gathered(targets, writeback=True):
            for source, target in zip(sources, targets):
                # compute in fp32 and round once: in bf16, a reference equal to the policy would drift from it
                target.copy_(target.float().mul_(1.0 - alpha).add_(source.float(), alpha=alpha))


def _with_whole_weights(act: Callable[..., None], *args, **kwargs) -> None:
    """Calls a TRL callback that generates with the model gathered, since ranks may have different numbers of
    prompts."""
    generate = callbacks._generate_completions

    def generate_gathered(prompts, model, *args, **kwargs):
        with gathered(model):
            return generate(prompts, model, *args, **kwargs)

    with replaced(callbacks, _generate_completions=generate_gathered):
        act(*args, **kwargs)


# Replacements of functions with which TRL's constructors access weights: weights may still be in files, or be sharded


def _adapt(original, model: nn.Module, peft_config, *args, **kwargs):
    """Replaces `get_peft_model`, which places adapters on the device of the weights."""
    read_for_adapter(model, peft_config)
    with placeholders(model):
        return original(model, peft_config, *args, **kwargs)


def _clone_template(original, model: nn.Module, *args, **kwargs):
    """Replaces `clone_chat_template`, which adds rows to the embeddings, computed from existing ones."""
    return original(materialize(model), *args, **kwargs)


def _hash(original, module: nn.Module, *args, **kwargs) -> str:
    """Replaces `hash_module`. Reads one tensor at a time, also of a model that is already sharded."""
    if args or kwargs:  # options of newer versions of TRL
        return original(materialize(module), *args, **kwargs)
    digest = hashlib.sha256()
    for name, tensor in sorted(named_tensors(module), key=lambda pair: pair[0]):
        with gathered(tensor):
            values, source = tensor.detach(), source_of(tensor)
            if source is not None:
                values = torch.empty(tensor.shape, dtype=tensor.dtype)
                source.read(0, values.view(-1), tensor.dtype)
            digest.update(f"{name} {values.dtype}".encode())
            digest.update(values.contiguous().view(-1).view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


def _serve(original, *args, **kwargs):
    """Replaces `VLLMGeneration`. Imports the replacement only when it is used."""
    from hf_zero.trl.server_generation import ServerGeneration

    return ServerGeneration(*args, **kwargs)


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "get_peft_model": _adapt,
    "clone_chat_template": _clone_template,
    "hash_module": _hash,
    "VLLMGeneration": _serve,
}


@contextmanager
def fit_for_lazy_loading(trainer_class: type) -> Iterator[None]:
    """Makes a trainer's constructor work with weights that are still in files, without reading all of them."""
    modules = {sys.modules[base.__module__] for base in trainer_class.__mro__ if base.__module__.startswith("trl.")}
    with ExitStack() as stack:
        for module in modules:
            for name in vars(module).keys() & _REPLACEMENTS.keys():
                replacement = partial(_REPLACEMENTS[name], getattr(module, name))
                stack.enter_context(replaced(module, **{name: replacement}))
        yield
