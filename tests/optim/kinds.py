"""Optimizers that do not update each element by itself, or not always the same one, as plain torch and hf_zero take
them."""

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import hf_zero
from tests import models


# matrices of 8192 to 33280 elements: from 4096 on the state is quantised, from 8192 on a parameter can be divided, and
# where the shards of two and of four ranks meet in a block they are no multiple of 256 from the parameter's beginning
wide_llama = partial(models.llama, hidden=128, vocab=64, layers=2)

# [Note: eps is 1e-4] see test_parity
ADAM = {"lr": 1e-3, "eps": 1e-4}


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    return hf_zero.MuonWithAdamW()(model, lr=1e-3, adamw={"eps": 1e-4})


def _on_all(module: str, name: str, **settings) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model):
        return getattr(import_module(module), name)(models.decay_groups(model), **settings)

    return make


KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Muon with AdamW": _muon,
    "Adafactor (torch)": _on_all("torch.optim", "Adafactor", lr=1e-2),
    "Adafactor": _on_all(
        "transformers.optimization", "Adafactor", lr=1e-3, scale_parameter=False, relative_step=False, beta1=0.9
    ),
    "Adafactor, relative step": _on_all(
        "transformers.optimization", "Adafactor", scale_parameter=True, relative_step=True, warmup_init=False
    ),
    "8-bit AdamW (torchao)": _on_all("torchao.optim", "AdamW8bit", **ADAM),
    "4-bit AdamW (torchao)": _on_all("torchao.optim", "AdamW4bit", **ADAM),
    "8-bit AdamW (bitsandbytes)": _on_all("bitsandbytes.optim", "AdamW", optim_bits=8, **ADAM),
    "8-bit Lion (bitsandbytes)": _on_all("bitsandbytes.optim", "Lion", optim_bits=8, lr=1e-4),
    "AdEMAMix (bitsandbytes)": _on_all("bitsandbytes.optim", "AdEMAMix", t_alpha=6, t_beta3=6, **ADAM),
    "8-bit AdEMAMix (bitsandbytes)": _on_all("bitsandbytes.optim", "AdEMAMix", optim_bits=8, **ADAM),
    "Schedule-free AdamW": _on_all("schedulefree", "AdamWScheduleFree", warmup_steps=2, **ADAM),
    "Schedule-free RAdam": _on_all("schedulefree", "RAdamScheduleFree", **ADAM),
    "Schedule-free SGD": _on_all("schedulefree", "SGDScheduleFree", lr=0.05, warmup_steps=2),
}

# Where a rounding error of a gradient may turn into one of the state, of 8 or of bfloat16's bits.
COARSE = ("Muon", "8-bit", "4-bit")

_PACKAGES = {"torchao": "torchao", "bitsandbytes": "bitsandbytes", "Schedule-free": "schedulefree"}


def _package_of(kind: str) -> str:
    return next((package for word, package in _PACKAGES.items() if word in kind), "torch")


def skip_without(kind: str) -> None:
    """Skips the test where the package is not installed that has this optimizer."""
    pytest.importorskip(_package_of(kind), reason=f"has {kind}; install the extra `test`")


def needs_package_of(kind: str) -> pytest.MarkDecorator:
    """The same as a mark."""
    package = _package_of(kind)
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package}: has {kind}; install the extra `test`")


def each_kind(always: tuple[str, ...]) -> pytest.MarkDecorator:
    """A parameter `kind`, of which some are in the core."""
    full = pytest.mark.full("more cases")
    marks = {kind: [needs_package_of(kind), *([] if kind in always else [full])] for kind in KINDS}
    return pytest.mark.parametrize("kind", [pytest.param(kind, marks=own) for kind, own in marks.items()])


def is_coarse(kind: str) -> bool:
    return kind.startswith(COARSE)


def model_for(kind: str) -> nn.Module:
    """A Llama whose parameters are large enough to be quantised where that matters; always the same weights."""
    torch.manual_seed(0)
    return (wide_llama() if "-bit" in kind else models.llama()).train()


@contextmanager
def eager():
    """torchao compiles its update for each shape, which takes longer than any test; eagerly it is the same."""
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def precise_muon():
    """Muon's iteration in fp64: in bf16 a rounding error of the gradient may become one of 2^-8 of the update."""

    def orthogonal(grad: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> Tensor:
        a, b, c = coefficients
        x = grad.double() / grad.double().norm().clamp(min=eps)
        for _ in range(num_steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.to(grad.dtype)

    with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", orthogonal):
        yield


def set_mode(optimizer: torch.optim.Optimizer, mode: str) -> None:
    """`train` or `eval`, where the optimizer knows it."""
    if hasattr(optimizer, mode):
        getattr(optimizer, mode)()
