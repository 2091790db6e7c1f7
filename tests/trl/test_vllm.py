"""Generation by a vLLM server: it has the weights of the model in training, which are sent unit by unit."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_new_ranks
from tests.trainer.harness import assert_equal, record, seed_everything, weights_of
from tests.trl.harness import data, make
from tests.trl.test_training import GENERATING, LORA, judged, named, taught, with_lora_and_reward
from tests.trl.vllm_server import Server, import_package, weights_at, write_package


pytest.importorskip("trl")
pytest.importorskip("peft")
pytest.importorskip("requests")

LIMIT = 200.0


def _made(stage, name, folder, parts, port, group_port, **settings):
    settings = {**GENERATING, **settings, "use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 0.0}
    if name == "Distillation":
        settings = {key: value for key, value in settings.items() if key not in ("num_generations", "beta")}
    settings |= {"vllm_server_base_url": f"http://127.0.0.1:{port}", "vllm_group_port": group_port}
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


def _serves(folder, name, parts, settings, port, group_port):
    """The server has the weights of the model after each step, which are unchanged."""
    import_package(f"{folder}/packages")
    runs = {}
    for stage in (2, 3):
        trainer = _made(stage, name, folder, parts, port, group_port, zero_shared_memory=False, **settings)
        send, sent = trainer.vllm_generation.sync_weights, []

        def sync(trainer=trainer, send=send, sent=sent):
            sent.append(trainer.state.global_step)
            before = weights_of(trainer.model)
            atol = 1e-6 if any("lora_" in key for key in before) else 0.0
            send()
            assert all(torch.equal(weight, before[key]) for key, weight in weights_of(trainer.model).items())
            expected = _merged(trainer.model)
            if dist.get_rank() == 0:
                received = weights_at(port)
                assert received.keys() == expected.keys()
                for key, weight in expected.items():
                    torch.testing.assert_close(received[key], weight, rtol=0.0, atol=atol)

        trainer.vllm_generation.sync_weights = sync
        trainer.train()
        runs[stage] = record(trainer)
        assert sent == [0, 1, 2]
    assert_equal(runs[2], runs[3], f"{name} at stages 2 and 3")


CASES = [
    pytest.param("GRPO", with_lora_and_reward, LORA, id="grpo-lora"),
    pytest.param("RLOO", judged, {}, id="rloo"),
    pytest.param("Distillation", taught, {}, id="distillation"),
]


@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize("name, parts, settings", CASES)
@pytest.mark.support("TRL: generation by a vLLM server", area="Generation", stages=(2, 3))
def test_the_server_has_the_weights_of_the_model_in_training(folder, name, parts, settings):
    write_package(Path(folder, "packages"))
    server = Server()
    ports = (server.port, server.group_port)
    run_new_ranks(_serves, 2, folder, name, parts, settings, *ports, timeout=LIMIT)
    server.die()
