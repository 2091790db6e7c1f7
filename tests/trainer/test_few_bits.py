"""Values in few bits under Trainer and TRL: they train what the engine alone trains, bit for bit, and what is kept,
saved and gathered is exact."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM


pytest.importorskip("peft")
pytest.importorskip("trl")

from trl.trainer.utils import add_fused_lm_head

import hf_zero
from hf_zero.engine import engine_of
from tests.distributed import ranks
from tests.test_packed import _round_like
from tests.trainer import harness
from tests.training import Sharded, adamw
from tests.trl import harness as trl_harness


# ranks that share memory would sum exactly; a constant rate is that of the loop without a trainer
SETTINGS = {"zero_gather_dtype": "int8", "zero_shared_memory": False, "lr_scheduler_type": "constant"}
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


def _make(kind: str, folder: str, name: str, **settings):
    """A trainer of the same model and rows each time."""
    harness.seed_everything()
    settings = {**SETTINGS, **SAVING, "output_dir": f"{folder}/{name}", **settings}
    if kind == "SFT":
        return trl_harness.make(3, "SFT", folder, trl_harness.policy(folder), trl_harness.data("text"), **settings)
    model = LlamaForCausalLM.from_pretrained(f"{folder}/policy", dtype=torch.float32)
    return harness.make(3, folder, model, harness.Rows("llama"), **settings)


def _trained(trainer, resume: str | None = None) -> tuple[harness.Run, list[dict]]:
    """Trains, and returns what the model was called with besides."""
    seen: list[dict] = []

    def see(model, args, kwargs) -> None:
        assert not args
        values = {key: each.clone() if isinstance(each, torch.Tensor) else each for key, each in kwargs.items()}
        seen.append(values) if model.training else None

    watching = trainer.model.register_forward_pre_hook(see, with_kwargs=True)
    trainer.train(resume_from_checkpoint=resume)
    watching.remove()
    return harness.record(trainer), seen


def _alone(folder: str, seen: list[dict], **settings) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The norms and weights of the same steps without a trainer."""
    model = LlamaForCausalLM.from_pretrained(f"{folder}/policy", dtype=torch.float32).train()
    settings = {"gather_dtype": torch.int8, "shared_memory": False, **settings}
    if "fused_lm_head" in seen[0]:
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    subject, norms = Sharded(model, lambda model: adamw(model, fused=True), 3, **settings), []
    for values in seen:
        _part_of_loss(subject.model(**values)).mul(dist.get_world_size()).backward()
        norms.append(subject.clip_grad_norm_(harness.SETTINGS["max_grad_norm"]).item())
        subject.optimizer.step()
        subject.optimizer.zero_grad()
    return norms, harness.weights_of(subject.model)


def _part_of_loss(output) -> torch.Tensor:
    """This rank's part of the loss, which is of the tokens of all ranks. Trainer's model computes it; SFT does of what
    the head returns."""
    if not hasattr(output, "label_mask"):
        return output.loss
    dist.all_reduce(num_tokens := output.label_mask.sum())
    return -output.log_probs.sum() / num_tokens


def _reads_what_it_should(trainer, folder: str, is_computed: bool) -> None:
    """A save has the masters; forwards outside of `gathered`, such as those of an evaluation and of `generate`, see
    rounded values, those inside exact ones."""
    trainer.save_model(f"{folder}/saved")
    masters = {shard.name: shard for shard in trainer._engine.named_shards()}
    saved = LlamaForCausalLM.from_pretrained(f"{folder}/saved").eval()
    assert masters and {p.dtype for p in saved.parameters()} == {torch.float32}
    for name, p in saved.named_parameters():
        if name in masters:
            shard = masters[name]
            part = p.detach().reshape(-1)[shard.start : shard.start + shard.tensor.numel()]
            assert torch.equal(part, shard.tensor), name
    if not is_computed:
        return
    rounded = LlamaForCausalLM.from_pretrained(f"{folder}/saved").eval()
    _round_like(rounded, SimpleNamespace(engine=engine_of(trainer.model)))
    rows = harness.Rows("llama", 4, seed=7)
    found = torch.from_numpy(trainer.predict(rows).predictions)
    ids, mask = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "attention_mask"))
    with torch.no_grad():
        of_rounded, of_exact = (model(input_ids=ids, attention_mask=mask).logits for model in (rounded, saved))
    torch.testing.assert_close(found, of_rounded, rtol=1e-5, atol=1e-6)
    assert (of_exact - of_rounded).abs().max() > 1e-4
    trainer.model.eval()
    torch.testing.assert_close(_scores(trainer.model, ids), _scores(rounded, ids), rtol=1e-5, atol=1e-6)
    with hf_zero.gathered(trainer.model):
        assert torch.equal(trainer.model(input_ids=ids, attention_mask=mask).logits, of_exact)
        assert torch.equal(_scores(trainer.model, ids), _scores(saved, ids))


def _scores(model, ids: torch.Tensor) -> torch.Tensor:
    """The scores of what it goes on with."""
    asked = {"max_new_tokens": 3, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    return torch.stack(model.generate(input_ids=ids[:, :4], **asked, eos_token_id=None).scores)


@pytest.mark.full("slow")
@pytest.mark.parametrize("kind", ["SFT", "Trainer"])
@ranks(2, timeout=240)
def test_a_trainer_trains_what_the_engine_trains_and_saves_exact_values(tmp_path, kind):
    if dist.get_rank() == 0:
        trl_harness.save_models(tmp_path)
    dist.barrier()
    settings = {"zero_reduce_dtype": "int8"}
    trainer = _make(kind, tmp_path, "whole", **settings)
    whole, seen = _trained(trainer)
    harness.assert_learned(whole)
    norms, weights = _alone(tmp_path, seen, reduce_dtype=torch.int8)
    assert len(seen) == 4 and norms == whole.norms, (norms, whole.norms)
    assert all(torch.equal(values, whole.weights[name]) for name, values in weights.items())
    _reads_what_it_should(trainer, tmp_path, is_computed=kind == "Trainer")
    resumed, _ = _trained(_make(kind, tmp_path, "whole", **settings), resume=f"{tmp_path}/whole/checkpoint-2")
    harness.assert_equal(resumed, whole, "resumed and unbroken")
    exact = _make(kind, tmp_path, "exact", **{**settings, "zero_gather_dtype": None, "zero_reduce_dtype": "fp32"})
    assert _trained(exact)[0].losses != whole.losses, "values were to be rounded"
