"""Generation with a vLLM server, which receives the sharded weights unit by unit."""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from trl.generation.vllm_generation import VLLMGeneration

from hf_zero.compat import check_overrides
from hf_zero.engine import gathered
from hf_zero.engine.access import unit_of
from hf_zero.errors import ConfigError


class ServerGeneration(VLLMGeneration):
    """TRL's `VLLMGeneration` in server mode for sharded models. All ranks gather one unit after another; rank 0 sends
    copies of the values, because vLLM keeps references to them after the memory of the unit is reused."""

    def _init_vllm(self) -> None:
        """Raises [`ConfigError`] if the server does not support the model's weights."""
        if getattr(self.model, "hf_quantizer", None) is not None:
            raise ConfigError("use_vllm: the server does not accept quantized weights; remove one of them")
        if is_peft_model(self.model) and not hasattr(self.model, "merge_adapter"):
            raise ConfigError(
                "use_vllm: prompt learning cannot be merged for the server; use LoRA, or remove use_vllm"
            )
        super()._init_vllm()

    @torch.no_grad()
    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights with merged adapters, under the server's names, in the same order on all ranks."""
        layers = _adapted_layers(self.model)
        units: dict[Any, list[tuple[str, nn.Parameter]]] = {}
        for name, param in self.model.named_parameters():
            units.setdefault(unit_of(param), []).append((name, param))
        for named in units.values():
            with gathered([param for _, param in named]):
                for name, param in named:
                    if (known := _name_at_server(self.model, name)) is not None:
                        layer = layers.get(id(param))
                        yield known, param.detach().clone() if layer is None else _merged(layer, param)


check_overrides(ServerGeneration, VLLMGeneration, ("_init_vllm", "_iter_named_params"))


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


def _merged(layer: nn.Module, param: nn.Parameter) -> Tensor:
    """Returns the value of a parameter with the adapters of its layer merged. Leaves the layer unchanged, whereas
    merging and unmerging would change it by rounding."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    tuners = [module for module in layer.modules() if isinstance(module, BaseTunerLayer)]
    kept = {each: each.data for each in layer.parameters()}
    try:
        for each in kept:
            each.data = each.data.clone()
        for tuner in tuners:
            tuner.merge()
        merged = param.data.clone()
        for tuner in reversed(tuners):
            tuner.unmerge()  # resets PEFT's own state
    finally:
        for each, data in kept.items():
            each.data = data
    return merged
