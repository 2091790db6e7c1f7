"""All adapters that PEFT has, and every way to use LoRA: trained, saved and resumed as under Trainer, or refused."""

import inspect
import logging
from functools import partial

import pytest
import torch

from hf_zero.errors import UnsupportedError
from tests import models
from tests.distributed import ranks
from tests.output import logged
from tests.tiers import in_core
from tests.trainer.adapters import TaskRows, check_adapter
from tests.trainer.harness import PLAIN, Rows, assert_close, make, train


peft = pytest.importorskip("peft")

CAUSAL = {"task_type": "CAUSAL_LM"}
PROMPT = {"num_virtual_tokens": 3, **CAUSAL}
QV = {"target_modules": ["q_proj", "v_proj"]}
Q = {"target_modules": ["q_proj"]}  # square: several types want all targets of one shape

LORA_SETTINGS = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
EMBED = {"target_modules": ["q_proj", "embed_tokens"]}
TIED = {"base": "llama-tied"}
MOE = {"base": "mixtral", "all_used": False}

# Ways to use LoRA: where it sits, what is trained beside it, ties.
LORA = {
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
# Class of PEFT's config, and what follows in brackets to tell two of a class apart, to its settings.
OTHERS = {
    "PromptTuningConfig": PROMPT,
    "PromptTuningConfig (classifier)": {"base": "bert", "num_virtual_tokens": 3, "task_type": "SEQ_CLS"},
    "PrefixTuningConfig": PROMPT,
    "PrefixTuningConfig (with projection)": {"prefix_projection": True, "encoder_hidden_size": 8, **PROMPT},
    "PromptEncoderConfig": {"encoder_hidden_size": 8, **PROMPT},
    "PromptEncoderConfig (LSTM)": {"encoder_hidden_size": 8, "encoder_reparameterization_type": "LSTM", **PROMPT},
    "MultitaskPromptTuningConfig": {"num_tasks": 2, **PROMPT},
    "CartridgeConfig": PROMPT,
    "AdaptionPromptConfig": {"adapter_len": 3, "adapter_layers": 2, **CAUSAL},
    "IA3Config": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LNTuningConfig": {"target_modules": ["norm", "input_layernorm"]},
    "TrainableTokensConfig": {"token_indices": [*range(3, 40)]},
    "AdaLoraConfig": {"total_step": 10, **QV},
    "AdamssConfig": QV,
    "BOFTConfig": {"boft_block_size": 4, **QV},
    "BeftConfig": QV,
    "C3AConfig": {"block_size": 4, **QV},
    "DeftConfig": QV,
    "DeloraConfig": QV,
    "FourierFTConfig": {"n_frequency": 10, **QV},
    "FrodConfig": Q,
    "GloraConfig": QV,
    "GraloraConfig": {"r": 4, "gralora_k": 2, **QV},
    "HRAConfig": {"r": 4, **QV},
    "HiraConfig": QV,
    "LilyConfig": QV,
    "LoHaConfig": {"r": 3, **QV},
    "LoKrConfig": {"r": 3, **QV},
    "MissConfig": {"r": 2, **QV},
    "OFTConfig": {"oft_block_size": 4, "r": 0, **QV},
    "OSFConfig": QV,
    "PeanutConfig": QV,
    "PolyConfig": {"r": 2, "n_tasks": 2, **QV, **CAUSAL},
    "PsoftConfig": {"r": 4, **Q},
    "PveraConfig": {"r": 4, **QV},
    "RandLoraConfig": {"r": 4, **Q},
    "RoadConfig": {"group_size": 4, **QV},
    "ShadowConfig": {"all_used": False, **CAUSAL},
    "ShiraConfig": {"r": 2, **QV},
    "SupertuningConfig": QV,
    "TinyLoraConfig": QV,
    "UniLoraConfig": QV,
    "VBLoRAConfig": {"num_vectors": 8, "vector_length": 4, "r": 2, "topk": 2, **QV},
    "VeraConfig": {"r": 4, **QV},
    "WaveFTConfig": {"n_frequency": 10, **QV},
}
REFUSED = {"ShiraConfig": "SHIRA.: .*shira_indices in its file is not a parameter or buffer of the model"}
TASKS = ("MultitaskPromptTuningConfig", "PolyConfig")
UNTESTED = {"XLoraConfig", "CPTConfig"}  # they want adapters that are on disk already, or data of their own
KINDS = {f"LoRA, {kind}": ("LoraConfig", settings) for kind, settings in LORA.items()}
KINDS |= {f"PEFT's {kind}": (kind.split(" ")[0], settings) for kind, settings in OTHERS.items()}
ALWAYS = (
    "LoRA, every linear",
    "LoRA, on fused experts (target_parameters)",
    "PEFT's PrefixTuningConfig (with projection)",
)


def _adapted(kind: str) -> tuple:
    """The base, what puts the adapter on it, and settings of `check_adapter`."""
    name, settings = KINDS[kind]
    settings = {**(LORA_SETTINGS if name == "LoraConfig" else {}), **settings}
    base, all_used = settings.pop("base", "llama"), settings.pop("all_used", True)
    has_tasks = name in TASKS
    checks = {"all_used": all_used, "data": TaskRows(base) if has_tasks else None}
    return base, partial(_adapt, name, settings), {**checks, "remove_unused_columns": not has_tasks}


def _adapt(name: str, settings: dict, model):
    torch.manual_seed(3)
    return peft.get_peft_model(model, getattr(peft, name)(**settings))


@pytest.mark.quick(cases=1)
@pytest.mark.support("{kind}", area="Adapters", stages=(1, 2, 3))
@pytest.mark.parametrize(
    "kind", in_core(ALWAYS, [kind for kind in KINDS if kind.removeprefix("PEFT's ") not in REFUSED])
)
@ranks(2, timeout=240)
def test_an_adapter_of_any_kind_trains_is_saved_and_resumes_as_under_trainer(tmp_path, kind):
    base, adapt, settings = _adapted(kind)
    check_adapter(tmp_path, base, adapt, **settings)


@pytest.mark.support("PEFT's {kind}", area="Adapters", refused=True)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", REFUSED)
def test_an_adapter_that_could_not_be_resumed_is_refused_before_training(tmp_path, kind, stage):
    base, adapt, _ = _adapted(f"PEFT's {kind}")
    with pytest.raises(UnsupportedError, match=REFUSED[kind]):
        make(stage, tmp_path, adapt(models.build(base)), None)


def test_no_type_is_forgotten():
    """A type that a newer PEFT brings is to be tried, and named here."""
    configs = {
        name
        for name, cls in vars(peft).items()
        if inspect.isclass(cls) and issubclass(cls, peft.PeftConfig) and name.endswith("Config")
    }
    named = {name for name, _ in KINDS.values()} | UNTESTED | {"PeftConfig", "PromptLearningConfig"}
    assert configs - named == set()


@ranks(2, timeout=240)
def test_adapters_of_fused_experts_are_evaluated_as_under_trainer(tmp_path):
    """PEFT puts the adapted weights of experts into the module for each forward."""
    name, adapt, _ = _adapted("LoRA, on fused experts (target_parameters)")
    data, runs = Rows(name), {}
    with logged(level=logging.WARNING) as said:
        for kind in (PLAIN, 1, 3):
            runs[kind] = train(
                kind,
                f"{tmp_path}/{kind}",
                data=data,
                model=adapt(models.build(name)),
                parts={"eval_dataset": Rows(name, count=8, seed=1)},
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
    model = _adapt("LoraConfig", {**LORA_SETTINGS, **EMBED, "ensure_weight_tying": True}, models.build("llama-tied"))
    with pytest.raises(UnsupportedError, match="share memory without being one parameter"):
        make(stage, str(tmp_path), model, Rows("llama-tied"))
