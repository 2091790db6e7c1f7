"""The mixins for TRL's configs and trainers, which also load and adapt models, keep reference models, and generate."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any
from unittest import mock

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

from hf_zero.checkpoint.adapters import read_for_adapter
from hf_zero.checkpoint.lazy_loading import lazy_loading
from hf_zero.checkpoint.names import named_tensors
from hf_zero.checkpoint.pretrained import refuse_placing, resolve
from hf_zero.compat import check_overrides
from hf_zero.engine import gathered, materialize, placeholders
from hf_zero.engine.access import unit_of
from hf_zero.engine.source import source_of
from hf_zero.errors import ConfigError
from hf_zero.trainer import ZeroArgumentsMixin, ZeroTrainerMixin
from hf_zero.trl import fused_head as fused_head  # takes the place of the function in TRL
from hf_zero.trl import resuming
from hf_zero.trl.resuming import ResumingTrlMixin


OVERRIDES = ("add_callback", "_precompute_ref_logps")


@dataclass
class ZeroTrlArgumentsMixin(ZeroArgumentsMixin):
    """Adds the settings of `hf_zero.ZeroArgumentsMixin` to a configuration of TRL, before it among the bases."""

    def _take_launchers_precision(self) -> None:
        super()._take_launchers_precision()
        if self.bf16 is None:
            self.bf16: bool = not self.fp16  # TRL's default, which it sets after what depends on it was checked

    def _refuse_unsupported(self) -> None:
        super()._refuse_unsupported()
        if getattr(self, "activation_offloading", False) and (self.use_cpu or not torch.accelerator.is_available()):
            raise ConfigError(
                "activation_offloading: TRL's moves tensors off an accelerator, and the run has none; leave it out"
            )
        if getattr(self, "use_vllm", False):
            self._check_vllm()
        for name in ("use_transformers_continuous_batching", "use_transformers_paged"):
            if getattr(self, name, False):
                raise ConfigError(
                    f"{name}: generates in a thread of its own, of which the engine knows nothing; leave it out"
                )

    def _check_vllm(self) -> None:
        without = "or leave use_vllm out: transformers then generates, with the weights gathered"
        if self.vllm_mode != "server":
            raise ConfigError(
                f"vllm_mode {self.vllm_mode}: every process would hold a whole model beside its part of it; start "
                f"`vllm serve` on other devices and give --vllm_mode server, {without}"
            )
        if not is_vllm_available():
            raise ConfigError(f"use_vllm: vLLM is not installed; pip install 'trl[vllm]', {without}")


class ZeroTrlTrainerMixin(ResumingTrlMixin):
    """Makes a trainer of TRL train with ZeRO: `class MyTrainer(ZeroTrlTrainerMixin, TheirTrainer)`.

    Beyond `ZeroTrainerMixin`: every model that the trainer loads by name (the policy, its reference, reward models) is
    left in its files until each rank reads its own part, and the models that are only evaluated are sharded as the
    policy is. While transformers generates, the policy is gathered; a vLLM server is sent one unit after the other.

    Raises:
        `ConfigError`: for a model or arguments that cannot be sharded.
    """

    config_class: type = ZeroTrlArgumentsMixin  # what the arguments must be made of
    summed_losses = (*ZeroTrainerMixin.summed_losses, SFTTrainer)
    chunked_losses = (*ZeroTrainerMixin.chunked_losses, SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer, RLOOTrainer)

    def __init__(self, *args, **kwargs):
        with lazy_loading(()), fit_for_lazy_loading(type(self)):
            super().__init__(*args, **kwargs)
        if getattr(self, "tools", None) and self.args.use_vllm and self.args.world_size > 1:
            raise ConfigError(
                "use_vllm: each rank's answers ask for tools as often as they like, and TRL asks the server for all "
                "ranks together; leave use_vllm or tools out, or train with one process"
            )

    def _check_arguments(self, args) -> None:
        parts = [base for base in self.config_class.__mro__ if base is ZeroArgumentsMixin or _is_of_trl(base)]
        if not all(isinstance(args, base) for base in parts):
            name = self.config_class.__name__
            raise ConfigError(f"args: {type(args).__name__} is no {name}; use hf_zero.trl.{name}")
        if args.zero_sequence_parallel > 1 and not isinstance(self, SFTTrainer):
            raise ConfigError(
                f"zero_sequence_parallel: {type(self).__name__} computes its loss from the tokens of whole sequences; "
                "leave it out, or use ZeroSFTTrainer"
            )
        refuse_placing("model_init_kwargs", getattr(args, "model_init_kwargs", None) or {})

    def _default_arguments(self, model) -> ZeroArgumentsMixin:
        is_name = isinstance(model, (str, os.PathLike))
        name = os.fspath(model) if is_name else get_config_model_id(model.config)
        kind = self.config_class.__name__.removeprefix("Zero").removesuffix("Config")
        # bf16 is TRL's default, for which a machine without accelerator wants to be told that it is one
        use_cpu = not torch.accelerator.is_available()
        return self.config_class(f"{os.path.basename(name)}-{kind}", use_cpu=use_cpu)

    def _model_of(self, name: str | os.PathLike, args: ZeroArgumentsMixin) -> str:
        """Checks the name and returns it. TRL loads the model: each of its trainers has its own class and dtype for
        it."""
        settings = getattr(args, "model_init_kwargs", None) or {}
        args.model_init_kwargs = {**settings, "device_map": None}  # TRL would say "auto" where there is one GPU
        return str(resolve(name, **settings))

    def add_callback(self, callback, **kwargs) -> None:
        if isinstance(callback, SyncRefModelCallback):
            callback.sync_target_model = sync_reference
        if isinstance(callback, LogCompletionsCallback):
            callback.on_step_end = partial(_with_whole_weights, callback.on_step_end)
        super().add_callback(callback, **kwargs)

    def _generate(self, *args, **kwargs) -> Any:
        """Generates as TRL does, with the policy whole: a rank whose answers ask for tools generates more often than
        others. A vLLM server has the weights already."""
        with nullcontext() if getattr(self, "use_vllm", False) else gathered(self.model):
            return super()._generate(*args, **kwargs)

    def _precompute_ref_logps(self, *args, **kwargs) -> Any:
        """Computes the reference's log probabilities as TRL does, by forwards of the sharded model. Rows that even
        the batches out are not kept, also where training is to have none."""
        self.accelerator.shard(self.model)
        with mock.patch.object(self.accelerator.dataloader_config, "even_batches", True):
            return super()._precompute_ref_logps(*args, **kwargs)

    # TRL's own signature is another than Trainer's.
    def create_model_card(self, model_name=None, dataset_name=None, tags=None, **facts) -> None:  # type: ignore[override]
        """Writes the card of `ZeroTrainer`, with TRL's name for the data set and its tags."""
        tags = [tags] if isinstance(tags, str) else list(tags or ())
        facts.setdefault("dataset", dataset_name)
        super().create_model_card(model_name=model_name, tags=[*tags, *self._tag_names], **facts)


check_overrides(ResumingTrlMixin, DPOTrainer, resuming.OVERRIDES)
check_overrides(ZeroTrlTrainerMixin, DPOTrainer, OVERRIDES)  # of these trainers it overrides most
check_overrides(ZeroTrlTrainerMixin, GRPOTrainer, ("_generate",))
check_overrides(ZeroTrlTrainerMixin, DPOTrainer, ("create_model_card",), hands_on=False)  # facts are for Trainer


def _is_of_trl(cls: type) -> bool:
    return cls.__module__.startswith("trl.")


@torch.no_grad()
def sync_reference(model: nn.Module, reference: nn.Module, alpha: float) -> None:
    """Moves a reference model by the fraction `alpha` towards the policy (TR-DPO, arXiv 2404.09656); 1 copies it. All
    ranks call it. Both are sharded; one unit at a time is gathered."""
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    for _, group in groupby(pairs, key=lambda pair: unit_of(pair[0])):
        sources, targets = zip(*group)
        with gathered(sources), gathered(targets, writeback=True):
            for source, target in zip(sources, targets):
                # in fp32, rounded once: in bf16 a reference that equals the policy would leave it
                target.copy_(target.float().mul_(1.0 - alpha).add_(source.float(), alpha=alpha))


def _with_whole_weights(act: Callable[..., None], *args, **kwargs) -> None:
    """Calls what generates in a callback of TRL, where ranks may have unlike numbers of prompts."""
    generate = callbacks._generate_completions

    def generate_gathered(prompts, model, *args, **kwargs):
        with gathered(model):
            return generate(prompts, model, *args, **kwargs)

    with mock.patch.object(callbacks, "_generate_completions", generate_gathered):
        act(*args, **kwargs)


# Functions by which TRL's constructors look at weights, for weights that are still in files, and what sends weights to
# vLLM, for weights that are sharded


def _adapt(original, model: nn.Module, peft_config, *args, **kwargs):
    """Replaces `get_peft_model`, which puts adapters on the device where the weights seem to be."""
    read_for_adapter(model, peft_config)
    with placeholders(model):
        return original(model, peft_config, *args, **kwargs)


def _clone_template(original, model: nn.Module, *args, **kwargs):
    """Replaces `clone_chat_template`, which adds rows to the embeddings and computes them from the others."""
    return original(materialize(model), *args, **kwargs)


def _hash(original, module: nn.Module, *args, **kwargs) -> str:
    """Replaces `hash_module`, and reads one tensor at a time, also of a model that an earlier trainer has sharded."""
    if args or kwargs:  # what a newer TRL can be told
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
    """Replaces `VLLMGeneration`. It is imported by those who use it."""
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
    """Lets a trainer's constructor work on weights that are still in files, without reading all of them."""
    modules = {sys.modules[base.__module__] for base in trainer_class.__mro__ if base.__module__.startswith("trl.")}
    with ExitStack() as stack:
        for module in modules:
            for name in vars(module).keys() & _REPLACEMENTS.keys():
                replacement = partial(_REPLACEMENTS[name], getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, replacement))
        yield
