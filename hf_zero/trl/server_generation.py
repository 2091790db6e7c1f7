"""Generation with a vLLM server, which receives the sharded weights unit by unit."""

import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, is_peft_model
from torch import Tensor, nn
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from hf_zero.compat import check_overrides
from hf_zero.engine import gathered
from hf_zero.engine.access import unit_of
from hf_zero.errors import CommError, ConfigError


# Interval and timeout of the server's health checks while a unit is being sent.
WATCH_SECONDS, ANSWER_SECONDS = 5.0, 30.0


@dataclass
class _Part:
    """Parameters of a unit that are merged and sent together."""

    adapted: nn.Module | None  # the adapter layer whose base parameters these are
    params: dict[str, nn.Parameter] = field(default_factory=dict)  # by the server's names

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the values with merged adapters. The parameters must be gathered."""
        params = list(self.params.values())
        values = [param.detach() for param in params] if self.adapted is None else _merged(self.adapted, params)
        yield from zip(self.params, values)


class ServerGeneration(VLLMGeneration):
    """TRL's `VLLMGeneration` in server mode for sharded models.

    TRL announces all tensors at once, and gathers one parameter after another while vLLM requests them. vLLM keeps
    references to the tensors until a message of 1 GiB is full, but the memory of a gathered unit is reused before
    that. So this class sends each unit as a separate update, and releases it when the server has received it.

    Only rank 0 communicates with the server. Its errors are raised on all ranks.
    """

    def _init_vllm(self) -> None:
        """Connects to the server on rank 0. Raises [`ConfigError`] if the server does not support the model's weights,
        and [`CommError`] on all ranks if it cannot be reached or accepts no weights."""
        if getattr(self.model, "hf_quantizer", None) is not None:
            raise ConfigError("use_vllm: the server does not accept quantized weights; remove one of them")
        if is_peft_model(self.model) and not hasattr(self.model, "merge_adapter"):
            raise ConfigError(
                "use_vllm: prompt learning cannot be merged for the server; use LoRA, or remove use_vllm"
            )
        self._failure: BaseException | None = None
        self._parts: list[list[_Part]] = []
        url: str | None = self.server_base_url
        self.server_base_url: str = url or f"http://{self.server_host}:{self.server_port}"
        self._on_first("connecting", self._connect)

    def _connect(self) -> None:
        client = VLLMClient(
            base_url=self.server_base_url, group_port=self.group_port, connection_timeout=self.server_timeout
        )
        self._watched(lambda: client.init_communicator(device=self.accelerator.device))
        client.generate = partial(self._ask, client.generate, lambda *_, **__: _NO_COMPLETIONS)
        client.image_features = partial(self._ask, client.image_features, lambda images: [None] * len(images))
        self.vllm_client = client

    @torch.no_grad()
    def sync_weights(self) -> None:
        """Sends the weights with merged adapters, and gathers one unit at a time. All ranks must call it. Raises
        [`CommError`] on all ranks if the server does not accept them."""
        self._parts = self._parts or _parts_of(self.model)
        self._on_first("announcing weights", self._begin)
        for parts in self._parts:
            adapters = [param for part in parts if part.adapted is not None for param in part.adapted.parameters()]
            with gathered([*(param for part in parts for param in part.params.values()), *adapters]):
                self._on_first(f"sending {next(iter(parts[0].params))}", partial(self._send, parts))
        self._on_first("finishing an update of weights", self._finish)

    def _begin(self) -> None:
        self.vllm_client._start_weight_update()
        self.vllm_client._updating_weights = True  # as in `weight_update`, which would also finish a failed update

    def _send(self, parts: list[_Part]) -> None:
        """Sends the gathered parameters of a unit, and returns when the server has received them."""
        announced = [
            (name, str(param.dtype).removeprefix("torch."), list(param.shape))
            for part in parts
            for name, param in part.params.items()
        ]
        values = (pair for part in parts for pair in part.tensors())
        if torch.accelerator.is_available():
            torch.accelerator.synchronize(self.accelerator.device)  # vLLM reads on other streams
        self._watched(lambda: self.vllm_client.update_named_params(announced, values))

    def _finish(self) -> None:
        self.vllm_client._updating_weights = False
        self.vllm_client._finish_weight_update()
        self.vllm_client.reset_prefix_cache()

    def generate(self, prompts, images, num_generations, profiler=None, **options) -> tuple:
        """Generates like TRL. Raises [`CommError`] on all ranks if the server does not answer."""
        found = super().generate(prompts, images, num_generations, profiler, **options)
        failure, self._failure = self._failure, None
        self._tell_all("generating", failure)
        return found

    def _ask(self, ask: Callable[..., Any], nothing: Callable[..., Any], *args, **kwargs) -> Any:
        """Sends a request. On failure, records the error and returns the result of `nothing`, since the other ranks
        wait for a broadcast of this rank."""
        if self._failure is None:
            try:
                return ask(*args, **kwargs)
            except BaseException as error:  # also an interrupt: `generate` raises it after informing the other ranks
                self._failure = error
        return nothing(*args, **kwargs)

    def _on_first(self, what: str, act: Callable[[], None]) -> None:
        """Runs `act` on rank 0. All ranks must call it, and all raise if it fails."""
        failure = None
        if self.accelerator.is_main_process:
            try:
                act()
            except BaseException as error:  # also an interrupt
                failure = error
        self._tell_all(what, failure)

    def _tell_all(self, what: str, failure: BaseException | None) -> None:
        reason = None if failure is None else f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
        told = [reason]
        broadcast_object_list(told, from_process=0)
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        if told[0] is not None:
            raise CommError(
                f"vLLM server {self.server_base_url}: {what} failed ({told[0]}); check its log and restart it"
            ) from failure

    def _watched(self, act: Callable[[], None]) -> None:
        """Runs `act` in a thread, and raises if the server stops responding meanwhile: NCCL would wait forever."""
        outcome: Future[None] = Future()
        device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

        def work() -> None:
            try:
                if device is not None:
                    torch.accelerator.set_device_index(device)
                act()
                outcome.set_result(None)
            except BaseException as error:
                outcome.set_exception(error)

        threading.Thread(target=work, name="hf_zero vLLM", daemon=True).start()
        while not wait([outcome], timeout=WATCH_SECONDS).done:
            urllib.request.urlopen(f"{self.server_base_url}/health", timeout=ANSWER_SECONDS).close()
        outcome.result()


check_overrides(ServerGeneration, VLLMGeneration, ("_init_vllm", "sync_weights", "generate"))

_NO_COMPLETIONS: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": None}


def _parts_of(model: nn.Module) -> list[list[_Part]]:
    """Returns the parameters to send by unit, in the order of the model's parameters, which is the same on all
    ranks."""
    adapted = _adapted_layers(model)
    units: dict[Any, dict[int, _Part]] = {}
    for name, param in model.named_parameters():
        if (known := _name_at_server(model, name)) is None:
            continue
        layer = adapted.get(id(param))
        parts = units.setdefault(unit_of(param), {})
        parts.setdefault(id(layer), _Part(layer)).params[known] = param
    return [list(parts.values()) for parts in units.values()]


def _name_at_server(model: nn.Module, name: str) -> str | None:
    """Returns a parameter's name without PEFT's prefixes, like TRL, or `None` for parameters of adapters."""
    if is_peft_model(model):
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if model.prefix in name or "original_module" in name:
            return None
        name = name.replace("modules_to_save.default.", "")
    return name.replace("_checkpoint_wrapped_module.", "")


def _adapted_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Returns the outermost adapter layer of each parameter inside one, by the parameter's `id`."""
    if not is_peft_model(model):
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = (module for module in model.modules() if isinstance(module, BaseTunerLayer))
    found: dict[int, nn.Module] = {}
    for layer in layers:
        for param in layer.parameters():
            found.setdefault(id(param), layer)  # `modules()` yields outer layers first
    return found


def _merged(layer: nn.Module, params: list[nn.Parameter]) -> list[Tensor]:
    """Returns the values of parameters with the adapters of a layer merged. Leaves the parameters unchanged, whereas
    merging and unmerging would change them by rounding."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    tuners = [module for module in layer.modules() if isinstance(module, BaseTunerLayer)]
    kept = [param.data for param in params]
    try:
        for param in params:
            param.data = param.data.clone()
        for tuner in tuners:
            tuner.merge()
        merged = [param.data for param in params]
        for param in params:
            param.data = torch.zeros_like(param.data)  # `unmerge` only has to reset PEFT's own state
        for tuner in reversed(tuners):
            tuner.unmerge()
    finally:
        for param, data in zip(params, kept):
            param.data = data
    return merged
