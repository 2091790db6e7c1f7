"""Generation by a vLLM server: it has the weights of the model in training, which are sent unit by unit.

vLLM takes a GPU, so a client in this process stands in for TRL's and its server.
"""

import random
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import models
from tests.compare import assert_equal, weights_of
from tests.distributed import ranks
from tests.trainer.harness import record, seed_everything
from tests.trl.harness import data, make
from tests.trl.test_training import GENERATING, LORA, judged, named, taught, with_lora_and_reward


pytest.importorskip("trl")
pytest.importorskip("peft")

LIMIT = 200.0
ASKS = ("trl.generation.vllm_generation", "trl.trainer.distillation_trainer", "hf_zero.trl.mixin")


class Client:
    """Keeps the weights that it is sent, and answers prompts with words at random, the same for the same prompts."""

    def __init__(self, **_):
        self.weights: dict[str, torch.Tensor] = {}

    def init_communicator(self, device) -> None:
        pass

    def get_server_info(self) -> dict:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata, named_params) -> None:
        """Keeps references to all tensors of an update until the last one is there, as the true one does."""
        sent = list(named_params)
        assert metadata == [(name, str(each.dtype).removeprefix("torch."), list(each.shape)) for name, each in sent]
        self.weights = {name: tensor.clone() for name, tensor in sent}

    def reset_prefix_cache(self) -> None:
        pass

    def generate(self, prompts, n, max_tokens, **_) -> dict:
        ids = []
        for prompt in prompts:
            draw = random.Random(str(prompt))
            lengths = [draw.randint(2, max_tokens) for _ in range(n)]
            ids += [[draw.randrange(6, models.VOCAB) for _ in range(length)] for length in lengths]
        found = {"prompt_ids": prompts, "completion_ids": ids, "logprobs": [[[-4.0]] * len(each) for each in ids]}
        return {**found, "logprob_token_ids": [[[token] for token in each] for each in ids]}


def _made(stage, name, folder, parts, **settings):
    settings = {**GENERATING, **settings, "use_vllm": True, "vllm_mode": "server", "zero_shared_memory": False}
    if name == "Distillation":
        settings = {key: value for key, value in settings.items() if key not in ("num_generations", "beta")}
    seed_everything()
    return make(stage, name, folder, named(folder), data("prompt"), parts=parts(folder), **settings)


def _merged(model) -> dict[str, torch.Tensor]:
    """The weights under the names of the model without adapters, of rank r=3 with the factor 2, which are merged."""
    weights = weights_of(model)
    found = {}
    for name, weight in weights.items():
        if "lora_" not in name:
            down, up = (name.replace("base_layer.weight", f"lora_{part}.default.weight") for part in "AB")
            delta = 2.0 * weights[up] @ weights[down] if "base_layer" in name else 0.0
            found[name.removeprefix("base_model.model.").replace(".base_layer", "")] = weight + delta
    return found


CASES = [
    pytest.param("GRPO", with_lora_and_reward, LORA, id="grpo-lora"),
    pytest.param("RLOO", judged, {}, id="rloo"),
    pytest.param("Distillation", taught, {}, id="distillation"),
]


@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize("name, parts, settings", CASES)
@pytest.mark.support("TRL: generation by a vLLM server", area="Generation", stages=(2, 3))
@ranks(2, timeout=LIMIT)
def test_the_server_has_the_weights_of_the_model_in_training(folder, name, parts, settings):
    """After each step, and the model's own weights are unchanged."""
    runs = {}
    with ExitStack() as stack:
        for module in ASKS:
            stack.enter_context(mock.patch(f"{module}.is_vllm_available", return_value=True))
        stack.enter_context(mock.patch("trl.generation.vllm_generation.VLLMClient", Client))
        for stage in (2, 3):
            trainer = _made(stage, name, folder, parts, **settings)
            send, sent = trainer.vllm_generation.sync_weights, []

            def sync(trainer=trainer, send=send, sent=sent):
                sent.append(trainer.state.global_step)
                before = weights_of(trainer.model)
                atol = 1e-6 if any("lora_" in key for key in before) else 0.0
                send()
                assert all(torch.equal(weight, before[key]) for key, weight in weights_of(trainer.model).items())
                expected = _merged(trainer.model)
                if dist.get_rank() == 0:
                    received = trainer.vllm_generation.vllm_client.weights
                    assert received.keys() == expected.keys()
                    for key, weight in expected.items():
                        torch.testing.assert_close(received[key], weight, rtol=0.0, atol=atol)

            trainer.vllm_generation.sync_weights = sync
            trainer.train()
            runs[stage] = record(trainer)
            assert sent == [0, 1, 2]
    assert_equal(runs[2], runs[3], f"{name} at stages 2 and 3")
