"""Elementwise optimizers over flat shards move weights as they do over whole parameters."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.engine import ZeroEngine, engine_of
from hf_zero.errors import ConfigError, LifecycleError, UnsupportedError
from hf_zero.optim.granularity import ELEMENT, PARAMETER, granularity_of
from tests import models
from tests.compare import assert_close, assert_equal
from tests.distributed import ranks
from tests.training import Plain, Record, Sharded, adamw, loss_of, train


# Weights may part by steps * lr * rounding error of a clipped gradient (0.1 * 2^-23) / eps, see test_parity.
ATOL = 4 * 5e-3 * 1e-8 / 1e-4

# eps is large where m and v can both be rounding errors, see test_parity
OPTIMIZERS = {
    "AdamW, loop": ("AdamW", {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1, "foreach": False}),
    "AdamW, foreach": ("AdamW", {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1, "foreach": True}),
    "AdamW, fused": ("AdamW", {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1, "fused": True}),
    "Adam, amsgrad": ("Adam", {"lr": 1e-3, "eps": 1e-4, "amsgrad": True}),
    "SGD": ("SGD", {"lr": 0.05}),
    "SGD, momentum": ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "SGD, fused": ("SGD", {"lr": 0.05, "momentum": 0.9, "fused": True}),
    "Adagrad": ("Adagrad", {"lr": 1e-2, "eps": 1e-4}),
    "RMSprop": ("RMSprop", {"lr": 1e-3, "eps": 1e-4, "momentum": 0.5, "centered": True}),
    "NAdam": ("NAdam", {"lr": 1e-3, "eps": 1e-4}),
    "RAdam": ("RAdam", {"lr": 1e-3, "eps": 1e-4}),
    "Adamax": ("Adamax", {"lr": 1e-3, "eps": 1e-4}),
    "Adadelta": ("Adadelta", {"lr": 1.0, "eps": 1e-4}),
    "ASGD": ("ASGD", {"lr": 0.01}),
}


@pytest.mark.quick(cases=3)
@pytest.mark.parametrize(
    "key, num_ranks", [*((key, 2) for key in OPTIMIZERS), ("AdamW, fused", 1), ("SGD, momentum", 1), ("Adagrad", 1)]
)
@ranks("num_ranks")
def test_elementwise_optimizers_agree_with_plain_torch(key, num_ranks):
    kind, settings = OPTIMIZERS[key]

    def make(model):
        return getattr(torch.optim, kind)(model.parameters(), **settings)

    plain = train(Plain(models.build("mlp"), make), "mlp", num_steps=6)
    stages = [train(Sharded(models.build("mlp"), make, stage), "mlp", num_steps=6) for stage in range(4)]
    for stage in range(1, 4):
        assert_equal(stages[stage], stages[0], f"stage {stage} and stage 0")
    # lr * a rounding error of 1e-8 of the clipped gradient (0.1 * 2^-23) / eps, in each of six steps
    atol = 6 * settings["lr"] * 1e-8 / settings.get("eps", 1.0)
    assert_close(stages[3], plain, "stage 3 and plain torch", atol=atol)


def _groups(model: torch.nn.Module) -> list[dict]:
    """Three groups that cut through every buffer, in an order that is not the model's."""
    params = dict(model.named_parameters())
    biases = [p for name, p in params.items() if name.endswith("bias")]
    head = [p for name, p in params.items() if name.startswith(("head", "blocks.2")) and not name.endswith("bias")]
    chosen = {id(p) for p in biases + head}
    return [
        {"params": biases, "weight_decay": 0.0, "lr": 5e-3},
        {"params": head, "betas": (0.5, 0.9)},
        {"params": [p for p in params.values() if id(p) not in chosen], "weight_decay": 0.5},
    ]


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@ranks("num_ranks")
def test_custom_groups_and_schedulers_are_kept(num_ranks):
    def make(model):
        return torch.optim.AdamW(_groups(model), lr=1e-3, eps=1e-4)

    def run(subject) -> Record:
        scheduler = torch.optim.lr_scheduler.LambdaLR(subject.optimizer, lambda step: 1.0 / (1 + step))
        return train(subject, "mlp", num_steps=4, after=scheduler.step)

    wanted = run(Plain(models.build("mlp"), make))
    for stage in range(4):
        sharded = Sharded(models.build("mlp"), make, stage)
        assert_close(run(sharded), wanted, f"stage {stage}", atol=ATOL)
        lrs = [group["lr"] for group in sharded.optimizer.param_groups]
        assert lrs == pytest.approx([5e-3 / 5, 1e-3 / 5, 1e-3 / 5])


@ranks(2)
def test_an_optimizer_may_be_built_before_or_after_sharding():
    """A class with its settings, a class with groups, and an optimizer built beforehand or afterwards are the same."""
    settings = {"lr": 1e-3, "eps": 1e-4}
    records = []
    for way in ("after", "class", "groups", "before"):
        model = models.build("mlp")
        before = torch.optim.AdamW(model.parameters(), **settings)
        subject = Sharded(model, lambda model: torch.optim.AdamW(model.parameters(), **settings), 3)
        groups = [{"params": list(part.parameters())} for part in (model.embed, model.blocks, model.head)]
        given = {"class": (torch.optim.AdamW,), "groups": (torch.optim.AdamW, groups), "before": (before,)}
        if way != "after":
            options = {} if way == "before" else settings
            subject.optimizer = hf_zero.ShardedOptimizer(subject.engine, *given[way], **options)
            subject.clip_grad_norm_ = subject.optimizer.clip_grad_norm_
        records.append(train(subject, "mlp", num_steps=3))
        assert_equal(records[-1], records[0], f"the same optimizer, built in another way: {way}")


@pytest.mark.parametrize("num_ranks", [1, 2])
@ranks("num_ranks")
def test_an_optimizer_of_some_parameters_leaves_the_others_alone(num_ranks):
    def make(model):
        some = [*model.blocks[1].parameters(), model.head.weight]
        return torch.optim.AdamW(some, lr=1e-3, eps=1e-4, weight_decay=0.5)

    def run(subject) -> Record:
        # gradients of parameters that the optimizer does not know are forgotten too
        return train(subject, "mlp", num_steps=3, after=subject.model.zero_grad)

    start = dict(models.build("mlp").named_parameters())
    wanted = run(Plain(models.build("mlp"), make))
    for stage in range(4):
        found = run(Sharded(models.build("mlp"), make, stage))
        assert_close(found, wanted, f"stage {stage}", atol=ATOL)
        for name, weight in found.weights.items():
            moves = name.startswith("blocks.1.") or name == "head.weight"
            assert torch.equal(weight, start[name]) != moves, f"stage {stage}: {name}"


# What is refused


def _engine() -> ZeroEngine:
    return engine_of(hf_zero.shard(models.build("mlp"), stage=3))


def _refuses(make, *words: str, error=UnsupportedError) -> None:
    engine = _engine()
    with pytest.raises(error) as caught:
        make(engine)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"


class Centralised(torch.optim.Optimizer):
    """Somebody's own optimizer that looks at whole matrices."""

    def __init__(self, params, lr: float = 0.1):
        super().__init__(params, {"lr": lr})


def _named(name: str, module: str, base: type = torch.optim.AdamW, **attributes) -> type:
    """A class as another package defines it."""
    return type(name, (base,), {"__module__": module, **attributes})


@pytest.mark.parametrize(
    "cls",
    [
        *(torch.optim.LBFGS, torch.optim.SparseAdam, Centralised),
        # classes that only share the name of a known one
        _named("AdamW", "cautious.optim"),  # a mask divided by its mean
        _named("Lion", "timm.optim.lion"),
        _named("Muon", "muon", torch.optim.Optimizer),  # collectives in its own step
        _named("AdamW8bit", "other"),
    ],
)
def test_an_optimizer_of_which_it_is_not_known_what_it_looks_at_is_refused_by_name(cls):
    words = (cls.__name__, "AdamW", "Muon", "AdamW8bit", "elementwise = True", "whole_parameters = True")
    _refuses(lambda engine: hf_zero.ShardedOptimizer(engine, cls, lr=0.1), *words)
    if cls is Centralised:
        _refuses(lambda engine: hf_zero.ShardedOptimizer(engine, cls(engine.model.parameters())), "Centralised")


@pytest.mark.parametrize("declaration", ["elementwise", "whole_parameters"])
def test_a_subclass_does_not_inherit_what_its_base_declares(declaration):
    base = _named("Own", "mine", **{declaration: True})
    hf_zero.ShardedOptimizer(_engine(), base, lr=0.1)
    derived = _named("Own", "yours", base)
    _refuses(lambda engine: hf_zero.ShardedOptimizer(engine, derived, lr=0.1), "yours.Own", declaration)


def test_settings_that_make_a_known_class_look_at_whole_parameters_count():
    def made(**settings):
        return _named("Lion", "lion_pytorch.cautious_lion", torch.optim.SGD)([{"params": weights, **settings}], lr=0.1)

    weights = [torch.nn.Parameter(torch.zeros(3))]
    assert granularity_of(made()) == granularity_of(made(cautious_factor=1.0)) == ELEMENT
    assert granularity_of(made(cautious_factor=0.5)) == PARAMETER
    bitsandbytes = pytest.importorskip("bitsandbytes")
    bounded = bitsandbytes.optim.AdamW(weights)
    assert granularity_of(bounded) == ELEMENT
    bounded.args.max_unorm = 1.0
    assert granularity_of(bounded) == PARAMETER


def test_a_tensor_that_is_not_of_the_model_is_refused():
    stranger = torch.nn.Parameter(torch.zeros(2, 3))
    _refuses(
        lambda engine: hf_zero.ShardedOptimizer(engine, torch.optim.SGD([stranger], lr=0.1)),
        "(2, 3)",
        "model.parameters()",
        error=ConfigError,
    )


def test_what_is_no_optimizer_and_no_bound_is_refused():
    _refuses(lambda engine: hf_zero.ShardedOptimizer(engine, "adamw"), "'adamw' is of type str", error=ConfigError)
    optimizer = hf_zero.ShardedOptimizer(_engine(), torch.optim.AdamW)
    for wrong in ((-1.0,), ("1",), (1.0, "l2")):
        with pytest.raises(ConfigError, match="is not a number of 0 or more; give one"):
            optimizer.clip_grad_norm_(*wrong)


def test_torchs_own_optimizers_clipping_and_wrapper_refuse_a_sharded_model_and_no_other():
    plain, model = models.build("mlp"), models.build("mlp")
    optimizer = hf_zero.ShardedOptimizer(hf_zero.shard(model, stage=1), torch.optim.AdamW)
    for each in (plain, model):
        each(**models.batch("mlp", seed=0)).backward()
    with pytest.raises(LifecycleError, match="Adam: holds parameters of a sharded model, .* pass it to hf_zero.Shard"):
        torch.optim.Adam(model.parameters()).step()
    torch.optim.Adam(plain.parameters()).step()
    for clips in (torch.nn.utils.clip_grads_with_norm_, torch.nn.utils.clip_grad._clip_grads_with_norm_):
        with pytest.raises(LifecycleError, match="call clip_grad_norm_ of the ShardedOptimizer"):
            clips(model.parameters(), 1e-3, torch.tensor(1.0))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        with pytest.raises(LifecycleError, match=rf"torch.nn.utils.{name}: .* call {name} of the ShardedOptimizer"):
            getattr(torch.nn.utils, name)(model.parameters(), 1e-3)
        with pytest.raises(LifecycleError, match=rf"call {name} of the ShardedOptimizer"):
            getattr(torch.nn.utils, name)((p for group in optimizer.param_groups for p in group["params"]), 1e-3)
    with pytest.raises(LifecycleError, match="DistributedDataParallel: was given a sharded .*without the wrapper"):
        torch.nn.parallel.DistributedDataParallel(model)
    assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3) > 1e-3
    grads = [p.grad for p in plain.parameters()]
    assert torch.nn.utils.get_total_norm(grads) < 1.01e-3
    torch.nn.utils.clip_grad_value_(next(plain.parameters()), 1e-6)
    assert grads[0].abs().max() <= 1e-6 < grads[1].abs().max()


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_set_by_hand_within_gathered_are_clipped_and_stepped_by_torch(stage, some):
    model = models.build("mlp")
    hf_zero.shard(model, stage=stage)
    params = list(model.parameters())
    plain = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:]}], lr=0.1)
    with hf_zero.gathered(model, writeback=True):
        before = [p.detach().clone() for p in params]
        for p in params[:1] if some else params:
            p.grad = torch.full_like(p, 2.0)
        torch.nn.utils.clip_grad_value_(params, 1.0)
        assert torch.nn.utils.clip_grad_norm_(params, 1e6) > 0
        plain.step()
        plain.zero_grad()
        with pytest.raises(LifecycleError, match="SGD: holds parameters of a sharded model"):
            plain.step()
    with hf_zero.gathered(model):
        for index, (p, old) in enumerate(zip(params, before)):
            torch.testing.assert_close(p.detach(), old if some and index else old - 0.1)


def test_of_two_optimizers_on_one_model_the_first_is_refused():
    model = models.build("mlp")
    sharded = hf_zero.shard(model, stage=2)
    first = hf_zero.ShardedOptimizer(sharded, torch.optim.SGD(list(model.parameters())[:1], lr=0.1))
    second = hf_zero.ShardedOptimizer(sharded, torch.optim.SGD(list(model.parameters())[1:], lr=0.1))
    model(**models.batch("mlp", seed=0)).backward()
    with pytest.raises(LifecycleError, match="has another optimizer, which was created later.*combine several"):
        first.step()
    second.step()
    del second
    gc.collect()
    first.step()  # nobody holds the other any more


@pytest.mark.parametrize("stage", [1, 3])
def test_no_step_is_taken_on_gradients_that_no_backward_of_the_model_brought(stage):
    plain, model = models.build("mlp"), models.build("mlp")
    for each in (plain, model):
        each(**models.batch("mlp", seed=1)).backward()
    sharded = hf_zero.shard(model, stage=stage)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    pairs = [(plain, torch.optim.SGD(plain.parameters(), lr=0.1)), (model, hf_zero.ShardedOptimizer(sharded, inner))]
    for each, optimizer in pairs:
        optimizer.zero_grad()  # those of before count no more
        each(**models.batch("mlp", seed=0)).backward()
        optimizer.step()
    name, p = next(model.named_parameters())
    with hf_zero.gathered(model):
        torch.testing.assert_close(p, plain.get_parameter(name))
    p.grad = torch.ones_like(p)
    with pytest.raises(LifecycleError, match=f"{name}: has a gradient that was put into p.grad"):
        pairs[1][1].step()
    pairs[1][1].zero_grad()
    model(**models.batch("mlp", seed=0)).backward()
    with pytest.raises(LifecycleError, match="SGD: was given to a ShardedOptimizer"):
        inner.step()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_of_zeros_count_where_zero_grad_is_to_leave_them(stage):
    def build():
        torch.manual_seed(0)
        return torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Embedding(6, 4, sparse=True)])

    def act(model, optimizer):
        for index in (0, 1, 0, 1, 1):
            (model[0](torch.ones(1, 4)) if index == 0 else model[1](torch.tensor([1, 3]))).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        optimizer.step()  # without a backward
        optimizer.zero_grad()
        model[0](torch.ones(1, 4)).sum().backward()
        optimizer.step()

    plain, model = build(), build()
    sharded = hf_zero.shard(model, stage=stage)
    act(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    act(model, hf_zero.ShardedOptimizer(sharded, torch.optim.SGD, lr=0.1, momentum=0.9))
    with hf_zero.gathered(model):
        for name, p in model.named_parameters():
            torch.testing.assert_close(p, plain.get_parameter(name), msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loop_that_leaves_zero_grad_out_is_told_once(stage, caplog):
    model = models.build("mlp")
    optimizer = hf_zero.ShardedOptimizer(hf_zero.shard(model, stage=stage), torch.optim.SGD, lr=0.1)
    acts = {
        "b": lambda: model(**models.batch("mlp", seed=0)).backward(),
        "s": optimizer.step,
        "o": optimizer.zero_grad,
        "m": model.zero_grad,
    }
    for act in "bbsmobsombbbosbobsossb":  # also where others' losses go through the model behind its step
        acts[act]()
    assert caplog.text == ""
    for act in "sbsbs":
        acts[act]()
    assert caplog.text.count("no zero_grad() was called between two steps") == 1


def test_an_optimizer_that_has_stepped_is_refused():
    model = models.build("mlp")
    optimizer = torch.optim.AdamW(model.parameters())
    model(**models.batch("mlp", seed=0)).backward()
    optimizer.step()
    engine = hf_zero.shard(model, stage=3)
    with pytest.raises(LifecycleError, match="AdamW: has already stepped"):
        hf_zero.ShardedOptimizer(engine, optimizer)


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("num_ranks", [1, 2])
@ranks("num_ranks")
def test_a_state_dict_can_be_taken_back(num_ranks):
    """What one rank was given it can take back: a step after it is the one that was taken before."""
    for stage in range(4):
        subject = Sharded(models.build("mlp"), adamw, stage)
        assert set(subject.optimizer.state_dict()) == {"state", "param_groups", "shards"}
        train(subject, "mlp", num_steps=2)
        saved, weights = copy.deepcopy(subject.optimizer.state_dict()), subject.weights()
        assert saved["state"]
        after = train(subject, "mlp", num_steps=2)
        with hf_zero.gathered(subject.model, writeback=True), torch.no_grad():
            for name, p in subject.model.named_parameters():
                p.copy_(weights[name])
        subject.optimizer.load_state_dict(saved)
        assert_equal(train(subject, "mlp", num_steps=2), after, f"stage {stage}: taken back")
        shards = {id(run.param) for run in subject.optimizer.slices}
        assert {id(param) for param in subject.optimizer.inner.state} == shards, "one state for both optimizers"


@pytest.mark.parametrize("fused", [False, True])
def test_a_state_dict_goes_where_the_parameters_are(fused):
    """As in torch: numbers stay in the host's memory, but where the step reads them on the device."""
    optimizer = hf_zero.ShardedOptimizer(_engine(), torch.optim.AdamW, lr=0.1)
    for run in optimizer.slices:
        run.param.grad = torch.zeros_like(run.param)
    optimizer.inner.step()
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["fused"] = fused
    for group in optimizer.param_groups:  # the meta device stands for one that is not the host's memory
        group["params"] = [torch.nn.Parameter(param.to("meta")) for param in group["params"]]
    optimizer.load_state_dict(saved)
    assert optimizer.state
    for values in optimizer.state.values():
        assert {key: value.device.type for key, value in values.items()} == {
            "step": "meta" if fused else "cpu",
            "exp_avg": "meta",
            "exp_avg_sq": "meta",
        }


def test_a_state_dict_of_another_run_is_refused():
    optimizer = hf_zero.ShardedOptimizer(_engine(), torch.optim.AdamW, lr=0.1)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["params"].append(9)
    with pytest.raises(LifecycleError, match="the state is of rank 0 .*the same rank.*hf_zero.load_state"):
        optimizer.load_state_dict(saved)
    with pytest.raises(LifecycleError, match="the state is of no sharded optimizer"):
        optimizer.load_state_dict(torch.optim.AdamW(optimizer.engine.model.parameters()).state_dict())


@ranks(2)
def test_a_state_dict_of_another_rank_is_refused():
    """As scripts for DDP load it: rank 0's file on all ranks. The shards' sizes agree."""
    for stage in range(4):
        subject = Sharded(models.build("mlp"), adamw, stage)
        train(subject, "mlp", num_steps=1)
        saved = [copy.deepcopy(subject.optimizer.state_dict())]
        dist.broadcast_object_list(saved, src=0)
        if stage == 0 or dist.get_rank() == 0:  # at stage 0 all ranks have the same state
            subject.optimizer.load_state_dict(saved[0])
        else:
            other = f"the state is of rank 0 of 2 at stage {stage} .*, but this is rank 1 of 2 at stage {stage}"
            with pytest.raises(LifecycleError, match=other):
                subject.optimizer.load_state_dict(saved[0])


def test_a_state_dict_of_state_on_disk_is_refused(tmp_path):
    engine = hf_zero.shard(models.build("mlp"), offload="optimizer", offload_dir=str(tmp_path))
    optimizer = hf_zero.ShardedOptimizer(engine, torch.optim.AdamW, lr=0.1)
    with pytest.raises(LifecycleError, match="is on disk; use hf_zero.save_checkpoint"):
        optimizer.state_dict()


def _evaluation(subject, batch):
    def evaluate():
        subject.optimizer.zero_grad()
        loss = loss_of(subject(**batch))
        loss.backward()
        return loss

    return evaluate


@ranks(2)
def test_a_closure_is_evaluated_with_gradients():
    def make(model):
        return torch.optim.SGD(model.parameters(), lr=0.05)

    batch = models.batch("mlp", seed=dist.get_rank())
    for stage in (0, 3):
        sharded, plain = Sharded(models.build("mlp"), make, stage), Plain(models.build("mlp"), make)
        for _ in range(2):
            wanted = plain.optimizer.step(_evaluation(plain, batch))
            found = sharded.optimizer.step(_evaluation(sharded, batch))
            assert abs(found - wanted) <= 1e-6 * wanted
        weights = plain.weights()
        for name, weight in sharded.weights().items():
            # two ranks' gradients are summed exactly alike; what is left is the order inside of kernels
            assert torch.allclose(weight, weights[name], rtol=1e-5, atol=1e-8), name


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "then, stage",
    [("step", 1), ("step", 3), ("clip again", 2), ("clip values", 3)] + [("backward", 3), ("look", 0), ("look", 3)],
)
@ranks(2)
def test_what_follows_clipping_finds_the_gradients_clipped(then, stage, fused):
    """Whatever comes between clipping and the step finds the gradients clipped, as in plain torch."""

    def make(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=fused)

    results = []
    for subject in (Plain(models.build("mlp"), make), Sharded(models.build("mlp"), make, stage)):
        for step in range(2):
            batch = models.batch("mlp", seed=step)  # the same on all ranks: no average to wait for
            loss_of(subject(**batch)).backward()
            norms = [subject.clip_grad_norm_(0.1)]
            if then == "clip again":
                norms.append(subject.clip_grad_norm_(0.05))
            elif then == "clip values":
                subject.clip_grad_value_(1e-3)
            elif then == "backward":
                loss_of(subject(**batch)).backward()
            elif then == "look":
                pairs = [(name, p.grad) for name, p in subject.model.named_parameters()]
                if isinstance(subject, Sharded):
                    pairs = [(name, hf_zero.ShardedModel(subject.engine.model).full_grad(name)) for name, _ in pairs]
                norms.append(torch.stack([grad.norm() for _, grad in pairs]).norm())
            subject.optimizer.step()
            subject.optimizer.zero_grad()
        assert norms[0] > 0.1, f"clipping was to be active: {norms}"
        results.append(Record(torch.ones(1), torch.stack(norms), subject.weights()))
    assert_close(results[1], results[0], f"{then} after clipping", atol=ATOL)


def test_a_fused_optimizer_scales_on_its_way():
    """No pass over the gradients: they are as they were reduced when the update begins."""
    subject = Sharded(models.build("mlp"), lambda model: adamw(model, fused=True), 1)
    loss_of(subject(**models.batch("mlp", seed=0))).backward()
    subject.engine.finish_gradients()
    before = [gradient.reduced.clone() for gradient in subject.engine.gradients]
    assert subject.clip_grad_norm_(0.01) > 0.01
    assert all(torch.equal(gradient.reduced, b) for gradient, b in zip(subject.engine.gradients, before))
    subject.optimizer.step()
    assert not hasattr(subject.optimizer.inner, "grad_scale")
