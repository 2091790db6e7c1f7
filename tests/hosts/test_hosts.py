"""Ranks of several hosts, each in namespaces of its own: they train as those of one host do, save, and notice when a
host has gone."""

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_zero.checkpoint import load_state, load_weights, save_checkpoint
from hf_zero.comm import connect, distributed
from hf_zero.errors import CommError
from tests import models
from tests.comm.test_collectives import CPU
from tests.compare import assert_close, assert_equal_on_all_ranks
from tests.distributed import run_new_ranks, run_ranks
from tests.hosts.network import Network, missing
from tests.output import logged
from tests.test_parity import ATOL
from tests.tiers import more
from tests.training import Record, Sharded, adamw, go_on, train


pytestmark = pytest.mark.skipif(missing() is not None, reason=f"{missing()}")


@pytest.mark.quick
def test_hosts_have_names_and_reach_one_another_alone():
    with Network(2) as network:
        assert network.run(0, ["hostname"]) == "host0\n"
        assert network.run(1, ["getent", "hosts", "host0"]).split() == [network.hosts[0].address, "host0"]
        assert network.run(0, ["ip", "route"]).split()[0] == "10.77.0.0/24", "and no way outside"


INT8 = {"gather_dtype": torch.int8, "reduce_dtype": torch.int8}
WAYS: list[tuple[int, dict[str, Any]]] = [
    *[(3, {}), (3, {"shard_size": "auto"}), (1, {"shard_size": "auto"}), (2, {}), (1, {})],
    *[(3, INT8), (3, {"shard_size": "auto", **INT8}), (2, {"reduce_dtype": torch.int8})],
]


def _trained(ways: list[tuple[int, dict[str, Any]]], num_hosts: int) -> list[Record]:
    found = []
    for stage, settings in ways:
        subject = Sharded(models.build("llama"), adamw, stage, **settings)
        parts = num_hosts if "shard_size" in settings else 1
        assert subject.engine.comm.shard_group.num_ranks == dist.get_world_size() // parts
        found.append(train(subject, "llama", num_steps=3))
        assert_equal_on_all_ranks(subject.weights(), f"stage {stage}, {settings}")
    return found


@pytest.mark.parametrize("num_local, ways", [(2, WAYS[:2]), *more((1, [(3, {}), (2, {}), (1, {})]), (2, WAYS[2:]))])
def test_two_hosts_train_as_one(num_local, ways):
    with Network(2) as network:
        apart = run_new_ranks(_trained, 2 * num_local, ways, 2, hosts=network.hosts)
    together = run_ranks(_trained, 2 * num_local, ways, 1)
    for rank, records in enumerate(zip(apart, together, strict=True)):
        for (stage, settings), ours, theirs in zip(ways, *records, strict=True):
            # a step of Adam is no longer than the learning rate, 1e-3, whatever becomes of a gradient
            is_rounded = "reduce_dtype" in settings
            bounds = {"loss": 0.02, "norm": 0.05, "weight": 0.05, "atol": 6e-3} if is_rounded else {"atol": ATOL}
            assert_close(ours, theirs, f"stage {stage}, {settings}, rank {rank}: two hosts and one", **bounds)


def _connect_hosts() -> str:
    comm = connect(CPU, timeout_seconds=60.0, bucket_nbytes="auto")
    del os.environ["GLOO_SOCKET_IFNAME"]  # by which the ranks themselves have met
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CommError) as caught:
        patch.setattr(distributed, "CONNECTING_SECONDS", 3.0)
        comm.side_group("hosts")
    return str(caught.value)


@pytest.mark.full("slow")
def test_hosts_whose_names_stand_for_loopback_are_told_which_interface_to_set(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    with Network(2, own_address="127.0.1.1") as network:
        told = run_new_ranks(_connect_hosts, 2, hosts=network.hosts, start="spawn")
    for rank, line in enumerate(told):
        assert line.startswith("connecting the hosts of the ranks by gloo: ")
        assert f"this host's name host{rank} resolves to 127.0.1.1" in line
        assert f"packets to MASTER_ADDR 10.77.0.1 leave from 10.77.0.{rank + 1} (eth0)" in line
        assert "GLOO_SOCKET_IFNAME=(not set): on every host, set it to the interface" in line


def _dies_in_training(victim: int, said: Path) -> None:
    """The ranks of one host are killed at once; those of the other are told, and by whom they were left."""
    subject = Sharded(models.build("llama"), adamw, 3)
    train(subject, "llama", num_steps=1)
    if dist.get_rank() // 2 == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(CommError) as caught:
        train(subject, "llama", num_steps=100)
    Path(said, f"{dist.get_rank()}").write_text(f"{time.monotonic() - begin:.1f} {caught.value}")
    os._exit(0)


@pytest.mark.full("slow")
@pytest.mark.parametrize("victim", [0, 1])
def test_those_left_by_a_host_say_so_within_seconds(victim, tmp_path):
    with Network(2) as network, pytest.raises(AssertionError, match="process ended"):
        run_new_ranks(_dies_in_training, 4, victim, tmp_path, hosts=network.hosts)
    told = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(told) == [["2", "3"], ["0", "1"]][victim], told
    for text in told.values():
        seconds, _, line = text.partition(" ")
        assert float(seconds) < 15 and f"(host{victim}, pid " in line and "ended" in line, text


def _goes_on(folder: Path, stage: int, turn: int) -> list[float]:
    subject = Sharded(models.build("llama"), adamw, stage)
    if turn:
        load_weights(subject.model, folder / f"checkpoint-{turn - 1}")
        load_state(subject.model, subject.optimizer, folder / f"checkpoint-{turn - 1}")
    losses = go_on(subject, "llama", 2 * turn, 2 * turn + 2)
    save_checkpoint(subject.model, subject.optimizer, folder / f"checkpoint-{turn}")
    return losses


@pytest.mark.full("slow")
def test_a_checkpoint_of_two_hosts_goes_on_on_one(tmp_path):
    unbroken = go_on(Sharded(models.build("llama"), adamw, 0), "llama", 0, 6)
    with Network(2) as network:
        found = run_new_ranks(_goes_on, 4, tmp_path, 3, 0, hosts=network.hosts)
        found += run_new_ranks(_goes_on, 4, tmp_path, 2, 1, hosts=network.hosts)
    found += run_ranks(_goes_on, 2, tmp_path, 1, 2)
    wanted = [unbroken[:2]] * 4 + [unbroken[2:4]] * 4 + [unbroken[4:]] * 2
    assert found == [pytest.approx(losses, rel=1e-4) for losses in wanted]


def _kind(folder: str | None = None) -> tuple[str, list[str]]:
    tempfile.tempdir = folder
    with logged("hf_zero.comm.world") as said:
        comm = connect(CPU, timeout_seconds=60.0, bucket_nbytes=2**20)
        values = comm.all_gather_vector(torch.tensor([dist.get_rank()])).flatten().tolist()
    assert values == list(range(comm.num_ranks))
    return type(comm).__name__, said


@pytest.mark.full("slow")
def test_hosts_of_one_name_are_told_apart():
    with Network(2, name="node") as network:
        assert run_new_ranks(_kind, 4, hosts=network.hosts) == [("PairwiseComm", [])] * 4


@pytest.mark.full("slow")
def test_containers_of_one_network_that_see_other_files_send_messages(tmp_path):
    """Two containers of one pod: one network, and temporary folders of their own."""
    with Network(1) as network:
        (host,) = network.hosts
        with network.container(host, hidden=tmp_path) as other:
            kinds = run_new_ranks(_kind, 2, str(tmp_path), hosts=[host, other])
    assert [name for name, _ in kinds] == ["PairwiseComm"] * 2
    assert len(kinds[0][1]) == 1 and "No such file or directory" in kinds[0][1][0]


# torchrun on two hosts, as docs/multi-node.md says


SCRIPT = """
import sys
import torch
from pathlib import Path
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback
from hf_zero import ZeroTrainer, ZeroTrainingArguments

class Began(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        Path(args.output_dir, "began").touch()

torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
model = BertForSequenceClassification(BertConfig(vocab_size=50, **sizes))
data = [{"input_ids": torch.arange(8) + i, "labels": torch.tensor(i % 2)} for i in range(16)]
folder, max_steps = sys.argv[1], int(sys.argv[2])
args = ZeroTrainingArguments(
    output_dir=folder, max_steps=max_steps, per_device_train_batch_size=2, report_to=[], save_steps=2, zero_stage=3
)
trainer = ZeroTrainer(model=model, args=args, train_dataset=data, callbacks=[Began()])
trainer.train()
trainer.save_model()
print(f"rank {args.process_index} of {args.world_size}, on machine process {args.local_process_index}")
"""


@pytest.fixture
def program(tmp_path) -> list[str]:
    """The script and the folder in which it saves, which all hosts see."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "out").mkdir()
    return [str(tmp_path / "train.py"), str(tmp_path / "out")]


@pytest.mark.full("slow")
def test_a_run_saves_its_model(program):
    with Network(2) as network:
        runs = network.torchrun([*program, "3"], num_ranks=2)
        said = [run.communicate(timeout=240)[0] for run in runs]
        assert [run.returncode for run in runs] == [0, 0], said
        for index, text in enumerate(said):
            for place in range(2):
                assert f"rank {2 * index + place} of 4, on machine process {place}" in text
        assert all(
            Path(program[1], name).is_file() for name in ("model.safetensors", "checkpoint-2/model.safetensors")
        )


@pytest.mark.full("slow")
def test_a_host_that_dies_ends_the_run_on_the_other_and_is_named(program):
    with Network(2) as network:
        runs = network.torchrun([*program, "100000"], num_ranks=2)
        deadline = time.monotonic() + 200
        while not Path(program[1], "began").exists():
            assert time.monotonic() < deadline and runs[0].poll() is None, runs[0].communicate()[0]
            time.sleep(0.2)
        begin = time.monotonic()
        network.hosts[1].kill_all()
        said, _ = runs[0].communicate(timeout=100)
        assert runs[0].returncode != 0
        assert "(host1, pid " in said and "ended; look at" in said, said
        assert time.monotonic() - begin < 40, "torchrun gives its ranks 30 seconds to leave"
