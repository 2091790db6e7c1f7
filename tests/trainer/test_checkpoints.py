"""What a trainer saves is the model, and with its state a run goes on as if it had never stopped."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from transformers import Trainer, TrainerCallback

from tests import models
from tests.compare import assert_equal, weights_of
from tests.distributed import ranks, run_ranks
from tests.tiers import in_core
from tests.trainer.harness import PLAIN, Rows, Stream, assert_close, make, record, seed_everything, train


SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": 7, "gradient_accumulation_steps": 2}


def _dropping(name: str):
    """A model with dropout: what the generators give matters."""
    torch.manual_seed(0)
    model = models.build(name)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    return model


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize(
    "stage, num_ranks, settings",
    [
        (3, 2, {}),
        (1, 2, {"optim": "sgd", "lr_scheduler_type": "cosine"}),
        (2, 2, {"bf16": True}),
        (0, 1, {"optim": "adagrad"}),
    ],
)
@ranks("num_ranks", timeout=240)
def test_a_resumed_run_is_bit_equal_to_the_unbroken_one(tmp_path, stage, num_ranks, settings):
    # 20 rows over 2 ranks and batches of 2 are 5 batches: with 2 a step, steps 3 and 6 lie in the middle of an epoch.
    data = {"data": Rows("bert", 20), **SAVING, **settings}
    whole = train(stage, tmp_path, model=_dropping("bert"), **data)
    if stage == 3:
        without = train(stage, f"{tmp_path}/still", model=models.build("bert"), **data)
        assert whole.losses != without.losses, "dropout was to be active"
    # The last checkpoint is that of the end. Without it, `True` means step 6.
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(f"{tmp_path}/checkpoint-7")
    torch.distributed.barrier()
    for resume, start in ((True, 6), (f"{tmp_path}/checkpoint-3", 3)):
        resumed = train(stage, tmp_path, model=_dropping("bert"), resume=resume, **data)
        assert_equal(resumed, whole, f"stage {stage}: resumed at step {start} and unbroken")


# Orders that are drawn anew in each epoch, and streams that are passed twice.
ORDERS = {
    "group_by_length": {"train_sampling_strategy": "group_by_length"},
    "batch_rebalance": {"train_sampling_strategy": "batch_rebalance"},
    "use_seedable_sampler=False": {"accelerator_config": {"use_seedable_sampler": False}},
    "dispatch_batches=True": {"accelerator_config": {"dispatch_batches": True}},
    "a stream": {},
    "a stream, dispatch_batches=False": {"accelerator_config": {"dispatch_batches": False}},
}


@pytest.mark.parametrize("order", in_core(["group_by_length", "dispatch_batches=True"], ORDERS))
@ranks(2, timeout=240)
def test_a_run_goes_on_in_the_order_of_the_epoch_that_was_broken_off(tmp_path, order):
    data, settings = Rows("bert", 20), ORDERS[order]
    data = Stream(data.rows) if "stream" in order else data
    settings = {"max_steps": 7, "gradient_accumulation_steps": 2, "save_strategy": "steps", **settings}
    runs = [
        train(3, tmp_path, data=data, save_steps=save_steps, resume=resume, **settings)
        for save_steps, resume in ((1, None), (9, f"{tmp_path}/checkpoint-4"), (9, f"{tmp_path}/checkpoint-5"))
    ]
    for resumed in runs[1:]:
        assert_equal(resumed, runs[0], f"{order}: resumed and unbroken")


# A pass over 20 rows has two steps of 8, and 4 rows that the next one's first step has too.
STREAMING = {"max_steps": 7, "save_strategy": "steps", "save_steps": 1}


def _streams(folder, step, accumulation):
    resume, folder = (f"{folder}/checkpoint-{step}", f"{folder}/next") if step else (None, folder)
    data = Stream(Rows("bert", 20).rows)
    return train(2, folder, data=data, resume=resume, gradient_accumulation_steps=accumulation, **STREAMING)


def test_a_stream_goes_on_at_its_row_on_another_number_of_ranks(tmp_path):
    [unbroken, _] = run_ranks(_streams, 2, str(tmp_path), 0, 2, timeout=240)
    for step in (2, 3):
        [run] = run_ranks(_streams, 1, str(tmp_path), step, 4, timeout=240)
        assert_close(run, unbroken, f"from step {step}")


class LooksAtTheData(TrainerCallback):
    """Goes over the training data once, in the middle of an epoch."""

    def on_step_end(self, args, state, control, train_dataloader=None, **kwargs):
        if state.global_step == 4:
            list(train_dataloader)


class DrawsBatches(BatchSampler):
    """Never iterates its sampler, and draws by its generator."""

    def __iter__(self):
        order = torch.randperm(len(self.sampler), generator=self.sampler.generator)
        return (rows.tolist() for rows in order.split(self.batch_size))


class DrawingTrainer(Trainer):
    def get_train_dataloader(self):
        sampler = RandomSampler(self.train_dataset, generator=torch.Generator().manual_seed(3))
        batches = DrawsBatches(sampler, self.args.per_device_train_batch_size, False)
        loader = DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


OTHER_DRAWS = {
    "the loader is passed over once more": {"parts": {"callbacks": [LooksAtTheData()]}},
    "a batch sampler draws by its sampler's generator": {"mixin_on": DrawingTrainer},
}


@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize("case", OTHER_DRAWS)
def test_the_order_of_a_pass_is_what_that_pass_has_drawn(tmp_path, case):
    settings = {"accelerator_config": {"use_seedable_sampler": False}, "max_steps": 8, "save_strategy": "steps"}
    settings |= OTHER_DRAWS[case]
    data = Rows("bert", 6)  # 3 steps an epoch
    whole = train(3, tmp_path, data=data, save_steps=1, **settings)
    for step in (3, 5):
        again = train(3, tmp_path, data=data, save_steps=99, resume=f"{tmp_path}/checkpoint-{step}", **settings)
        assert_equal(again, whole, f"{case}: resumed at step {step}")


def _goes_on(folder, stage, batch_size, resume=None):
    settings = {**SAVING, "gradient_accumulation_steps": 1, "per_device_train_batch_size": batch_size}
    return train(stage, folder, "llama-tied", resume=resume, **settings)


@pytest.mark.quick
def test_a_run_goes_on_at_another_stage_and_on_another_number_of_ranks(tmp_path):
    # One rank takes all four rows of a step, two ranks take two each: the same rows, added in another order.
    whole = run_ranks(_goes_on, 2, str(tmp_path / "two"), 3, 2, timeout=240)[0]
    resume = str(tmp_path / "two" / "checkpoint-3")
    for stage in (1, 0, 2):
        run = run_ranks(_goes_on, 2, str(tmp_path / f"stage{stage}"), stage, 2, resume, timeout=240)[0]
        assert_equal(run, whole, f"saved at stage 3, resumed at stage {stage}")
    [alone] = run_ranks(_goes_on, 1, str(tmp_path / "one"), 3, 4, resume, timeout=240)
    assert_close(alone, whole, "from 2 ranks to 1")
    back = str(tmp_path / "one" / "checkpoint-6")
    again = run_ranks(_goes_on, 2, str(tmp_path / "back"), 2, 2, back, timeout=240)[0]
    assert_close(again, whole, "from 1 rank to 2")


@ranks(2, timeout=240)
def test_weights_alone_can_be_resumed_from(tmp_path):
    settings = {**SAVING, "save_only_model": True, "load_best_model_at_end": False}
    whole = train(3, tmp_path, **settings)
    assert not os.path.exists(f"{tmp_path}/checkpoint-3/zero")
    runs = {}
    for kind in (2, 3, PLAIN):
        runs[kind] = train(kind, f"{tmp_path}/{kind}", resume=f"{tmp_path}/checkpoint-3", **settings)
    assert runs[3].weights["classifier.weight"].ne(whole.weights["classifier.weight"]).any(), "AdamW began anew"
    assert runs[3].losses[:4] == whole.losses[:4]
    assert_equal(runs[3], runs[2], "stage 3 and stage 2")
    assert_close(runs[3], runs[PLAIN], "stage 3 and Trainer")


def _saves(folder, name):
    """Saves after training at every stage; what `from_pretrained` makes of it equals the trained model."""
    batch = {key: value for key, value in models.batch(name, seed=7).items()}
    logits = {}
    for stage in range(4):
        seed_everything()
        trainer = make(stage, f"{folder}/{stage}", models.build(name), Rows(name), max_steps=2)
        trainer.train()
        trainer.save_model()
        trainer.model.eval()
        with torch.no_grad():
            logits[stage] = trainer.model(**batch).logits.clone()
        assert torch.equal(logits[stage], logits[0])
        wanted = weights_of(trainer.model)
        loaded = type(trainer.model).from_pretrained(f"{folder}/{stage}").eval()
        for key, weight in loaded.named_parameters():
            assert torch.equal(weight, wanted[key]), f"stage {stage}: {key}"
        with torch.no_grad():
            assert torch.equal(loaded(**batch).logits, logits[stage]), f"stage {stage}"
    trainer.save_model(f"{folder}/elsewhere")
    return sorted(os.listdir(f"{folder}/3"))


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("name", ["bert", "llama-tied"])
def test_what_any_stage_saves_loads_with_from_pretrained(tmp_path, name):
    files, _ = run_ranks(_saves, 2, str(tmp_path), name, timeout=240)
    assert {"config.json", "model.safetensors", "training_args.bin"} <= set(files)
    assert (tmp_path / "elsewhere" / "config.json").exists()
    first = (tmp_path / "0" / "model.safetensors").read_bytes()
    for stage in (1, 2, 3):
        assert (tmp_path / str(stage) / "model.safetensors").read_bytes() == first


class Collator:
    """Has a tokenizer, as the collators of transformers do."""

    class tokenizer:
        @staticmethod
        def save_pretrained(folder):
            with open(os.path.join(folder, "tokenizer.json"), "w") as file:
                json.dump({}, file)

    def __call__(self, rows):
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def _saves_a_plain_module(folder):
    for kind in (3, 1):
        seed_everything()
        parts = {"data_collator": Collator()}
        trainer = make(kind, f"{folder}/{kind}", Wrapped(), Rows("mlp"), parts=parts, **SAVING)
        trainer.__class__ = type("Mine", (SavesMore, type(trainer)), {})
        trainer.train()
        trainer.save_model()
        whole = record(trainer)
        seed_everything()
        trainer = make(kind, f"{folder}/{kind}", Wrapped(), Rows("mlp"), parts=parts, **SAVING)
        trainer.train(resume_from_checkpoint=f"{folder}/{kind}/checkpoint-3")
        assert_equal(record(trainer), whole, f"stage {kind}: resumed and unbroken")


class SavesMore(Trainer):
    """Writes a file of its own beside the weights."""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        Path(output_dir, "more.txt").write_text("more")


class Wrapped(models.Mlp):
    """Not a `PreTrainedModel`: returns what Trainer asks of a model, and nothing else."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()

    def forward(self, x, y):
        return {"loss": super().forward(x, y)}


def test_a_plain_module_is_saved_as_weights_with_the_collators_tokenizer(tmp_path):
    run_ranks(_saves_a_plain_module, 2, str(tmp_path), timeout=240)
    assert (tmp_path / "3" / "tokenizer.json").exists()
    assert (tmp_path / "3" / "more.txt").exists() and (tmp_path / "3" / "checkpoint-3" / "more.txt").exists()
    assert (tmp_path / "3" / "model.safetensors").exists()
    assert not (tmp_path / "3" / "config.json").exists()
