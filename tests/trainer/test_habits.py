"""What users of Trainer do, and expect of any trainer."""

import copy
import logging
import os
import warnings

import pytest
import torch
from transformers import TrainerCallback

import hf_zero
from hf_zero.engine import engine_of
from hf_zero.errors import CheckpointError
from tests import models
from tests.compare import assert_equal, weights_of
from tests.distributed import ranks, run_ranks
from tests.output import logged
from tests.trainer.harness import PLAIN, Rows, compare, make, reset_accelerate, train


SAVING = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear"}


@pytest.mark.quick
@ranks(1)
def test_arguments_can_be_left_out(tmp_path):
    os.chdir(tmp_path)
    reset_accelerate()
    trainer = hf_zero.ZeroTrainer(models.build("bert"))
    assert type(trainer.args) is hf_zero.ZeroTrainingArguments
    assert trainer.args.output_dir == "tmp_trainer", "as under Trainer"
    reset_accelerate()
    trainer = hf_zero.ZeroSeq2SeqTrainer(models.build("t5"))
    assert type(trainer.args) is hf_zero.ZeroSeq2SeqTrainingArguments


@pytest.mark.parametrize("stage", [0, 3])
@ranks(1)
def test_one_process_finds_its_batch_size(tmp_path, stage):
    model = models.build("bert")
    limit, tried = 5, []

    def run_out(module, args, kwargs):
        tried.append(len(kwargs["input_ids"]))
        if tried[-1] > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    model.register_forward_pre_hook(run_out, with_kwargs=True)
    trainer = make(
        stage, tmp_path, model, Rows("bert"), auto_find_batch_size=True, per_device_train_batch_size=8, max_steps=3
    )
    trainer.train()
    assert tried == [8, 7, 6, 5, 5, 5]
    assert trainer.state.global_step == 3 and engine_of(trainer.model) is not None


class _Rates(TrainerCallback):
    """Notes the learning rate of every step that is taken."""

    def __init__(self):
        self.used: list[float] = []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.used.append(optimizer.param_groups[0]["lr"])


class _Cools(TrainerCallback):
    """Sets a rate of its own for the third step."""

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        if state.global_step == 2:
            optimizer.param_groups[0]["lr"] = 1e-5


def _sets_a_rate(folder) -> list[list[float]]:
    runs = []
    for resume in (None, f"{folder}/checkpoint-2"):
        rates = _Rates()
        train(3, folder, resume=resume, **SAVING, parts={"callbacks": [_Cools(), rates]})
        runs.append(rates.used)
    return runs


def test_a_rate_that_a_callback_has_set_is_that_of_the_resumed_run(tmp_path):
    whole, again = run_ranks(_sets_a_rate, 1, str(tmp_path), timeout=240)[0]
    assert whole[2] == 1e-5 and again == whole[2:]


@ranks(2)
def test_rank_0_logs_the_settings_that_a_checkpoint_replaces(tmp_path):
    folder = str(tmp_path)
    train(3, folder, **{**SAVING, "max_steps": 4})
    with logged(level=logging.WARNING) as told:
        train(3, folder, resume=f"{folder}/checkpoint-4", **{**SAVING, "max_steps": 4})
        assert not any("is used instead" in line for line in told), told
        changed = {"learning_rate": 5e-3, "weight_decay": 0.3, "adam_beta2": 0.9, "adam_epsilon": 1e-6}
        train(3, folder, resume=f"{folder}/checkpoint-4", **{**SAVING, "max_steps": 6, **changed})
    said = [line.partition("the checkpoint's ")[2].partition(";")[0] for line in told if "is used instead" in line]
    if torch.distributed.get_rank():
        assert said == []
    else:
        assert [line.partition(" (")[0] for line in said] == ["learning rate", "weight_decay", "betas", "eps"]
        assert said[0].endswith("(0.001) is used instead of the given one (0.005)"), said


class _Growing(torch.nn.Module):
    """Counts its batches in a buffer that grows, and says so when it is loaded."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, **inputs):
        if self.training:
            self.seen = torch.cat([self.seen, torch.ones(1)])
        return self.inner(**inputs)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        if f"{prefix}seen" in state_dict:
            self.seen = torch.empty_like(state_dict[f"{prefix}seen"])
        super()._load_from_state_dict(state_dict, prefix, *args)


class _Grown(_Growing):
    """Does not say so."""

    _load_from_state_dict = torch.nn.Module._load_from_state_dict


@ranks(2, timeout=240)
def test_a_buffer_that_grew_is_resumed_where_the_model_takes_it(tmp_path):
    settings = {**SAVING, "remove_unused_columns": False}
    for stage in (1, 3):
        own = f"{tmp_path}/{stage}"
        whole = train(stage, own, model=_Growing(models.build("bert")), **settings)
        model = _Growing(models.build("bert"))
        again = train(stage, own, model=model, resume=f"{own}/checkpoint-2", **settings)
        assert_equal(again, whole, f"stage {stage}: resumed and unbroken")
        assert model.seen.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0]
        with pytest.raises(
            CheckpointError, match="buffers have other shapes than the model's, and its load_state_dict"
        ):
            train(stage, own, model=_Grown(models.build("bert")), resume=f"{own}/checkpoint-2", **settings)


@ranks(1)
def test_callbacks_of_ours_are_there_while_it_trains_alone(tmp_path):
    plain, own = (make(kind, tmp_path, models.build("bert"), Rows("bert")) for kind in (PLAIN, 3))
    names = [[type(callback).__name__ for callback in t.callback_handler.callbacks] for t in (plain, own)]
    assert names[0] == names[1]
    own.train()
    assert [type(callback).__name__ for callback in own.callback_handler.callbacks] == names[0]


@pytest.mark.parametrize("num_ranks", [1, 2])
@ranks("num_ranks")
def test_no_hook_stays_on_embeddings_that_never_go_away(tmp_path, num_ranks):
    model = models.build("llama")
    trainer = make(2, tmp_path, model, Rows("llama"), neftune_noise_alpha=5, bf16=True, use_cpu=True)
    trainer.train()
    embeddings = model.get_input_embeddings()
    assert not embeddings._forward_hooks and not hasattr(embeddings, "neftune_noise_alpha")


@pytest.mark.parametrize("num_ranks", [1, 2])
@ranks("num_ranks")
def test_adafactor_with_its_own_schedule_trains_and_shows_its_rate_as_in_trainer(tmp_path, num_ranks):
    from transformers.optimization import Adafactor, AdafactorSchedule

    def run(kind):
        model = models.build("bert")
        optimizer = Adafactor(model.parameters(), scale_parameter=False, relative_step=True, warmup_init=True, lr=None)
        return train(kind, tmp_path, model=model, parts={"optimizers": (optimizer, AdafactorSchedule(optimizer))})

    runs = compare(run, stages=(1, 3), equal=())
    assert len(runs[PLAIN].rates) == 4 and all(runs[PLAIN].rates[1:]), "0 is what the first step begins with"
    assert runs[1].rates == runs[3].rates == runs[PLAIN].rates


@pytest.mark.parametrize("stage", [0, 3])
@ranks(1)
def test_a_model_given_by_name_can_be_read_and_cloned_before_training(tmp_path, stage):
    models.build("bert").save_pretrained(f"{tmp_path}/model")
    trainer = make(stage, tmp_path, f"{tmp_path}/model", Rows("bert"))
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    copy.deepcopy(trainer.model)
    wanted = dict(models.build("bert").named_parameters())
    assert all(torch.equal(before[name], wanted[name]) for name in wanted)
    trainer.train()
    after = weights_of(trainer.model)
    assert any(not torch.equal(before[name], after[name]) for name in after)


@pytest.mark.parametrize(("num_ranks", "stage"), [(1, 0), (2, 1), (2, 3)])
@ranks("num_ranks")
def test_accelerate_prepares_the_optimizer_and_its_schedule(num_ranks, stage):
    """A loop of one's own under accelerate, whose optimizer and schedule go through `prepare`, and one without it."""
    from accelerate import Accelerator

    records = []
    for is_prepared in (False, True):
        reset_accelerate()
        torch.manual_seed(0)
        model = models.build("llama")
        engine = engine_of(hf_zero.shard(model, stage=stage))
        optimizer = hf_zero.ShardedOptimizer(engine, torch.optim.AdamW, lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        backward = torch.Tensor.backward
        if is_prepared:
            # what `prepare` does with a schedule is to step it once for each rank, unless it is told not to
            accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
            optimizer, schedule = accelerator.prepare(optimizer, schedule)
            backward = accelerator.backward
        losses, rates = [], []
        for step in range(3):
            loss = model(**models.batch("llama", seed=10 * step + engine.comm.rank)).loss
            backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            rates.append(optimizer.param_groups[0]["lr"])
        records.append((losses, rates, weights_of(model)))
    (losses, rates, weights), (found_losses, found_rates, found_weights) = records
    assert found_losses == losses and found_rates == rates == [1e-3 / 2, 1e-3 / 3, 1e-3 / 4]
    assert all(torch.equal(found_weights[name], weights[name]) for name in weights)


@ranks(1, timeout=240)
def test_trainer_itself_reads_no_gradient_of_a_parameter(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="a parameter's .grad is None between backward and step")
        train(2, tmp_path, **{**SAVING, "max_steps": 2})


# Callbacks are called in the order of `Trainer`, and see real values


EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


class Watcher(TrainerCallback):
    """Notes every event, with one weight as it is at that moment and the keys of what was logged."""

    def __init__(self):
        self.seen = []

    def note(self, event, args, state, control, model=None, optimizer=None, logs=None, **kwargs):
        weight = None
        if event in ("on_step_end", "on_train_begin", "on_train_end"):
            with hf_zero.gathered(model.bert.encoder.layer[1].attention.self.query.weight):
                weight = model.bert.encoder.layer[1].attention.self.query.weight.detach().clone()
        rate = optimizer.param_groups[0]["lr"] if optimizer is not None else None
        self.seen.append((event, weight, rate, sorted(logs or ())))


for _event in EVENTS:
    setattr(Watcher, _event, lambda self, *args, _event=_event, **kwargs: self.note(_event, *args, **kwargs))


@pytest.mark.quick
@ranks(2, timeout=240)
def test_callbacks_keep_their_order_and_see_real_weights(tmp_path):
    def run(kind):
        watcher = Watcher()
        parts = {"callbacks": [watcher], "eval_dataset": Rows("bert", 5)}
        settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        trainer = make(
            kind,
            f"{tmp_path}/{kind}",
            models.build("bert"),
            Rows("bert"),
            parts=parts,
            gradient_accumulation_steps=2,
            **settings,
        )
        trainer.train()
        return watcher.seen

    runs = {kind: run(kind) for kind in (2, 3, PLAIN)}
    assert {"on_step_end", "on_substep_end", "on_pre_optimizer_step", "on_save", "on_evaluate"} <= {
        e[0] for e in runs[3]
    }
    for kind in (2, 3):
        assert [seen[0] for seen in runs[kind]] == [seen[0] for seen in runs[PLAIN]]
        for (event, weight, rate, logs), (_, wanted, wanted_rate, wanted_logs) in zip(
            runs[kind], runs[PLAIN], strict=True
        ):
            assert rate == wanted_rate, event
            assert logs == wanted_logs, event
            if wanted is not None:
                assert torch.allclose(weight, wanted, rtol=1e-5, atol=1e-6), event
    seen = [weight for event, weight, *_ in runs[3] if event == "on_step_end"]
    assert len(seen) == 4 and all((a != b).any() for a, b in zip(seen, seen[1:], strict=False)), (
        "every step changes the weight"
    )
