"""A trainer on sequences that ranks share: its numbers are those of plain `Trainer` over the groups of ranks."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import Trainer

import hf_zero
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.trainer.trainer import _refuse_loss
from tests import models
from tests.distributed import ranks, run_ranks
from tests.trainer.harness import PLAIN, Rows, assert_close, make, record, reset_accelerate, seed_everything
from tests.trainer.harness import SETTINGS as HARNESS


SETTINGS = {
    "gradient_accumulation_steps": 2,
    "gradient_checkpointing": True,
    "include_num_input_tokens_seen": "all",
    "max_steps": 4,
}
# the number of rows, so that the last batch is not whole
EVAL_ROWS = 7


class OwnLoader(Trainer):
    """What is predicted comes from a loader that accelerate does not see, with all rows on each rank."""

    def get_test_dataloader(self, test_dataset):
        return DataLoader(test_dataset, EVAL_ROWS, collate_fn=self.data_collator)


def _metrics(predictions) -> dict[str, float]:
    logits, labels = predictions
    chosen = logits[:, :-1].argmax(-1) == labels[:, 1:]
    return {"rows": len(labels), "accuracy": float(chosen[labels[:, 1:] != -100].mean())}


def _train(kind, folder: str, settings: dict, resume=None):
    seed_everything()
    model = models.build("llama")
    trainer = make(kind, folder, model, Rows("llama"), mixin_on=OwnLoader, **{**SETTINGS, **settings})
    trained = trainer.train(resume_from_checkpoint=resume)
    run = record(trainer)
    rows = Rows("llama", EVAL_ROWS, seed=9)
    alone = trainer.evaluate(rows)
    trainer.compute_metrics = _metrics
    whole = trainer.evaluate(rows)
    predicted = trainer.predict(rows)
    facts = {
        "trained": trained.training_loss,
        "seen": [entry["num_input_tokens_seen"] for entry in trainer.state.log_history if "loss" in entry],
        "samples": round(trained.metrics["train_samples_per_second"] * trained.metrics["train_runtime"]),
        "logits": predicted.predictions,
        "labels": predicted.label_ids,
        "own": predicted.metrics["test_loss"],
        "generated": model.generate(rows[0]["input_ids"][None, :4], max_new_tokens=4, do_sample=False).tolist(),
        "loss": alone["eval_loss"],
        "whole": whole["eval_loss"],
        "accuracy": whole["eval_accuracy"],
        "rows": whole["eval_rows"],
        "epoch": trainer.state.epoch,
        "tokens": trainer.state.num_input_tokens_seen,
        "flos": trainer.state.total_flos,
        "batch": trainer.get_total_train_batch_size(trainer.args),
    }
    return run, facts


def _compare(own, plain, what: str, rtol: float = 1e-5) -> None:
    run, facts = own
    assert_close(run, plain[0], what, rtol=rtol)
    assert facts.keys() == plain[1].keys()
    for key, value in facts.items():
        wanted = plain[1][key]
        assert np.shape(value) == np.shape(wanted), f"{what}: {key}"
        assert np.allclose(value, wanted, rtol=rtol, atol=rtol), f"{what}: {key} {value} and {wanted}"


WAYS = [
    (1, {"zero_offload": "params"}),
    (2, {}),
    (2, {"zero_shard_size": "2", "zero_shared_memory": False}),
    (2, {"train_sampling_strategy": "batch_rebalance", "max_steps": 3}),  # rows of one step after the other
]


@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize("num_groups, flags", WAYS)
def test_ranks_that_share_sequences_train_and_evaluate_as_one_with_whole_ones(tmp_path, num_groups, flags):
    plain = run_ranks(_train, num_groups, PLAIN, str(tmp_path / "plain"), flags, timeout=240)
    flags = {"zero_sequence_parallel": 2, "zero_offload_activations": True, **flags}
    own = run_ranks(_train, 2 * num_groups, 3, str(tmp_path / "own"), flags, timeout=240)
    for rank, found in enumerate(own):
        _compare(found, plain[rank // 2], f"rank {rank}")


@pytest.mark.full("more cases")
@pytest.mark.parametrize("zero_autocast", [True, False])
def test_bf16_rounds_on_shared_sequences_as_it_does_on_whole_ones(tmp_path, zero_autocast):
    flags = {"bf16": True, "use_cpu": True, "zero_autocast": zero_autocast}
    [(whole, wanted)] = run_ranks(_train, 1, 3, str(tmp_path / "whole"), flags, timeout=240)
    flags["zero_sequence_parallel"] = 2
    for run, facts in run_ranks(_train, 2, 3, str(tmp_path / "own"), flags, timeout=240):
        assert_close(run, whole, str(flags), rtol=1e-2, atol=1e-3)
        for key in ("trained", "seen", "loss", "own"):
            assert facts[key] == pytest.approx(wanted[key], rel=1e-2), key


SAVING = {"save_strategy": "steps", "save_steps": 2}
# Ranks, stage and settings.
RESUMED = [
    (2, 2, {"zero_sequence_parallel": 1}),
    (4, 3, {"zero_sequence_parallel": 1, "gradient_accumulation_steps": 1}),
    (4, 1, {"zero_sequence_parallel": 4, "gradient_accumulation_steps": 4}),
]


@pytest.mark.full("slow")
def test_a_run_resumes_with_another_number_of_ranks_that_share_a_sequence(tmp_path):
    """It has the rows of each step, the tokens and the losses that it would have had; the number of rows goes into
    what is told of speed."""
    [plain, _] = run_ranks(_train, 2, PLAIN, str(tmp_path / "plain"), {}, timeout=240)
    run_ranks(_train, 4, 2, str(tmp_path / "own"), {"zero_sequence_parallel": 2, **SAVING}, timeout=240)
    saved = str(tmp_path / "own" / "checkpoint-2")
    for num_ranks, stage, flags in RESUMED:
        args = (stage, str(tmp_path / "resumed"), {**SAVING, **flags}, saved)
        for run, facts in run_ranks(_train, num_ranks, *args, timeout=240):
            assert_close(run, plain[0], f"{num_ranks} ranks, {flags}")
            for key in ("seen", "tokens", "accuracy", "rows", "epoch"):
                assert facts[key] == pytest.approx(plain[1][key], rel=1e-5), f"{num_ranks} ranks, {flags}: {key}"
            assert facts["generated"] == plain[1]["generated"]


def _draws(folder: str) -> tuple[int, ...]:
    trainer = make(2, folder, models.build("llama"), Rows("llama"), zero_sequence_parallel=2, dataloader_num_workers=1)
    loader = trainer.get_train_dataloader()
    torch.manual_seed(7)
    with torch.random.fork_rng():
        loader.base_dataloader.worker_init_fn(0)
        return tuple(torch.randint(2**31, (4,)).tolist())


def test_workers_of_ranks_that_share_sequences_draw_alike(tmp_path):
    first, neighbour, second, other = run_ranks(_draws, 4, str(tmp_path))
    assert first == neighbour != second == other


@ranks(2, timeout=240)
def test_rows_count_once_where_the_trainer_gathers_otherwise(tmp_path):
    reset_accelerate()
    args = hf_zero.ZeroSeq2SeqTrainingArguments(**HARNESS, output_dir=tmp_path, zero_sequence_parallel=2)
    rows = Rows("llama", EVAL_ROWS, seed=9)
    trainer = hf_zero.ZeroSeq2SeqTrainer(models.build("llama"), args, compute_metrics=_metrics)
    assert trainer.evaluate(rows)["eval_rows"] == len(trainer.predict(rows).predictions) == EVAL_ROWS


class Own(Trainer):
    """A trainer with a loss of its own."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        output = model(**inputs)
        return (output.loss, output) if return_outputs else output.loss


def test_losses_of_one_s_own_are_refused_on_either_side_of_the_mixin():
    args: Any = SimpleNamespace(
        zero_sequence_parallel=2, zero_chunked_loss="auto", label_smoothing_factor=0.0, process_index=0
    )
    under = type("Under", (hf_zero.ZeroTrainerMixin, Own), {})
    over = type("Over", (hf_zero.ZeroTrainer,), {"compute_loss": Own.compute_loss})
    for kind, name in ((under, "Own"), (over, "Over")):
        with pytest.raises(ConfigError, match=f"{name} overrides compute_loss"):
            _refuse_loss(kind, args, None)
    for fine in (hf_zero.ZeroTrainer, hf_zero.ZeroSeq2SeqTrainer):
        _refuse_loss(fine, args, None)


def test_a_batch_is_predicted_before_the_model_is_prepared(tmp_path):
    rows = Rows("llama")
    trainer = make(3, tmp_path, models.build("llama"), rows)
    batch = trainer.data_collator([rows[0], rows[1]])
    loss, logits, _ = trainer.prediction_step(trainer.model, batch, False)
    assert loss.isfinite() and len(logits) == 2


def _gives_a_trainer_without_it_batches_of_its_own(folder: str) -> None:
    """Also where all arguments are made before the first trainer."""
    reset_accelerate()
    both = [
        hf_zero.ZeroTrainingArguments(**HARNESS, output_dir=folder, zero_sequence_parallel=number) for number in (2, 1)
    ]
    trainers = [hf_zero.ZeroTrainer(models.build("llama"), args, train_dataset=Rows("llama")) for args in both]
    for trainer, is_shared in zip(trainers, (True, False)):
        own = next(iter(trainer.get_train_dataloader()))["input_ids"].contiguous()
        first = own.clone()
        dist.broadcast(first, 0)
        assert torch.equal(own, first) is (is_shared or dist.get_rank() == 0)


@ranks(2)
def test_what_does_not_go_with_shared_sequences_is_refused(tmp_path):
    def made(name="llama", parts=None, **flags):
        return make(3, tmp_path, models.build(name), Rows("llama"), parts=parts, zero_sequence_parallel=2, **flags)

    with pytest.raises(ConfigError, match="zero_sequence_parallel: not supported with torch_compile"):
        made(torch_compile=True)
    with pytest.raises(ConfigError, match="not supported with label_smoothing_factor"):
        made(label_smoothing_factor=0.1)
    with pytest.raises(ConfigError, match="zero_sequence_parallel: compute_loss_func"):
        made(parts={"compute_loss_func": len})
    with pytest.raises(ConfigError, match=r"Own overrides compute_loss, which would receive only a part"):
        made(mixin_on=Own)
    with pytest.raises(UnsupportedError, match="sequence_parallel: MixtralForCausalLM adds the loss of a router"):
        made("mixtral")
    model = models.build("llama")
    hf_zero.shard(model, stage=3)
    with pytest.raises(
        ConfigError, match="is already sharded with sequence_parallel 1, but the accelerator has 2; use the same"
    ):
        make(3, tmp_path, model, Rows("llama"), zero_sequence_parallel=2).train()
    _gives_a_trainer_without_it_batches_of_its_own(tmp_path)
