"""All adapters that PEFT has besides LoRA: trained, saved and resumed as under Trainer, or refused with a reason."""

import inspect

import pytest
import torch

from hf_zero.errors import UnsupportedError
from tests import models
from tests.distributed import ranks
from tests.tiers import in_core
from tests.trainer.adapters import TaskRows, check_adapter
from tests.trainer.harness import make


peft = pytest.importorskip("peft")

CAUSAL = {"task_type": "CAUSAL_LM"}
PROMPT = {"num_virtual_tokens": 3, **CAUSAL}
QV = {"target_modules": ["q_proj", "v_proj"]}
Q = {"target_modules": ["q_proj"]}  # square: several types want all targets of one shape

# Class of PEFT's config, and what follows in brackets to tell two of a class apart, to its settings.
KINDS = {
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
    "ShadowConfig": CAUSAL,
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
ELSEWHERE = {"LoraConfig"}  # in test_lora
UNTESTED = {"XLoraConfig", "CPTConfig"}  # they want adapters that are on disk already, or data of their own
ALWAYS = ("PrefixTuningConfig (with projection)", "IA3Config")


def _adapt(kind):
    settings = dict(KINDS[kind])
    base = settings.pop("base", "llama")

    def adapt(model):
        torch.manual_seed(3)
        return peft.get_peft_model(model, getattr(peft, kind.split(" ")[0])(**settings))

    return base, adapt


@pytest.mark.full("more cases", after=1)
@pytest.mark.support("PEFT's {kind}", area="Adapters", stages=(1, 2, 3))
@pytest.mark.parametrize(
    "kind",
    in_core(ALWAYS, [kind for kind in KINDS if kind not in REFUSED]),
)
@ranks(2, timeout=240)
def test_an_adapter_of_any_type_trains_is_saved_and_resumes_as_under_trainer(tmp_path, kind):
    base, adapt = _adapt(kind)
    settings = {"all_used": kind != "ShadowConfig", "remove_unused_columns": kind not in TASKS}
    check_adapter(tmp_path, base, adapt, data=TaskRows(base) if kind in TASKS else None, **settings)


@pytest.mark.support("PEFT's {kind}", area="Adapters", refused=True)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", REFUSED)
def test_an_adapter_that_could_not_be_resumed_is_refused_before_training(tmp_path, kind, stage):
    base, adapt = _adapt(kind)
    with pytest.raises(UnsupportedError, match=REFUSED[kind]):
        make(stage, tmp_path, adapt(models.build(base)), None)


def test_no_type_is_forgotten():
    """A type that a newer PEFT brings is to be tried, and named here."""
    configs = {
        name
        for name, cls in vars(peft).items()
        if inspect.isclass(cls) and issubclass(cls, peft.PeftConfig) and name.endswith("Config")
    }
    named = {kind.split(" ")[0] for kind in KINDS} | ELSEWHERE | UNTESTED | {"PeftConfig", "PromptLearningConfig"}
    assert configs - named == set()
