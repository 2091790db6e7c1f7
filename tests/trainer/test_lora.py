"""Every way to use LoRA over a sharded model, as under Trainer: where it sits, what is trained beside it, ties."""

import logging
from functools import partial

import pytest
import torch

from hf_zero.errors import UnsupportedError
from tests import models
from tests.distributed import ranks
from tests.tiers import in_core
from tests.trainer.adapters import check_adapter
from tests.trainer.harness import PLAIN, Rows, assert_close, make, train


pytest.importorskip("peft")

EMBED = {"target_modules": ["q_proj", "embed_tokens"]}
TIED = {"base": "llama-tied"}
MOE = {"base": "mixtral", "all_used": False}

KINDS = {
    "every linear": {"target_modules": "all-linear"},
    "on embeddings": EMBED,
    "on embeddings and head": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "on one layer": {"layers_to_transform": [1]},
    "on GPT-2's Conv1D": {"base": "gpt2", "target_modules": ["c_attn"]},
    "on an encoder and decoder": {"base": "t5", "target_modules": ["q", "v"], "task_type": "SEQ_2_SEQ_LM"},
    "on fused experts (target_parameters)": {
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        "target_modules": ["q_proj"],
        **MOE,
    },
    "with modules_to_save: head": {"modules_to_save": ["lm_head"]},
    "with modules_to_save: embeddings": {"modules_to_save": ["embed_tokens"]},
    "with modules_to_save: classifier": {
        "base": "bert",
        "target_modules": ["query", "value"],
        "modules_to_save": ["classifier"],
    },
    "with trainable_token_indices": {"trainable_token_indices": [3, 5, 7]},
    "with biases": {"bias": "lora_only", "lora_bias": True},
    "with dropout": {"lora_dropout": 0.1},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    "DoRA on embeddings": {"use_dora": True, **EMBED},
    "tied head: on the head": {"target_modules": ["lm_head", "q_proj"], **TIED},
    "tied head: on both": {"target_modules": ["embed_tokens", "lm_head", "q_proj"], **TIED},
    "tied head: saved embeddings, tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True, **TIED},
    "tied head: trained tokens, tied": {"trainable_token_indices": [3, 5], "ensure_weight_tying": True, **TIED},
}
ALWAYS = (
    "on fused experts (target_parameters)",
    "DoRA on embeddings",
    "tied head: saved embeddings, tied",
)


def _adapt(model, **settings):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    common = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(**{**common, **settings}))


@pytest.mark.full("more cases", after=1)
@pytest.mark.quick(cases=1)
@pytest.mark.support("LoRA, {kind}", area="Adapters", stages=(1, 2, 3))
@pytest.mark.parametrize("kind", in_core(ALWAYS, KINDS))
@ranks(2, timeout=240)
def test_lora_trains_is_saved_and_resumes_as_under_trainer(tmp_path, kind):
    settings = dict(KINDS[kind])
    base = settings.pop("base", "llama")
    checks = {key: settings.pop(key) for key in ("all_used",) if key in settings}
    check_adapter(tmp_path, base, partial(_adapt, **settings), **checks)


@ranks(2, timeout=240)
def test_adapters_of_fused_experts_are_evaluated_as_under_trainer(tmp_path):
    """PEFT puts the adapted weights of experts into the module for each forward."""
    settings = dict(KINDS["on fused experts (target_parameters)"])
    del settings["all_used"]
    name, data, said = settings.pop("base"), Rows("mixtral"), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("hf_zero").addHandler(handler)
    runs = {}
    for kind in (PLAIN, 1, 3):
        runs[kind] = train(
            kind,
            f"{tmp_path}/{kind}",
            data=data,
            model=_adapt(models.build(name), **settings),
            parts={"eval_dataset": Rows("mixtral", count=8, seed=1)},
            eval_strategy="steps",
            eval_steps=2,
            learning_rate=1e-2,
            ddp_find_unused_parameters=True,
        )
        assert len(runs[kind].evals) == 2
        assert_close(runs[kind], runs[PLAIN], f"stage {kind}")
    assert not [line for line in said if "writ" in line], said


@pytest.mark.support("LoRA, tied head: ensure_weight_tying", area="Adapters", refused=True)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_adapters_that_peft_ties_by_their_memory_are_refused(tmp_path, stage):
    """The matrices of embedding and head are two parameters in one memory, of which Trainer makes two."""
    model = _adapt(models.build("llama-tied"), ensure_weight_tying=True, **EMBED)
    with pytest.raises(UnsupportedError, match="share memory without being one parameter"):
        make(stage, str(tmp_path), model, Rows("llama-tied"))
