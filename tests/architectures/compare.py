"""One case on every rank: the tiny model trained in plain DDP and at stages 1, 2 and 3, and what came of it."""

import copy
import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_zero.errors import LifecycleError
from tests.architectures.inputs import make_inputs
from tests.architectures.tiny import NUM_LABELS, tiny_config
from tests.architectures.walk import Case
from tests.compare import assert_close, assert_equal
from tests.trainer.harness import seed_everything
from tests.training import Plain, Record, Sharded, adamw


NUM_STEPS = 3
# As in `test_parity`: steps * lr * rounding error of a gradient / eps, for 3 steps.
ATOL = NUM_STEPS * 1e-3 * 1e-9 / 1e-4
# Relative. torch's norm of one tensor of 10^5 elements is off by some 1e-6; ours is taken in fp64.
LOSS, NORM = 1e-6, 5e-6
AMPLE = 10  # see the note in `_assert_close_to_plain`

# Heads whose labels are a start and an end, or yes and no.
TWO_LABELS = ("question answering", "document question answering", "pretraining", "next sentence prediction")


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Args:
        passed (`bool`): the stages train as plain DDP does.
        reason (`str`): why the model does not train, also without hf_zero, or what refuses it at stage 3; empty when
            it does.
        has_own_loss (`bool`): the loss is the model's; else the test took one of its own on the outputs.
    """

    passed: bool
    reason: str = ""
    has_own_loss: bool = True


class Untrainable(Exception):
    """The model does not train in plain torch either."""


def compare(case: Case) -> Outcome:
    """Trains the case's model in all ways, on every rank, and compares.

    Raises:
        `AssertionError`: when the ways differ; and whatever hf_zero raises.
    """
    gc.freeze()  # what was imported need not be looked at
    try:
        return _compare(case)
    finally:
        gc.collect()  # engines lie in cycles, and hold memory that ranks share and its descriptors


def _compare(case: Case) -> Outcome:
    prepared, problem = _tried(_prepare, case)
    if problem:
        return Outcome(False, problem)
    model, batches, has_own_loss = prepared
    plain, problem = _tried(lambda: _train(Plain(copy.deepcopy(model), adamw), batches))
    if problem:
        return Outcome(False, f"in plain DDP, {problem}")
    stages, refused = {}, ""
    for stage in (1, 2, 3):
        try:
            stages[stage] = _train(Sharded(copy.deepcopy(model), adamw, stage, timeout_seconds=30), batches)
        except LifecycleError as error:  # parameters that are used outside of their block's forward
            if stage < 3:
                raise
            refused = f"hf_zero refuses stage 3: {str(error).partition(',')[0]}"
    for stage, trained in stages.items():
        assert_equal(trained, stages[1], f"stage {stage} and stage 1")
    _assert_close_to_plain(model, batches, stages[max(stages)], plain)
    return Outcome(False, refused) if refused else Outcome(True, has_own_loss=has_own_loss)


def _tried(act: Callable, *args) -> tuple[Any, str]:
    """What `act` returns, and why it failed on any rank; the same reason on all, empty when it has not failed."""
    result, problem = None, ""
    try:
        result = act(*args)
    except Exception as error:  # noqa: B902 - whatever it is, it is the reason
        problem = _reason(error)
    problems = [problem] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return result, next(filter(None, problems), "")


def _prepare(case: Case) -> tuple[nn.Module, list[dict], bool]:
    """The model, tried in plain torch, this rank's batch of each step, and whether the model has a loss."""
    model = build(case)
    batches = [make_inputs(model, case.task, 100 * step + dist.get_rank()) for step in range(NUM_STEPS)]
    trial = copy.deepcopy(model)
    seed_everything(0)
    output = trial(**batches[0])
    loss = loss_of(output)
    loss.backward()
    grads = [p.grad for p in trial.parameters() if p.grad is not None]
    if not torch.isfinite(loss) or not all(torch.isfinite(grad).all() for grad in grads):
        raise Untrainable("the loss of the tiny model is not finite")
    if not any(grad.any() for grad in grads):
        raise Untrainable("no parameter gets a gradient")
    with torch.no_grad():
        for batch in batches[1:]:  # an error in the midst of a training would leave the other ranks waiting
            trial(**batch)
    return model, batches, own_loss_of(output) is not None


def build(case: Case) -> nn.Module:
    """The case's tiny model, in training mode."""
    import transformers

    model_class = getattr(transformers, case.class_name)
    if model_class.forward is nn.Module.forward:
        raise Untrainable(f"{case.class_name} has no forward")
    config = tiny_config(case.model_type)
    if case.task in TWO_LABELS and config.num_labels == NUM_LABELS:
        config.num_labels = 2
    if not isinstance(config, model_class.config_class):  # the mapping of auto classes leads to a part of the model
        parts = (getattr(config, name) for name in config.sub_configs)
        config = next((part for part in parts if isinstance(part, model_class.config_class)), config)
    torch.manual_seed(0)
    return model_class(config).train()


def own_loss_of(output) -> Tensor | None:
    """The loss that the model has computed, if any."""
    loss = output.get("loss") if hasattr(output, "get") else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.requires_grad else None


def loss_of(output) -> Tensor:
    """The model's loss; where it has none, the mean squared distance of its outputs from fixed numbers."""
    loss = own_loss_of(output)
    if loss is not None:
        return loss.mean()
    means = [
        (tensor.float() - torch.cos(torch.arange(tensor.numel(), dtype=torch.float32)).view(tensor.shape))
        .square()
        .mean()
        for tensor in _tensors(output)
        if tensor.is_floating_point() and tensor.requires_grad and tensor.numel()
    ]
    if not means:
        raise Untrainable("no output has a gradient")
    return torch.stack(means).sum()


def _tensors(value):
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _train(subject: Plain | Sharded, batches: list[dict]) -> Record:
    losses, norms = [], []
    for step, batch in enumerate(batches):
        seed_everything(10 * step + dist.get_rank())  # models may draw masks and noise in their forward
        loss = loss_of(subject(**batch))
        loss.backward()
        losses.append(loss.detach().float())
        norms.append(subject.clip_grad_norm_(0.1).detach())
        subject.optimizer.step()
        subject.optimizer.zero_grad()
    return Record(torch.stack(losses), torch.stack(norms), subject.weights())


def _assert_close_to_plain(model: nn.Module, batches: list[dict], sharded: Record, plain: Record) -> None:
    """Equal to rounding; after the first step, as far as the model itself does not amplify rounding.

    [Note: models that amplify rounding] some models carry a rounding error of one step into much larger differences in
    the next: batch norm over a handful of values, a router whose choice flips, a matching that changes. What may come
    of rounding is then measured and not guessed: plain DDP is trained once more with every weight moved by one unit in
    the last place, up or down at random. Ours may differ from DDP by `AMPLE` times as much as that. The first step,
    which no former rounding reaches, is held to the strict bounds in any case, and the stages are compared bit by bit.
    """
    first, plain_first = (Record(run.losses[:1], run.norms[:1], {}) for run in (sharded, plain))
    assert_close(first, plain_first, "the first step of stage 3 and DDP", loss=LOSS, norm=NORM)
    try:
        assert_close(sharded, plain, "stage 3 and DDP", loss=LOSS, norm=NORM, atol=ATOL)
        is_close = True
    except AssertionError:
        is_close = False
    if _on_all_ranks(is_close):
        return
    moved = _train(Plain(_moved(model), adamw), batches)
    for key, bound in (("losses", LOSS), ("norms", NORM)):
        wanted = getattr(plain, key)
        error, own = ((getattr(run, key) - wanted).abs().max().item() for run in (sharded, moved))
        allowed = bound * wanted.abs().max().item() + AMPLE * own
        assert error <= allowed, f"stage 3 and DDP: {key} differ by {error:.2e}, {allowed:.2e} allowed"
    weights = {name: weight for name, weight in plain.weights.items() if weight.numel()}
    own = max((moved.weights[name] - weight).abs().max().item() for name, weight in weights.items())
    for name, weight in weights.items():
        error = (sharded.weights[name] - weight).abs().max().item()
        allowed = 1e-5 * weight.abs().max().item() + ATOL + AMPLE * own
        assert error <= allowed, f"stage 3 and DDP: {name} differs by {error:.2e}, {allowed:.2e} allowed"


def _moved(model: nn.Module) -> nn.Module:
    """A copy with every weight one unit in the last place away."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in moved.parameters():
            signs = torch.randint(0, 2, p.shape, generator=generator) * 2 - 1
            p.mul_(1 + signs * 2.0**-23)
    return moved


def _on_all_ranks(value: bool) -> bool:
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(values)


def _reason(error: Exception) -> str:
    """The first sentence, without what differs from machine to machine or from run to run."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    if text.startswith("Class validation error") and len(lines) > 1:  # who complains comes before what about
        text = lines[1]
    text = re.sub(r"0x[0-9a-f]+|/\S+/", "", text).replace("|", "/").split(". ")[0].strip(" .:")
    kind = "" if isinstance(error, Untrainable) else f"{type(error).__name__}: "
    return f"{kind}{text}"[:200]
