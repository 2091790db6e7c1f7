"""Training at every stage against plain torch, which sees all ranks' batches in one process and averages."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero
from hf_zero.engine import ZeroEngine, engine_of
from hf_zero.engine.away import AwayParameter
from tests.compare import weights_of
from tests.engine.models import one_loss


ALL_STAGES = (0, 1, 2, 3)

# fp32 against fp32, where only the order of sums over the ranks and kernels' blocking differ: gradients of a few
# hundred terms agree to about 1e-6 relative, and a few SGD steps of rate 0.1 add no more than that to weights of
# order 1.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}

# Any collective that waits longer has a peer that will never come: the error then says who waited for whom.
SETTINGS = {"timeout_seconds": 30.0}


def sgd(params) -> torch.optim.Optimizer:
    """Linear in the gradient, so that its errors are not amplified; the decay shows which parameters were updated."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.05)


def build_seeded(build, seed: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    return build()


Parts = tuple[nn.Module, ZeroEngine, hf_zero.ShardedOptimizer]


def sharded(build, stage: int, make_optimizer=sgd, **settings) -> Parts:
    """A model, its engine and its optimizer."""
    model = build_seeded(build)
    engine = engine_of(hf_zero.shard(model, stage=stage, **{**SETTINGS, **settings}))
    inner = make_optimizer([p for p in model.parameters() if p.requires_grad])
    return model, engine, hf_zero.ShardedOptimizer(engine, inner)


def _values(act, model: nn.Module, rank: int, step: int) -> list[float]:
    """What `act` returns. Losses that it has not differentiated are differentiated here, their sum in one backward. A
    sharded model is told that this is the last backward of the step, as accelerate tells it."""
    values = act(model, rank, step)
    values = values if isinstance(values, list) else [values]
    losses = [value for value in values if value.requires_grad]
    if losses:
        total = sum(losses)
        is_sharded = engine_of(model) is not None
        with hf_zero.ShardedModel(model).reducing_this_backward(total) if is_sharded else nullcontext():
            total.backward()
    return [float(value) for value in values]


def reference_gradients(model: nn.Module, act=one_loss, step: int = 0) -> dict[str, Tensor]:
    """The mean over the ranks of what plain torch gives for each rank's batch. The model keeps it as its gradients."""
    return _reference_step(model, act, step)[1]


def _reference_step(model: nn.Module, act, step: int) -> tuple[list[float], dict[str, Tensor]]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    total: dict[nn.Parameter, Tensor] = {}
    for peer in range(num_ranks):
        values = _values(act, model, peer, step)
        if peer == rank:
            own = values
        for p in model.parameters():
            if p.grad is not None:
                total[p] = p.grad + total.get(p, 0)
                p.grad = None  # a hook on the gradient must not see the other ranks'
    for p, grad in total.items():
        p.grad = grad / num_ranks
    return own, {name: p.grad for name, p in model.named_parameters() if p in total}


def train_reference(
    build, act=one_loss, num_steps: int = 2, make_optimizer=sgd
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Plain torch: the gradient is the mean of what `act` gives for each rank's batch.

    Args:
        build: makes the model.
        act: `act(model, rank, step)` does one step's forwards and returns its losses, and whatever else to compare.
        num_steps (`int`): how many optimizer steps.
        make_optimizer: from parameters.

    Returns:
        what `act` returned for this rank by step, and the final weights by name.
    """
    model = build_seeded(build)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(num_steps):
        losses.append(_reference_step(model, act, step)[0])
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def train_sharded(build, act, stage: int, num_steps: int = 2, make_optimizer=sgd, **settings):
    """The same through hf_zero; also checks that at stage 3 nothing is readable between steps."""
    rank = dist.get_rank()
    model, engine, optimizer = sharded(build, stage, make_optimizer, **settings)
    issued = record_issued(engine)
    losses = []
    for step in range(num_steps):
        losses.append(_values(act, model, rank, step))
        optimizer.step()
        optimizer.zero_grad()
        assert_away(model, engine)
    assert_same_traffic(engine)
    assert_same_order(engine, issued)
    return losses, weights_of(model)


def assert_away(model: nn.Module, engine) -> None:
    """Where parameters are sharded, none can be read between steps."""
    if any(unit.is_sharded for unit in engine.units):
        for name, p in model.named_parameters():
            assert isinstance(p, AwayParameter), f"{name} is readable outside of forward and backward"


def assert_same_traffic(engine) -> None:
    """Every rank sent the same bytes: none gathered or reduced what another did not."""
    sent = engine.comm.all_gather_object({k: engine.comm.counters.sent_nbytes.get(k, 0) for k in ("gather", "reduce")})
    assert all(other == sent[0] for other in sent), f"bytes sent differ between the ranks: {sent}"


def record_issued(engine: ZeroEngine) -> list[str]:
    """Returns a list that grows by each gather, reduction and vote that this rank issues from now on.

    Messages between CPU ranks find their way by their tags, in whatever order they are sent. On a device all of these
    are kernels of one communicator, where the ranks' sequences must be equal, or they mix up each other's values.
    """
    issued: list[str] = []
    comm = engine.comm

    def recorded(call: Callable, verb: str) -> Callable:
        @wraps(call)
        def issue(*args, **kwargs):
            issued.append(f"{verb} {kwargs.get('what', '')}")
            return call(*args, **kwargs)

        return issue

    if comm.num_ranks > 1:
        shards = comm.shard_group
        shards.all_gather = recorded(shards.all_gather, "gather")
        for gradient in engine.gradients:
            gradient._average_ranks = recorded(gradient._average_ranks, "reduce")
        comm.all_gather_rows = recorded(comm.all_gather_rows, "vote")
    return issued


def assert_same_order(engine, issued: list[str]) -> None:
    """All ranks have issued the same collectives in the same order."""
    for rank, theirs in enumerate(engine.comm.all_gather_object(list(issued))):
        at = next((at for at, pair in enumerate(zip_longest(issued, theirs)) if pair[0] != pair[1]), None)
        assert at is None, (
            f"from number {at} on, this rank issues {issued[at : at + 6]}, rank {rank} {theirs[at : at + 6]}"
        )


def assert_equal_weights(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str, exact: bool = False) -> None:
    assert found.keys() == wanted.keys()
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else TOLERANCE
    for name in wanted:
        torch.testing.assert_close(
            found[name], wanted[name], **tolerance, msg=lambda text, name=name: f"{what}: {name}: {text}"
        )


def assert_like_plain_torch(
    build, act=one_loss, *, stages=ALL_STAGES, num_steps: int = 2, make_optimizer=sgd, exact: bool = True, **settings
) -> None:
    """Losses and weights of every stage equal plain torch to rounding, and one another bit for bit.

    Stage 3 runs both ways: with parameters in memory that the ranks share, and gathered by messages. One rank runs
    every stage also as one of several would.

    Args:
        build, act, num_steps, make_optimizer: as in `train_reference`.
        stages (`tuple[int, ...]`): which to compare.
        exact (`bool`): `False` where several backwards before a step change the order of a sum between stages.
    """
    wanted_losses, wanted = train_reference(build, act, num_steps, make_optimizer)
    first = None
    ways = [(stage, {}) for stage in stages]
    ways += [(stage, {"shared_memory": False}) for stage in stages if stage == 3 and dist.get_world_size() > 1]
    ways += [(stage, {"strict": True}) for stage in stages if dist.get_world_size() == 1]
    for stage, way in ways:
        losses, weights = train_sharded(build, act, stage, num_steps, make_optimizer, **{**way, **settings})
        torch.testing.assert_close(losses, wanted_losses, **TOLERANCE, msg=lambda text, s=stage: f"stage {s}: {text}")
        assert_equal_weights(weights, wanted, f"stage {stage} against plain torch")
        if first is not None and exact:
            assert losses == first[0], f"stage {stage}: losses differ from those of stage {stages[0]}"
            assert_equal_weights(weights, first[1], f"stage {stage} against stage {stages[0]}", exact=True)
        first = first or (losses, weights)


def assert_exact_or_refused(build, act=one_loss, **options) -> None:
    """What cannot be followed is refused with a reason; it is never wrong or NaN in silence."""
    try:
        assert_like_plain_torch(build, act, **options)
    except hf_zero.errors.HfZeroError as error:
        assert not isinstance(error, hf_zero.errors.CommError), f"a rank waited in vain: {error}"
