"""Masters and optimizer state in files: the same numbers as in memory, and little of them in memory at a time."""

import gc
import os
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero import storage
from hf_zero.errors import ConfigError, StorageError
from hf_zero.storage import DiskBuffers
from tests import models
from tests.compare import assert_equal
from tests.distributed import ranks, run_ranks
from tests.engine.test_failures import Switched
from tests.tiers import in_core
from tests.training import Record, Sharded, adamw, go_on, loss_of, sgd, train, train_in_backward


WINDOW_NUMEL = 2048  # several for each block of the tiny models


@contextmanager
def small_windows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "WINDOW_NUMEL", WINDOW_NUMEL)
        yield


class Case(NamedTuple):
    """One training, with the settings of `hf_zero.shard`; of a model in which all but the MLPs may be frozen."""

    run: Callable[[Sharded], Record]
    settings: dict[str, Any] = {}
    make: Callable = adamw
    name: str = "llama"
    freezes: bool = False


def start(case: Case, stage: int, folder: str | None, **more) -> Sharded:
    """On disk, or with everything where the stage has it."""
    settings = {"offload": "optimizer", **case.settings, **more}
    away = {name: settings.pop(name) for name in ("offload", "offload_fraction") if name in settings}
    model = models.build(case.name)
    if case.freezes:
        for name, param in model.named_parameters():
            param.requires_grad = "mlp" in name
    return Sharded(model, case.make, stage, **({**away, "offload_dir": folder} if folder else {}), **settings)


def on_disk_and_in_memory(folder: str, name: str, stage: int) -> None:
    case = CASES[name]
    with small_windows():
        swapped = start(case, stage, folder)
        found = case.run(swapped)
        assert_rest_on_disk(swapped)
        assert_equal(found, case.run(start(case, stage, None)), f"stage {stage}, {name}")
    assert not os.listdir(folder)


def assert_rest_on_disk(subject: Sharded) -> None:
    """Of masters and state on disk nothing is left in memory but numbers."""
    config, flats = subject.engine.config, [flat for unit in subject.engine.units for flat in unit.flats]
    if config.offload == "params" and config.offload_fraction == 1:
        assert all(flat.masters.on_disk is not None for flat in flats), "frozen ones too"
    on_disk = [run for run in subject.optimizer.slices if run.flat.masters.on_disk is not None]
    assert on_disk
    for run in on_disk:
        state = subject.optimizer.state[run.param].values()
        tensors = [run.flat.masters.values, run.param, *(value for value in state if isinstance(value, torch.Tensor))]
        assert all(tensor.untyped_storage().nbytes() <= 4 for tensor in tensors)


def trained(subject: Sharded) -> Record:
    return train(subject, "llama", num_steps=4)


def accumulated_in_backward(subject: Sharded) -> Record:
    return train_in_backward(subject, "llama", num_steps=4)


def switched(subject: Sharded) -> Record:
    """Experts that get gradients at some steps only: runs are divided, with state that lies on disk."""

    def routes(step: int, rank: int) -> dict:
        return {"routes": [step % 2 if step > 1 else 0, 0, rank if step == 1 else 0]}

    return train(subject, "switch", num_steps=5, max_norm=None, more=routes)


BF16, PARAMS, HALF = {"compute_dtype": torch.bfloat16}, {"offload": "params"}, {"offload_fraction": 0.5}
CASES = {
    "AdamW": Case(trained),
    "AdamW, bf16": Case(trained, BF16),
    "AdamW, fused": Case(trained, make=partial(adamw, fused=True)),
    "AdamW, in backward": Case(accumulated_in_backward, BF16),
    "AdamW, half of the model": Case(trained, HALF),
    "AdamW, experts": Case(switched, name="switch"),
    "parameters": Case(trained, PARAMS),
    "parameters, bf16": Case(accumulated_in_backward, {**PARAMS, **BF16}),
    "parameters, half of the model": Case(trained, {**PARAMS, **HALF}),
    "parameters, most of them frozen": Case(trained, {**PARAMS, **BF16}, freezes=True),
    "SGD without state": Case(trained, make=sgd),
    "Adagrad": Case(trained, make=lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2, eps=1e-4)),
}
ADAMW = ["AdamW", "AdamW, bf16", "AdamW, in backward"]
WAYS = [(stage, num_ranks, name) for stage, num_ranks in ((0, 2), (1, 2), (2, 2), (3, 2), (3, 1)) for name in CASES]
CORE = [
    *[(stage, 2, name) for stage in (1, 2, 3) for name in ADAMW],
    *[
        (3, 2, name)
        for name in ("AdamW, experts", "parameters", "parameters, bf16", "parameters, most of them frozen")
    ],
    *[(3, 1, name) for name in ("AdamW", "SGD without state", "Adagrad", "AdamW, half of the model")],
]


@pytest.mark.quick(cases=1)
@pytest.mark.support("On disk (`offload_dir`), bit-identical", area="Offload", stages=("optimizer", "params"))
@pytest.mark.parametrize(
    "stage, num_ranks, name",
    in_core(CORE, [way for way in WAYS if way[0] == 3 or not way[2].startswith("parameters")]),
)
def test_training_from_disk_is_training_in_memory_bit_for_bit(tmp_path, stage, num_ranks, name):
    run_ranks(on_disk_and_in_memory, num_ranks, str(tmp_path), name, stage)


@ranks(2)
def test_a_step_reads_and_writes_every_byte_once(tmp_path):
    """A step reads and writes masters, first and second moments once: 12 bytes per element of the shard."""
    with small_windows():
        subject = start(CASES["AdamW"], 2, str(tmp_path))
        subject.engine.comm.counters.sent_nbytes.clear()
        train(subject, "llama", num_steps=3)
        subject.engine.disk.file._thread.submit(int).result()
    counted = subject.engine.comm.counters.sent_nbytes
    shards = [flat.layout.shard_numel for unit in subject.engine.units for flat in unit.flats]
    exact, file_nbytes = 12 * sum(shards), subject.engine.disk.file.nbytes
    # each of a flat buffer's three tensors ends within a page
    assert exact <= file_nbytes <= exact + len(shards) * 3 * 4096
    assert counted["disk write"] == 3 * file_nbytes
    # what comes first in the next step is read ahead at the end of this one
    assert 0 <= counted["disk read"] - 3 * file_nbytes <= 3 * 4 * WINDOW_NUMEL


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
    return engine.bus.host_nbytes - others, engine.disk.file.nbytes


@ranks(2)
def test_the_hosts_memory_does_not_grow_with_the_model(tmp_path):
    window = 3 * 4 * WINDOW_NUMEL  # of masters and two moments: one used, one read, one written
    with small_windows():
        for offload in ("optimizer", "params"):
            small, small_file = memory_of(tmp_path, offload, 3)
            large, large_file = memory_of(tmp_path, offload, 18)
            assert large_file > 3 * small_file
            assert small == large, f"{offload}: {small} and {large}"
            # and one for a bf16 copy on its way to the disk; three for those of a block's shard on their way back
            extra = window + 3 * 4096 * 4 if offload == "params" else 0
            assert 3 * window <= large <= 3 * window + extra, f"{offload}: {large}"


@ranks(2)
def test_blocks_are_read_ahead_of_their_gather(tmp_path):
    """Blocks are being read already when they are gathered."""
    model = models.llama(layers=6)
    hf_zero.shard(model, stage=3, offload="params", offload_dir=tmp_path)
    was_ahead, real = [], DiskBuffers._load

    def load(self, record):
        was_ahead.append(self._ahead is not None and self._ahead[0] == record)
        return real(self, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskBuffers, "_load", load)
        loss = loss_of(model(**models.batch("llama", seed=0)))
        # the root; then the blocks, of which the second is gathered as soon as the first is
        assert was_ahead[-6:] == [True, False, True, True, True, True], was_ahead
        was_ahead.clear()
        loss.backward()
        assert was_ahead == [True] * 4, was_ahead  # the last two were still there


def resume(folder: str, stage: int, dtype: torch.dtype | None) -> None:
    """A run that goes from disk to memory and back to disk, at other stages, beside one that stays in memory.

    The checkpoint of the run on disk is written in the background, while it goes on.
    """
    case, settings = CASES["AdamW"], {"compute_dtype": dtype}
    plain = start(case, stage, None, **settings)
    unbroken = go_on(plain, "llama", 0, 9)
    chain = [(stage, True), (3 - stage % 3, False), (2, True)]
    with small_windows():
        for turn, (own_stage, swaps) in enumerate(chain):
            subject = start(case, own_stage, f"{folder}/swap" if swaps else None, **settings)
            if turn:
                hf_zero.load_weights(subject.engine, f"{folder}/{turn - 1}")
                hf_zero.load_state(subject.engine, subject.optimizer, f"{folder}/{turn - 1}")
            losses = go_on(subject, "llama", 3 * turn, 3 * turn + 3)
            assert losses == unbroken[3 * turn : 3 * turn + 3], f"turn {turn}"
            background = hf_zero.Snapshots() if swaps else None
            where = f"{folder}/{turn}"
            saving = hf_zero.save_checkpoint(
                subject.engine, subject.optimizer, where, step=turn, background=background
            )
            if swaps:  # what is updated meanwhile does not get into the checkpoint
                go_on(subject, "llama", 100, 102)
                saving.wait()


@pytest.mark.parametrize(("stage", "dtype"), [(3, None), (1, torch.bfloat16)])
def test_a_run_resumes_from_disk_in_memory_and_back(tmp_path, stage, dtype):
    (tmp_path / "swap").mkdir()
    run_ranks(resume, 2, str(tmp_path), stage, dtype)


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_masters_on_disk_follow_what_is_written_and_are_given_back(tmp_path, stage):
    """What is written through `gathered` gets to the disk, and `unshard` takes everything from there."""
    with small_windows():
        subjects = [start(CASES["AdamW"], stage, where and str(where)) for where in (tmp_path, None)]
        for subject in subjects:
            go_on(subject, "llama", 0, 1)
            with hf_zero.gathered(subject.model.lm_head.weight, writeback=True):
                subject.model.lm_head.weight.data.mul_(1.5)
            go_on(subject, "llama", 1, 3)
            hf_zero.ShardedModel(subject.engine).unshard()
    for (name, ours), (_, wanted) in zip(*(subject.model.named_parameters() for subject in subjects)):
        assert torch.equal(ours, wanted), name


class Stacked(torch.optim.SGD):
    """Keeps two averages of each element in one tensor, as AdEMAMix does."""

    elementwise = True

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["averages"] = torch.stack([p.grad, p.grad])


@pytest.mark.parametrize(
    "make, reason",
    [
        (torch.optim.Adafactor, "Adafactor needs all masters at once; use"),
        (Stacked, "Stacked stacks several values per element in one state"),
        (Switched, "Switched needs all masters at once; us"),
    ],
)
def test_optimizers_that_cannot_be_updated_window_by_window_are_refused(make, reason, tmp_path):
    engine = hf_zero.shard(models.build("mlp"), stage=3, offload="optimizer", offload_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=f"^offload_dir: {reason}"):
        hf_zero.ShardedOptimizer(engine, make, lr=0.1)


@ranks(2)
def test_pretrained_weights_are_read_into_files(tmp_path):
    """Every rank reads its part of a pretrained model, piece by piece, from files into files."""
    from transformers import AutoModelForCausalLM

    if dist.get_rank() == 0:
        models.build("llama", seed=3).save_pretrained(f"{tmp_path}/model")
    dist.barrier()
    with small_windows():
        model = hf_zero.load_pretrained(AutoModelForCausalLM, f"{tmp_path}/model")
        where = {"offload": "params", "offload_dir": tmp_path}
        hf_zero.shard(model, stage=3, compute_dtype=torch.bfloat16, **where)
        wanted = dict(models.build("llama", seed=3).named_parameters())
        with hf_zero.gathered(model):
            for name, param in model.named_parameters():
                assert torch.equal(param, wanted[name].bfloat16()), name


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
        StorageError, match="rank 0.: a disk write failed .Input/output error. and the offloaded state is"
    ):
        for seed in range(2):
            model(**models.batch("mlp", seed=seed)).backward()
            optimizer.step()
