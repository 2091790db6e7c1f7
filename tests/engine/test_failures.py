"""After an exception or an interrupt in forward, backward, step, gather or load, the next step equals that of a clean
run, or nothing is saved."""

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.utils.checkpoint import checkpoint

import hf_zero
from hf_zero.checkpoint.conversion import Origin
from hf_zero.checkpoint.safetensors import OpenFiles
from hf_zero.checkpoint.state import load_state
from hf_zero.comm import Pending
from hf_zero.engine.flat import Flat
from hf_zero.engine.schedule import Schedule, Stack
from hf_zero.errors import CheckpointError, CommError, LifecycleError
from hf_zero.optim.host import HostUpdate
from tests import models
from tests.compare import weights_of
from tests.distributed import ranks, run_new_ranks
from tests.engine.models import Block, Tower, inputs, loss_of, one_backward
from tests.engine.reference import (
    ALL_STAGES,
    assert_away,
    assert_equal_weights,
    assert_like_plain_torch,
    assert_same_traffic,
    sharded,
    train_reference,
)
from tests.tiers import more
from tests.training import Sharded, adamw


pytestmark = pytest.mark.direct


class Boom(Exception):
    pass


def _raise(*_):
    raise Boom


class Explosive(Block):
    """Raises on demand: inside its forward, or when the gradient comes to its middle."""

    when = None

    def forward(self, hidden):
        if self.when == "forward":
            raise Boom
        middle = torch.tanh(self.up(self.norm(hidden)))
        if self.when == "backward" and middle.requires_grad:
            middle.register_hook(_raise)
        return hidden + self.down(middle)


class ExplosiveTower(Tower):
    use_checkpoint = None

    def __init__(self):
        super().__init__(4, block=Explosive)

    def forward(self, x):
        if self.use_checkpoint is None:
            return super().forward(x)
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=self.use_checkpoint)
        return self.head(hidden)


def fail_in_forward(model, rank, layer=2):
    model.layers[layer].when = "forward"
    with pytest.raises(Boom):
        model(inputs(rank, 77))
    model.layers[layer].when = None


def fail_in_evaluation(model, rank):
    with torch.no_grad():
        fail_in_forward(model, rank, layer=1)


def fail_in_backward(model, rank, layer=1):
    model.layers[layer].when = "backward"
    loss = loss_of(model(inputs(rank, 77)))
    with pytest.raises(Boom):
        loss.backward()
    model.layers[layer].when = None


def fail_in_the_last_backward(model, rank):
    fail_in_backward(model, rank, layer=3)


def fail_between(model, rank):
    """Out of memory in the loss, say: a forward whose backward never starts."""
    model(inputs(rank, 77))
    model(inputs(rank, 78))


def fail_in_a_module_of_the_root(model, rank):
    handle = model.head.register_forward_hook(_raise)
    with pytest.raises(Boom):
        model(inputs(rank, 77))
    handle.remove()


def fail_in_a_wrong_shape(model, rank):
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 5))


def fail_twice(model, rank):
    fail_in_backward(model, rank)
    fail_in_forward(model, rank)
    fail_in_the_last_backward(model, rank)


FAILURES = [fail_in_forward, fail_in_evaluation, fail_in_backward, fail_in_the_last_backward, fail_between]
FAILURES += [fail_in_a_module_of_the_root, fail_in_a_wrong_shape, fail_twice]


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize(
    "use_checkpoint, stages", [(None, ALL_STAGES), (False, (3,)), *more((False, (0, 1, 2)), (True, ALL_STAGES))]
)
@ranks(2)
def test_after_a_failure_parameters_are_whole_and_the_next_step_equals_that_of_a_clean_run(use_checkpoint, stages):
    def build():
        model = ExplosiveTower()
        model.use_checkpoint = use_checkpoint
        return model

    rank, (_, wanted) = dist.get_rank(), train_reference(build)
    for stage in stages:
        for fail in FAILURES:
            model, engine, optimizer = sharded(build, stage)
            one_backward(model, rank, 0)
            optimizer.step()
            before, what = weights_of(model), f"stage {stage} after {fail.__name__}"
            fail(model, rank)
            assert_equal_weights(weights_of(model), before, what, exact=True)
            optimizer.zero_grad()  # what the failed backward collected is not wanted
            one_backward(model, rank, 1)
            optimizer.step()
            assert_away(model, engine)
            assert_same_traffic(engine)
            assert_equal_weights(weights_of(model), wanted, what)


@ranks(2)
def test_a_backward_that_fails_on_all_ranks_is_in_no_step():
    """Neither where the loop catches the error and steps all the same, nor where another backward comes first."""
    for stage in (2, 3):
        for num_backwards in (0, 1):
            _, wanted = train_reference(ExplosiveTower, num_steps=num_backwards)
            model, _, optimizer = sharded(ExplosiveTower, stage)
            fail_in_backward(model, dist.get_rank())
            for step in range(num_backwards):
                one_backward(model, dist.get_rank(), step)
            optimizer.step()
            what = f"stage {stage}, {num_backwards} backwards"
            assert_equal_weights(weights_of(model), wanted, what, exact=not num_backwards)


class ReturnsNone(Tower):
    """A model that is called while an exception is handled, and returns nothing: that is no failure."""

    def forward(self, x):
        self.output = super().forward(x)


@ranks(2)
def test_a_model_may_be_called_in_an_exception_handler():
    def act(model, rank, step):
        try:
            raise Boom
        except Boom:
            model(inputs(rank, step))
        return loss_of(model.output)

    assert_like_plain_torch(ReturnsNone, act)


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_a_kept_graph_is_not_run_again_in_one_loss_with_another(stage):
    model, _, _ = sharded(Tower, stage)
    x = inputs(dist.get_rank(), 0).requires_grad_()
    first = loss_of(model(x))
    torch.autograd.grad(first, x, retain_graph=True)
    second = loss_of(model(inputs(dist.get_rank(), 1)))
    with pytest.raises(LifecycleError, match=r"were reduced; a graph kept by a backward \(retain_graph=True\)"):
        (first + second).backward()


def test_the_schedule_forgets_what_broke_off():
    """Else the next forward gathers what the broken one had not reached."""
    stack = Stack(units := ["u0", "u1", "u2", "u3"])
    schedule = Schedule([stack])
    for unit in units:
        schedule.record(unit)
    stack.advance("u2")
    schedule.reset()
    assert schedule.current_tape.units == []
    assert not any(map(schedule.expects, units))
    assert stack.advance("u0") == ["u0"]


# Interrupts: training goes on with right values, or nothing is saved


PACKAGE = str(Path(hf_zero.__file__).parent)


def _loss(subject: Sharded) -> float:
    with torch.no_grad():
        return float(subject(**models.batch("mlp", seed=7)))


def _interrupt(*_, **__) -> None:
    raise KeyboardInterrupt


@contextmanager
def interrupted_in(owner: type, name: str) -> Iterator[None]:
    """Interrupts the code inside the context in a method of the package."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, _interrupt)
        yield


@contextmanager
def interrupted_at(call: int) -> Iterator[list[str]]:
    """Interrupts the code inside the context at its n-th call of a function of the package. Yields a list of where."""
    num_calls, where = 0, []

    def trace(frame, event: str, _argument):
        nonlocal num_calls
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            num_calls += 1
            if num_calls == call:
                where.append(code.co_qualname)
                raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(KeyboardInterrupt):
            yield where
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("gathers", [True, False])
def test_a_gather_or_a_forward_may_be_interrupted_anywhere(gathers):
    subject, step = Sharded(models.build("mlp"), adamw, 3, offload="params"), 7 if gathers else 5
    wanted, where, call = _loss(subject), [""], 0
    while where:
        with ExitStack() as stack, interrupted_at(call := call + step) as where:
            stack.enter_context(hf_zero.gathered(subject.model)) if gathers else _loss(subject)
        assert not any(unit.num_gathered for unit in subject.engine.units), where
        subject.optimizer.zero_grad()
        assert _loss(subject) == wanted, where
    assert call > 50


def _broken_backward(subject: Sharded, seed: int, on: int | None = None) -> None:
    """A backward that raises as it ends, on one rank or on all."""
    loss = subject(**models.batch("mlp", seed=seed))
    if on in (None, dist.get_rank() if dist.is_initialized() else 0):
        last = next(iter(subject.model.parameters())).register_hook(_interrupt)  # of those that get a gradient
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        last.remove()
    else:
        loss.backward()


@pytest.mark.parametrize("stage", [0, 1])
@ranks(2)
def test_a_backward_that_raises_on_one_rank_is_an_error_that_names_it_on_all(stage):
    """Whichever comes first, and also if another backward follows."""
    subject, wanted = (Sharded(models.build("mlp"), adamw, stage) for _ in range(2))
    before = subject.weights()
    goes_on = [partial(subject.clip_grad_norm_, 1.0), partial(subject.clip_grad_value_, 1.0), subject.optimizer.step]
    goes_on += [partial(hf_zero.ShardedModel(subject.model).full_grad, "blocks.0.linear.weight")]
    for num_more in (0, 1):
        for go_on in goes_on:
            _broken_backward(subject, 1, on=1)
            for _ in range(num_more):
                _backward(subject)
            with pytest.raises(LifecycleError, match="rank 1 has dropped gradients that rank 0 holds"):
                go_on()
            subject.optimizer.step()  # of no gradients
    assert_equal_weights(subject.weights(), before, "no step", exact=True)
    for each in (subject, wanted):
        _backward(each, seed=2)
        each.optimizer.step()
    assert_equal_weights(subject.weights(), wanted.weights(), "the next step", exact=True)


@ranks(2)
def test_after_a_backward_that_raises_on_one_rank_all_ranks_may_call_zero_grad():
    """Also after one that raised before its first gradient."""
    for breaks_early in (False, True):
        subject, wanted = (Sharded(models.build("mlp"), adamw, 1) for _ in range(2))
        if breaks_early and dist.get_rank() == 1:
            loss = subject(**models.batch("mlp", seed=1))
            loss.register_hook(_raise)
            with pytest.raises(Boom):
                loss.backward()
        else:
            _broken_backward(subject, 1, on=1)
        for each in (subject, wanted):
            each.optimizer.zero_grad()
            _backward(each, seed=2)
            each.optimizer.step()
        assert_equal_weights(subject.weights(), wanted.weights(), f"{breaks_early=}", exact=True)


def _raises_on_one_rank() -> None:
    subject = Sharded(models.build("mlp"), adamw, 2, shared_memory=False, timeout_seconds=3.0)
    with pytest.raises(CommError, match=f"rank {1 - dist.get_rank()} .*(does not answer|has ended)"):
        _broken_backward(subject, 1, on=1)
        subject.optimizer.step()


def test_at_stage_2_the_other_ranks_raise_too_within_the_timeout():
    run_new_ranks(_raises_on_one_rank, 2)


INTERRUPTED = [{"stage": 1}, {"stage": 2, "offload": "optimizer"}, *more({"stage": 3, "offload": "params"})]


@pytest.mark.parametrize("settings", INTERRUPTED)
def test_a_backward_is_not_added_to_a_part_of_one_that_broke_off(settings):
    """The next backward comes behind a forward of its own, or at once, behind one of before; it may update."""
    for at_once in (False, True):
        for updates_early in (False, True):
            subject, wanted = (Sharded(models.build("mlp"), adamw, **settings) for _ in range(2))
            second = subject(**models.batch("mlp", seed=2)) if at_once else None
            _broken_backward(subject, 1)
            with subject.optimizer.in_backward() if updates_early else nullcontext():
                (second if at_once else subject(**models.batch("mlp", seed=2))).backward()
            wanted(**models.batch("mlp", seed=2)).backward()
            for each in (subject, wanted):
                each.optimizer.step()
            assert_equal_weights(subject.weights(), wanted.weights(), f"{at_once=}, {updates_early=}", exact=True)


def _trained(**settings) -> Sharded:
    subject = Sharded(models.build("mlp").to(settings.get("compute_dtype")), adamw, **settings)
    for seed in (1, 2):
        _backward(subject, seed)
        subject.optimizer.step()
    return subject


def _backward(subject: Sharded, seed: int = 3) -> None:
    subject(**models.batch("mlp", seed=seed)).backward()


@pytest.mark.parametrize("settings", [{"stage": 2, "offload": "optimizer"}, {"stage": 3, "offload": "params"}])
def test_a_backward_whose_values_an_early_update_has_changed_is_refused(settings):
    subject = _trained(**settings)
    loss = subject(**models.batch("mlp", seed=3))
    with interrupted_in(Schedule, "end_backward"), subject.optimizer.in_backward():
        loss.backward(retain_graph=True)
    subject.optimizer.zero_grad()  # what was updated stays so
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Switched(torch.optim.SGD):
    """Has other parameters to evaluate than to train, as schedule-free optimizers do."""

    elementwise = True

    def eval(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = False
            torch._foreach_mul_([param.data for param in group["params"]], 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_backward_whose_values_an_optimizer_has_switched_is_refused(stage):
    subject = Sharded(models.build("mlp"), lambda model: Switched(model.parameters(), lr=0.1), stage)
    loss = subject(**models.batch("mlp", seed=3))
    subject.optimizer.eval()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_wait_that_is_broken_off_is_made_again_but_where_values_are_added():
    for once, num_calls in ((False, 2), (True, 1)):
        calls: list[int] = []

        def finish(calls=calls) -> None:
            calls.append(1)
            if len(calls) == 1:
                raise KeyboardInterrupt

        pending = Pending(finish, once=once)
        with pytest.raises(KeyboardInterrupt):
            pending.wait()
        for _ in range(2):
            pending.wait()
        assert len(calls) == num_calls


@pytest.mark.parametrize("goes_on", ["step", "backward", "zero_grad"])
def test_gradients_whose_reduction_is_broken_off_are_dropped(goes_on, caplog, monkeypatch):
    subject = Sharded(models.build("mlp"), adamw, 2, offload="optimizer")
    before = subject.weights()

    subject(**models.batch("mlp", seed=1)).backward()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(subject.engine, "wait_for_host", _interrupt)
        subject.clip_grad_norm_(1.0)
    with caplog.at_level(logging.WARNING):
        if goes_on == "zero_grad":
            subject.optimizer.zero_grad()
        elif goes_on == "backward":
            subject(**models.batch("mlp", seed=1))
        subject.optimizer.step()
    assert "the gradients since the last step are dropped" in caplog.text
    assert_equal_weights(subject.weights(), before, "dropped", exact=True)


# What breaks off, with a folder of a whole checkpoint


def _step_in(owner: type, name: str, subject: Sharded, whole: Path) -> None:
    _backward(subject)
    with interrupted_in(owner, name):
        subject.optimizer.step()
    assert all(param.grad is None for group in subject.optimizer.param_groups for param in group["params"])


def _update_in_backward(subject: Sharded, whole: Path) -> None:
    """When some units have been updated."""

    def interrupt(_) -> None:
        subject.engine.bus.wait_for_jobs()  # what was posted has its new values
        raise KeyboardInterrupt

    block = subject.model.blocks[1]
    handle = block.register_forward_hook(lambda _module, _args, out: out.register_hook(interrupt) and None)
    with pytest.raises(KeyboardInterrupt), subject.optimizer.in_backward():
        _backward(subject)
    handle.remove()


def _update_without_a_step(subject: Sharded, whole: Path) -> None:
    """What rests on the device gets its values in a step, which does not come."""
    assert {unit.is_offloaded for unit in subject.engine.units} == {False, True}
    with subject.optimizer.in_backward():
        _backward(subject)
    subject.optimizer.zero_grad()


def _write(subject: Sharded, whole: Path) -> None:
    param = next(subject.model.parameters())
    with torch.no_grad(), interrupted_in(Flat, "follow_written"), hf_zero.gathered(param, writeback=True):
        param.fill_(0.5)


def _gone(*_, **__) -> None:
    raise OSError("the disk is gone")


def _load_of_weights(subject: Sharded, whole: Path) -> None:
    """What was read counts for what is computed."""
    other, reads = whole.with_name("other"), iter([Origin.read] * 5)

    def read_some(*args) -> None:
        next(reads, _gone)(*args)

    other.mkdir()
    state = {name: torch.randn_like(values) for name, values in models.build("mlp").state_dict().items()}
    save_file(state, other / "model.safetensors")
    _loss(subject)  # the root, and the last blocks, stay in their slots
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match="the disk is gone"):
        patch.setattr(Origin, "read", read_some)
        hf_zero.load_weights(subject.engine, other)
    plain = models.build("mlp")
    plain.load_state_dict(subject.weights(), strict=False)
    with torch.no_grad():
        assert _loss(subject) == pytest.approx(float(plain(**models.batch("mlp", seed=7))), rel=1e-6)
    with pytest.raises(CheckpointError):
        hf_zero.load_weights(subject.engine, whole.with_name("nowhere"))  # refused before anything is read


def _load_of_state(subject: Sharded, whole: Path) -> None:
    read = OpenFiles.read_range
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match="the disk is gone"):
        patch.setattr(
            OpenFiles,
            "read_range",
            lambda files, key, *args: (_gone if "exp_avg_sq" in key else read)(files, key, *args),
        )
        load_state(subject.engine, subject.optimizer, whole)


def _load_of_masters(subject: Sharded, whole: Path) -> None:
    """In half precision, masters are read with the state."""
    last = subject.engine.param_infos()[-1].name
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError):
        patch.setattr(OpenFiles, "check_shape", lambda files, key, *_: _gone() if key == last else None)
        load_state(subject.engine, subject.optimizer, whole)


OPTIMIZER, PARAMS = {"offload": "optimizer"}, {"offload": "params"}
BROKEN = [
    (partial(_step_in, torch.optim.AdamW, "step"), {"stage": 2}, "an optimizer step broke off"),
    (partial(_step_in, HostUpdate, "finish"), {"stage": 2, **OPTIMIZER}, "an optimizer step broke off"),
    (partial(_step_in, Flat, "mark_clean"), {"stage": 3, **PARAMS}, "broke off"),
    (_update_in_backward, {"stage": 3, **OPTIMIZER}, "an update in backward broke off"),
    (_update_without_a_step, {"stage": 3, **OPTIMIZER, "offload_fraction": 0.5}, "an update in backward broke off"),
    (_write, {"stage": 3, **PARAMS}, r"gathered\(writeback=True\) broke off"),
    (_load_of_weights, {"stage": 3, **PARAMS}, "loading the weights of .*other broke off"),
    (_load_of_state, {"stage": 3}, "loading the state of .*whole broke off"),
    (_load_of_masters, {"stage": 3, "compute_dtype": torch.bfloat16}, "loading the weights of .*whole broke off"),
]


@pytest.mark.parametrize("break_off, settings, message", BROKEN)
def test_nothing_is_saved_after_what_broke_off_until_a_checkpoint_is_loaded(break_off, settings, message, tmp_path):
    subject, whole = _trained(**settings), tmp_path / "whole"
    engine, optimizer = subject.engine, subject.optimizer
    hf_zero.save_checkpoint(engine, optimizer, whole)
    break_off(subject, whole)
    for _ in range(2):  # also once the next forward has cleared up
        with pytest.raises(LifecycleError, match=f"{message}.* load a whole checkpoint"):
            hf_zero.save_checkpoint(engine, optimizer, tmp_path / "torn")
        _loss(subject)
    hf_zero.load_weights(engine, whole)
    load_state(engine, optimizer, whole)
    hf_zero.save_checkpoint(engine, optimizer, tmp_path / "loaded")
    assert not (tmp_path / "torn").exists()
    saved, again = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "loaded"))
    assert all(tensor.equal(again[name]) for name, tensor in saved.items())
    optimizer.zero_grad()
    _backward(subject)
    optimizer.step()


def test_state_whose_load_broke_off_goes_with_its_optimizer(tmp_path):
    subject, whole = _trained(stage=3), tmp_path / "whole"
    hf_zero.save_checkpoint(subject.engine, subject.optimizer, whole)
    _load_of_state(subject, whole)
    hf_zero.load_weights(subject.engine, whole)
    with pytest.raises(LifecycleError, match="loading the state of"):
        hf_zero.save_pretrained(subject.engine, tmp_path / "mixed")
    newer = hf_zero.ShardedOptimizer(subject.model, torch.optim.AdamW)
    hf_zero.save_checkpoint(subject.engine, newer, tmp_path / "newer")
