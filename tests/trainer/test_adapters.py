"""PEFT adapters over sharded models: few trainable parameters in blocks of frozen ones."""

import re
import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import Trainer

import hf_zero
from hf_zero.checkpoint.adapters import PROMPTS_NAME, adapter_keys, load_model
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.engine import engine_of
from hf_zero.errors import CheckpointError, LifecycleError, UnsupportedError
from tests import models
from tests.compare import weights_of
from tests.distributed import ranks
from tests.tiers import more
from tests.trainer.adapters import check_adapter
from tests.trainer.harness import PLAIN, Rows, assert_close, compare, make, record, seed_everything, train


pytest.importorskip("peft")


def _lora(base=None, **settings):
    from peft import LoraConfig, get_peft_model

    base = models.build("llama") if base is None else base
    settings = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **settings}
    return get_peft_model(base, LoraConfig(r=3, lora_alpha=6, **settings))


@ranks(2, timeout=240)
def test_adapters_are_saved_whole_and_resume(tmp_path):
    """With a trained copy of a whole module, saved with the adapter."""
    check_adapter(tmp_path, "llama", partial(_lora, modules_to_save=["lm_head"]), gradient_checkpointing=True)
    folder, name = tmp_path / "3" / "checkpoint-4", "adapter_model.safetensors"
    assert not (folder / "model.safetensors").exists()
    # 3 layers, q and v, A and B of rank 3, and the head; in all below 24 KB with the header
    assert (folder / name).stat().st_size < 24_000, "only the adapters are saved"
    assert len(Manifest.read(folder).files[name].tensors) == 3 * 2 * 2 + 1
    model, content = _lora(modules_to_save=["lm_head"]), bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    dist.barrier()
    (folder / name).write_bytes(content)
    dist.barrier()
    with pytest.raises(CheckpointError, match=f"{name}: tensor '.*' has checksum"):
        train(3, tmp_path, "llama", model=model, resume=str(folder), learning_rate=1e-2)


@ranks(1)
def test_a_model_without_embedding_layers_has_adapters_all_the_same():
    model = _lora()
    keys = adapter_keys(model, "default", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.base_model.model), "get_input_embeddings", mock.Mock(side_effect=NotImplementedError))
        assert adapter_keys(model, "default", False) == adapter_keys(model, "default", True)
    assert len(keys) > 3 * 2 * 2, "the embedding layers are saved where a model has them"


def _adapted_by_transformers(model):
    """A model with an adapter and without a PEFT model around it."""
    from peft import LoraConfig

    torch.manual_seed(3)
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False), "own")
    return model


@pytest.mark.full("slow")
@ranks(2, timeout=240)
def test_an_adapter_without_a_peft_model_is_saved_and_resumes(tmp_path):
    check_adapter(tmp_path, "llama", _adapted_by_transformers, loads=False)
    wanted = load_file(f"{tmp_path}/plain/checkpoint-4/adapter_model.safetensors")
    for stage in (1, 2, 3):
        found = load_file(f"{tmp_path}/{stage}/checkpoint-4/adapter_model.safetensors")
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        assert not Path(f"{tmp_path}/{stage}/checkpoint-4/model.safetensors").exists()


@pytest.mark.support("Parameters trained beside an adapter, not in modules_to_save", area="Adapters", refused=True)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "adapted", [_lora, lambda: _adapted_by_transformers(models.build("llama"))], ids=["PEFT", "transformers"]
)
def test_what_is_trained_beside_an_adapter_is_not_lost_silently(tmp_path, caplog, adapted, stage):
    model = adapted()
    model.get_output_embeddings().requires_grad_(True)
    lost = "lm_head.weight: is trained but not saved with the adapters, .* modules_to_save"
    with pytest.raises(UnsupportedError, match=lost):
        make(stage, tmp_path, model, save_strategy="steps")
    make(stage, tmp_path, model, save_strategy="no")
    assert len(re.findall(lost, caplog.text)) == 1
    model.get_output_embeddings().requires_grad_(False)
    make(stage, tmp_path, model, save_strategy="steps")


@pytest.mark.support("Several active adapters without a PEFT model", area="Adapters", refused=True)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_several_active_adapters_without_a_peft_model_are_refused(tmp_path, stage):
    from peft import LoraConfig

    model = _adapted_by_transformers(models.build("llama"))
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]), "two")
    make(stage, tmp_path, model)
    model.set_adapter(["own", "two"])
    with pytest.raises(UnsupportedError, match="adapters 'own', 'two': are all active, .* saves only one; call"):
        make(stage, tmp_path, model)


def _several(trained, base=None):
    """A model with two adapters, of which those named are trained."""
    from peft import LoraConfig

    model = _lora(base)
    torch.manual_seed(4)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    model.base_model.set_adapter(trained)
    return model


@pytest.mark.full("more cases", after=1)
@pytest.mark.support("Several adapters, one or all of them trained", area="Adapters", stages=(1, 2, 3))
@pytest.mark.parametrize("trained", [["default"], *more(["default", "other"])])
@ranks(2, timeout=240)
def test_some_of_several_adapters_train_and_all_are_saved(tmp_path, trained):
    from peft import PeftModel

    runs = check_adapter(tmp_path, "llama", partial(_several, trained))
    for stage, run in runs.items():
        loaded = PeftModel.from_pretrained(models.build("llama"), f"{tmp_path}/{stage}/checkpoint-4")
        loaded.load_adapter(f"{tmp_path}/{stage}/checkpoint-4/other", adapter_name="other")
        for name, weight in loaded.named_parameters():
            assert torch.equal(weight, run.weights[name]), name


class WithReference(Trainer):
    """Its loss looks at what another adapter gives, as preference training does with a reference adapter."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        whole = self.accelerator.unwrap_model(model)
        whole.set_adapter("other")
        with torch.no_grad():
            reference = whole(**inputs).logits
        whole.set_adapter("default")
        outputs = model(**inputs)
        loss = outputs.loss + (outputs.logits - reference).square().mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.support("Another adapter as reference, within each step", area="Adapters", stages=(1, 2, 3))
@ranks(2, timeout=240)
def test_a_loss_may_look_at_another_adapter(tmp_path):
    settings = {"learning_rate": 1e-2, "mixin_on": WithReference}
    compare(lambda kind: train(kind, tmp_path, "llama", model=_several(["default"]), **settings), equal=())


@pytest.mark.support("Training another adapter than when the model was sharded", area="Adapters", refused=True)
@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(1, timeout=240)
def test_another_adapter_cannot_be_trained_once_the_model_is_sharded(tmp_path, stage):
    from peft import LoraConfig

    trainer = make(stage, tmp_path, _several(["default"]), Rows("llama"), parts={"eval_dataset": Rows("llama", 4)})
    trainer.evaluate()  # which shards the model
    trainer.model.set_adapter("other")
    with pytest.raises(
        LifecycleError, match=r"q_proj.lora_A.other.weight: was unfrozen after .* set_adapter\) before"
    ):
        trainer.train()
    trainer.model.add_adapter("late", LoraConfig(r=2, target_modules=["q_proj"]))
    trainer.model.set_adapter("late")
    with pytest.raises(
        LifecycleError, match="lora_A.late.weight: was added after the model was sharded; add trainable"
    ):
        trainer.train()


def _merged_loss(state, batch):
    plain = models.build("llama").eval()
    plain.load_state_dict(state)
    return plain(**batch).loss


@pytest.mark.quick(cases=1)
@pytest.mark.support("Merging into the base, inside hf_zero.gathered(writeback=True)", area="Adapters")
@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(2, timeout=240)
def test_adapters_are_merged_inside_gathered(tmp_path, stage, settings):
    from peft import PeftModel

    settings = {"target_modules": ["q_proj", "embed_tokens"], **settings}
    model = _lora(**settings)
    parts = {"eval_dataset": Rows("llama", 4, seed=1)}
    trainer = make(stage, tmp_path, model, Rows("llama"), parts=parts, learning_rate=1e-2, max_steps=2)
    trainer.train()
    trainer.save_model()
    start, loss = weights_of(model), trainer.evaluate()["eval_loss"]
    name = "base_model.model.model.layers.1.self_attn.q_proj.base_layer.weight"
    for safe in (False, True):  # one writes into the weights, the other puts new ones in their place
        with hf_zero.gathered(model, writeback=True):
            model.merge_adapter(safe_merge=safe)
        assert not torch.equal(weights_of(model)[name], start[name])
        assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-5)
        with hf_zero.gathered(model, writeback=True):
            model.unmerge_adapter()
        assert torch.allclose(weights_of(model)[name], start[name], rtol=0, atol=1e-6)
    with hf_zero.gathered(model, writeback=True):
        merged = model.merge_and_unload()
        state = {name: tensor.clone() for name, tensor in merged.state_dict().items()}
    wanted = PeftModel.from_pretrained(models.build("llama"), tmp_path).merge_and_unload().state_dict()
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.allclose(state[name], tensor, rtol=0, atol=1e-5), name
    batch = models.batch("llama", 0)
    with torch.no_grad():
        assert torch.allclose(merged.eval()(**batch).loss, _merged_loss(wanted, batch), rtol=1e-5)


@ranks(2, timeout=240)
def test_the_best_adapters_are_loaded_at_the_end(tmp_path):
    settings = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1, "max_steps": 3}
    settings |= {"load_best_model_at_end": True, "learning_rate": 0.2}
    runs = {}
    for kind in (3, PLAIN):
        seed_everything()
        parts = {"eval_dataset": Rows("llama", 5, seed=1)}
        trainer = make(kind, f"{tmp_path}/{kind}", _lora(), Rows("llama"), parts=parts, **settings)
        trainer.train()
        runs[kind] = record(trainer)
        evaluated = trainer.evaluate()["eval_loss"]
        assert evaluated == pytest.approx(min(runs[kind].evals), rel=1e-6)
    assert min(runs[3].evals) != runs[3].evals[-1], "the best was not to be the last"
    assert_close(runs[3], runs[PLAIN], "stage 3 and Trainer", rtol=1e-3, atol=1e-3)


@ranks(2, timeout=60)
def test_prompts_that_one_rank_does_not_see_are_told_on_all_ranks(tmp_path):
    from peft import PromptEncoderConfig, get_peft_model

    config = PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8)
    trainer = make(3, tmp_path, get_peft_model(models.build("llama"), config), Rows("llama"), save_strategy="epoch")
    trainer.train()
    engine, rank = engine_of(trainer.model), trainer.args.process_index
    own = f"{tmp_path}/disk-{rank}"
    shutil.copytree(f"{tmp_path}/checkpoint-4", own)
    if rank:
        Path(own, PROMPTS_NAME).unlink()
    with pytest.raises(
        CheckpointError, match=r"loading \S+: rank 1 failed: MissingCheckpointError" if rank == 0 else own
    ):
        load_model(engine, own)


@pytest.mark.support("Resuming learned prompts from PEFT's file alone", area="Adapters", refused=True)
@pytest.mark.parametrize("stage", [1, 3])
@ranks(1, timeout=240)
def test_what_prompts_are_computed_from_is_needed_to_go_on(tmp_path, stage):
    from peft import PromptEncoderConfig, get_peft_model

    config = PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8)
    trainer = make(stage, tmp_path, get_peft_model(models.build("llama"), config), Rows("llama"))
    trainer.save_model()
    trainer.state.save_to_json(f"{tmp_path}/trainer_state.json")
    with pytest.raises(CheckpointError, match="has prompts of adapter 'default', but not .* prompt_encoder.default"):
        trainer.train(resume_from_checkpoint=tmp_path)
