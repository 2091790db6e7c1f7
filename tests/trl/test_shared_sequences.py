"""SFT on sequences that ranks share: losses and metrics are those of one rank with whole sequences."""

import pytest

import hf_zero
import hf_zero.trl
from hf_zero.errors import ConfigError
from tests.distributed import run_ranks
from tests.trainer.harness import PLAIN, assert_close, record, seed_everything
from tests.trl.harness import data, make, policy


METRICS = ("loss", "entropy", "mean_token_accuracy", "num_tokens", "eval_loss", "eval_entropy")


def _train(kind, folder: str, settings: dict):
    seed_everything()
    trainer = make(kind, "SFT", folder, policy(folder), data("text"), **settings)
    trainer.train()
    trainer.evaluate(trainer.train_dataset.select(range(5)))
    return record(trainer), trainer.state.log_history


@pytest.mark.full("slow")
@pytest.mark.parametrize("settings", [{}, {"packing": True, "loss_type": "dft"}], ids=["padded", "packed-dft"])
def test_sft_on_shared_sequences_has_the_metrics_of_whole_ones(folder, settings):
    [(plain, wanted)] = run_ranks(_train, 1, PLAIN, folder, settings)
    for rank, (run, log) in enumerate(run_ranks(_train, 2, 3, folder, {**settings, "zero_sequence_parallel": 2})):
        assert_close(run, plain, f"rank {rank}")
        for own, other in zip(log, wanted, strict=True):
            for key in METRICS:
                assert (key in own) == (key in other), key
                assert own.get(key, 0) == pytest.approx(other.get(key, 0), rel=1e-4), key


@pytest.mark.parametrize("name", ["DPO", "KTO", "GRPO", "RLOO", "Reward", "Distillation"])
def test_other_trainers_of_trl_are_refused_before_a_model_is_loaded(tmp_path, name):
    settings = {"num_generations": 2} if name in ("GRPO", "RLOO") else {}
    args = getattr(hf_zero.trl, f"Zero{name}Config")(str(tmp_path), zero_sequence_parallel=2, bf16=False, **settings)
    with pytest.raises(
        ConfigError, match=f"zero_sequence_parallel: Zero{name}Trainer computes its loss from full seq"
    ):
        getattr(hf_zero.trl, f"Zero{name}Trainer")(model="no/such/model", args=args)
