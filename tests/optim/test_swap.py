"""Masters and optimizer state in files: the same numbers as in memory, and little of them in memory at a time."""

import gc
import logging
import os
import shutil
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.engine import engine_of
from hf_zero.errors import ConfigError, StorageError
from hf_zero.storage import DiskBuffers, disk
from tests import models
from tests.distributed import run_ranks
from tests.training import Record, Sharded, adamw, assert_equal, loss_of, sgd, train


WINDOW_NUMEL = 2048  # several for each block of the tiny models


@contextmanager
def small_windows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "WINDOW_NUMEL", WINDOW_NUMEL)
        yield


def start(name: str, make, stage: int, folder: str | None, *, offload="optimizer", part=1.0, **settings) -> Sharded:
    """On disk, or with everything where the stage has it."""
    away = {"offload": offload, "offload_dir": folder, "offload_fraction": part} if folder else {}
    return Sharded(models.build(name), make, stage, **away, **settings)


def on_disk_and_in_memory(folder: str, make, stage: int, settings: dict, run) -> None:
    with small_windows():
        swapped = start("llama", make, stage, folder, **settings)
        found = run(swapped)
        assert_rest_on_disk(swapped)
        assert_equal(found, run(start("llama", make, stage, None, **settings)), f"stage {stage}, {settings}")
    assert not os.listdir(folder)


def assert_rest_on_disk(subject: Sharded) -> None:
    """Of masters and state on disk nothing is left in memory but numbers."""
    on_disk = [run for run in subject.optimizer.slices if run.flat.masters.on_disk is not None]
    assert on_disk
    for run in on_disk:
        state = subject.optimizer.state[run.param].values()
        tensors = [run.flat.master, run.param, *(value for value in state if isinstance(value, torch.Tensor))]
        assert all(tensor.untyped_storage().nbytes() <= 4 for tensor in tensors)


def trained(subject: Sharded) -> Record:
    return train(subject, "llama", num_steps=4)


def accumulated_in_backward(subject: Sharded) -> Record:
    """Two backward passes to a step, in the last of which units are updated as soon as they can be."""
    losses = []
    for step in range(4):
        for micro in range(2):
            loss = loss_of(subject(**models.batch("llama", seed=100 * step + 10 * micro + dist.get_rank())))
            if micro:
                with subject.optimizer.in_backward():
                    loss.backward()
            else:
                loss.backward()
            losses.append(loss.detach())
        subject.optimizer.step()
    return Record(torch.stack(losses), torch.zeros(0), subject.weights())


BF16, PARAMS = {"compute_dtype": torch.bfloat16}, {"offload": "params"}
CASES = {
    "AdamW": (adamw, {}, trained),
    "AdamW, bf16": (adamw, BF16, trained),
    "AdamW, fused": (partial(adamw, fused=True), {}, trained),
    "AdamW, in backward": (adamw, BF16, accumulated_in_backward),
    "AdamW, half of the model": (adamw, {"part": 0.5}, trained),
    "parameters": (adamw, PARAMS, trained),
    "parameters, bf16": (adamw, {**PARAMS, **BF16}, accumulated_in_backward),
    "parameters, half of the model": (adamw, {**PARAMS, "part": 0.5}, trained),
    "SGD without state": (sgd, {}, trained),
    "Adagrad": (lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2, eps=1e-4), {}, trained),
}


def each_case(folder: str, stage: int, names: list[str]) -> None:
    for name in names:
        make, settings, run = CASES[name]
        on_disk_and_in_memory(folder, make, stage, settings, run)


@pytest.mark.quick(cases=1)
@pytest.mark.support("On disk (`offload_dir`), bit-identical", area="Offload", stages=("optimizer",))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_from_disk_is_training_in_memory_bit_for_bit(tmp_path, stage):
    run_ranks(each_case, 2, str(tmp_path), stage, ["AdamW", "AdamW, bf16", "AdamW, in backward"])


@pytest.mark.support("On disk (`offload_dir`), bit-identical", area="Offload", stages=("params",))
def test_parameters_gathered_from_disk_are_those_in_memory(tmp_path):
    run_ranks(each_case, 2, str(tmp_path), 3, ["parameters", "parameters, bf16"])


@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("stage", "num_ranks"), [(0, 2), (1, 2), (2, 2), (3, 2), (3, 1)])
def test_other_ways_to_train_from_disk_are_the_same_too(tmp_path, stage, num_ranks, name):
    if stage == 3 or not name.startswith("parameters"):
        run_ranks(each_case, num_ranks, str(tmp_path), stage, [name])


def test_one_process_trains_from_disk(tmp_path):
    run_ranks(each_case, 1, str(tmp_path), 3, ["AdamW", "SGD without state", "Adagrad", "AdamW, half of the model"])


def switched(subject: Sharded) -> Record:
    """Experts that get gradients at some steps only: runs are divided, with state that lies on disk."""
    losses = []
    for step in range(5):
        routes = [step % 2 if step > 1 else 0, 0, dist.get_rank() if step == 1 else 0]
        loss = loss_of(subject(**models.batch("switch", seed=step), routes=routes))
        loss.backward()
        subject.optimizer.step()
        losses.append(loss.detach())
    return Record(torch.stack(losses), torch.zeros(0), subject.weights())


def train_switch(folder: str, stage: int) -> None:
    with small_windows():
        assert_equal(
            switched(start("switch", adamw, stage, folder)), switched(start("switch", adamw, stage, None)), ""
        )


def test_parameters_without_gradients_keep_state_of_their_own_on_disk(tmp_path):
    run_ranks(train_switch, 2, str(tmp_path), 3)


def count_bytes(folder: str) -> None:
    """A step reads and writes masters, first and second moments once: 12 bytes per element of the shard."""
    with small_windows():
        subject = start("llama", adamw, 2, folder)
        subject.engine.comm.counters.sent_nbytes.clear()
        train(subject, "llama", num_steps=3)
    counted = subject.engine.comm.counters.sent_nbytes
    shards = [flat.layout.shard_numel for unit in subject.engine.units for flat in unit.flats]
    exact, file_nbytes = 12 * sum(shards), subject.engine.disk.nbytes
    # each of a flat buffer's three tensors ends within a page
    assert exact <= file_nbytes <= exact + len(shards) * 3 * 4096
    assert counted["disk write"] == 3 * file_nbytes
    # what comes first in the next step is read ahead at the end of this one
    assert 0 <= counted["disk read"] - 3 * file_nbytes <= 3 * 4 * WINDOW_NUMEL


def test_a_step_reads_and_writes_every_byte_once(tmp_path):
    run_ranks(count_bytes, 2, str(tmp_path))


def memory_of(folder: str, offload: str, num_layers: int) -> tuple[int, int]:
    """Bytes of the buffers in the host's memory through which the disk is read and written, and of the file."""
    model = models.llama(layers=num_layers)
    subject = Sharded(model, adamw, 3, offload=offload, offload_dir=folder, compute_dtype=torch.bfloat16)
    train(subject, "llama", num_steps=2)
    engine, flats = subject.engine, [flat for unit in subject.engine.units for flat in unit.flats]
    gc.collect()
    others = sum(tensor.nbytes for tensor in [g.reduced for g in engine.gradients] if engine.bus.holds(tensor))
    host_transfer = flats[0].masters.transfer
    others += host_transfer._going_up.nbytes + host_transfer._going_down.nbytes
    assert (
        all(not engine.bus.holds(shard.values) for flat in flats if (shard := flat.compute_shard))
        or offload == "optimizer"
    )
    return engine.bus.host_nbytes - others, engine.disk.nbytes


def count_memory(folder: str) -> None:
    window = 3 * 4 * WINDOW_NUMEL  # of masters and two moments: one used, one read, one written
    with small_windows():
        for offload in ("optimizer", "params"):
            small, small_file = memory_of(folder, offload, 3)
            large, large_file = memory_of(folder, offload, 18)
            assert large_file > 3 * small_file
            assert small == large, f"{offload}: {small} and {large}"
            # and one for a bf16 copy on its way to the disk; three for those of a block's shard on their way back
            extra = window + 3 * 4096 * 4 if offload == "params" else 0
            assert 3 * window <= large <= 3 * window + extra, f"{offload}: {large}"


def test_the_hosts_memory_does_not_grow_with_the_model(tmp_path):
    run_ranks(count_memory, 2, str(tmp_path))


def freeze_and_train(folder: str) -> None:
    """Frozen parameters rest on disk too, and are gathered from there."""

    def make(model):
        for name, param in model.named_parameters():
            param.requires_grad = "mlp" in name
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-4)

    def build():
        model = models.build("llama")
        make(model)
        return model

    with small_windows():
        records = []
        for away in ({"offload": "params", "offload_dir": folder}, {}):
            model = build()
            engine = engine_of(hf_zero.shard(model, stage=3, compute_dtype=torch.bfloat16, **away))
            optimizer = hf_zero.ShardedOptimizer(engine, make(model))
            losses = []
            for step in range(3):
                loss = loss_of(model(**models.batch("llama", seed=step)))
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            records.append(losses)
            assert not away or all(flat.masters.on_disk is not None for unit in engine.units for flat in unit.flats)
    assert all(torch.equal(*pair) for pair in zip(*records))


def test_frozen_parameters_rest_on_disk_too(tmp_path):
    run_ranks(freeze_and_train, 2, str(tmp_path))


def count_read_ahead(folder: str) -> None:
    """Blocks are being read already when they are gathered."""
    model = models.llama(layers=6)
    hf_zero.shard(model, stage=3, offload="params", offload_dir=folder)
    was_ahead, real = [], DiskBuffers.load

    def load(self, record, **how):
        was_ahead.append(self._is_ahead(record))
        return real(self, record, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskBuffers, "load", load)
        loss = loss_of(model(**models.batch("llama", seed=0)))
        # the root; then the blocks, of which the second is gathered as soon as the first is
        assert was_ahead[-6:] == [True, False, True, True, True, True], was_ahead
        was_ahead.clear()
        loss.backward()
        assert was_ahead == [True] * 4, was_ahead  # the last two were still there


def test_blocks_are_read_ahead_of_their_gather(tmp_path):
    run_ranks(count_read_ahead, 2, str(tmp_path))


def go_on(subject: Sharded, first: int, last: int) -> list[torch.Tensor]:
    losses = []
    for step in range(first, last):
        loss = loss_of(subject(**models.batch("llama", seed=step)))
        loss.backward()
        subject.optimizer.step()
        losses.append(loss.detach())
    return losses


def resume(folder: str, stage: int, dtype: torch.dtype | None) -> None:
    """A run that goes from disk to memory and back to disk, at other stages, beside one that stays in memory.

    The checkpoint of the run on disk is written in the background, while it goes on.
    """
    settings = {"compute_dtype": dtype}
    plain = start("llama", adamw, stage, None, **settings)
    unbroken = go_on(plain, 0, 9)
    chain = [(stage, True), (3 - stage % 3, False), (2, True)]
    with small_windows():
        for turn, (own_stage, swaps) in enumerate(chain):
            swap_dir = Path(folder) / "swap" if swaps else None
            subject = start("llama", adamw, own_stage, swap_dir, **settings)
            if turn:
                hf_zero.load_weights(subject.engine, f"{folder}/{turn - 1}")
                hf_zero.load_state(subject.engine, subject.optimizer, f"{folder}/{turn - 1}")
            losses = go_on(subject, 3 * turn, 3 * turn + 3)
            assert all(torch.equal(a, b) for a, b in zip(losses, unbroken[3 * turn :])), f"turn {turn}: {losses}"
            saving = hf_zero.save_checkpoint(
                subject.engine,
                subject.optimizer,
                f"{folder}/{turn}",
                step=turn,
                background=hf_zero.Snapshots() if swaps else None,
            )
            if swaps:  # what is updated meanwhile does not get into the checkpoint
                go_on(subject, 100, 102)
                saving.wait()


@pytest.mark.parametrize(("stage", "dtype"), [(3, None), (1, torch.bfloat16)])
def test_a_run_resumes_from_disk_in_memory_and_back(tmp_path, stage, dtype):
    (tmp_path / "swap").mkdir()
    run_ranks(resume, 2, str(tmp_path), stage, dtype)


def write_and_give_back(folder: str, stage: int) -> None:
    """What is written through `gathered` gets to the disk, and `unshard` takes everything from there."""
    with small_windows():
        subjects = [start("llama", adamw, stage, where) for where in (folder, None)]
        for subject in subjects:
            go_on(subject, 0, 1)
            with hf_zero.gathered(subject.model.lm_head.weight, writeback=True):
                subject.model.lm_head.weight.data.mul_(1.5)
            go_on(subject, 1, 3)
            hf_zero.ShardedModel(subject.engine).unshard()
    for (name, ours), (_, wanted) in zip(*(subject.model.named_parameters() for subject in subjects)):
        assert torch.equal(ours, wanted), name


@pytest.mark.parametrize("stage", [2, 3])
def test_masters_on_disk_follow_what_is_written_and_are_given_back(tmp_path, stage):
    run_ranks(write_and_give_back, 2, str(tmp_path), stage)


def test_optimizers_that_need_all_masters_at_a_time_are_refused(tmp_path):
    engine = hf_zero.shard(models.build("mlp"), stage=3, offload="optimizer", offload_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="^offload_dir: Adafactor needs all masters at once; use"):
        hf_zero.ShardedOptimizer(engine, torch.optim.Adafactor)


class Stacked(torch.optim.SGD):
    """Keeps two averages of each element in one tensor, as AdEMAMix does."""

    elementwise = True

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["averages"] = torch.stack([p.grad, p.grad])


def test_optimizers_that_stack_their_state_are_refused(tmp_path):
    engine = hf_zero.shard(models.build("mlp"), stage=3, offload="optimizer", offload_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="^offload_dir: Stacked stacks several values per element in one state"):
        hf_zero.ShardedOptimizer(engine, Stacked, lr=0.1)


class Switched(torch.optim.SGD):
    """Has other parameters to evaluate than to train, as schedule-free optimizers do."""

    elementwise = True

    def eval(self):
        raise NotImplementedError


def test_optimizers_that_switch_all_parameters_at_once_are_refused(tmp_path):
    engine = hf_zero.shard(models.build("mlp"), stage=3, offload="optimizer", offload_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="^offload_dir: Switched needs all masters at once; us"):
        hf_zero.ShardedOptimizer(engine, Switched, lr=0.1)


def load_from_files(folder: str) -> None:
    """Every rank reads its part of a pretrained model, piece by piece, from files into files."""
    from transformers import AutoModelForCausalLM

    if dist.get_rank() == 0:
        models.build("llama", seed=3).save_pretrained(f"{folder}/model")
    dist.barrier()
    with small_windows():
        model = hf_zero.load_pretrained(AutoModelForCausalLM, f"{folder}/model")
        where = {"offload": "params", "offload_dir": folder}
        hf_zero.shard(model, stage=3, compute_dtype=torch.bfloat16, **where)
        wanted = dict(models.build("llama", seed=3).named_parameters())
        with hf_zero.gathered(model):
            for name, param in model.named_parameters():
                assert torch.equal(param, wanted[name].bfloat16()), name


def test_pretrained_weights_are_read_into_files(tmp_path):
    run_ranks(load_from_files, 2, str(tmp_path))


def test_a_disk_without_room_for_the_state_is_refused_before_the_first_step(tmp_path, monkeypatch):
    settings = {"stage": 2, "offload": "optimizer", "offload_dir": str(tmp_path)}
    engine = hf_zero.shard(models.build("mlp"), **settings)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    message = r"^offload_dir .* but only 100 bytes are free .*; free space, set another offload_dir"
    with pytest.raises(StorageError, match=message):
        hf_zero.ShardedOptimizer(engine, torch.optim.AdamW)
    with pytest.raises(StorageError, match=message):
        hf_zero.shard(models.build("mlp"), **settings)
    with pytest.raises(StorageError, match="none: rank 0 does not see this folder; create it on every host"):
        hf_zero.shard(models.build("mlp"), **settings | {"offload_dir": str(tmp_path / "none")})


def test_a_write_that_fails_in_a_step_is_raised_by_it_or_by_the_next(tmp_path, monkeypatch):
    model = models.build("mlp")
    engine = hf_zero.shard(model, stage=2, offload="optimizer", offload_dir=str(tmp_path))
    optimizer = hf_zero.ShardedOptimizer(engine, torch.optim.AdamW)

    def refused(*where):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwritev", refused)
    with pytest.raises(
        StorageError, match="rank 0.: writing .* bytes failed .Input/output error. and the offloaded state is"
    ):
        for seed in range(2):
            model(**models.batch("mlp", seed=seed)).backward()
            optimizer.step()


def test_what_rests_on_disk_is_told(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="hf_zero"):
        engine = hf_zero.shard(models.build("mlp"), stage=2, offload="optimizer", offload_dir=str(tmp_path))
        hf_zero.ShardedOptimizer(engine, torch.optim.AdamW)
    assert f"offload_dir {tmp_path} (rank 0): stores 0.00 GB of masters and optimizer state" in caplog.text
