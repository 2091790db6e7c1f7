"""Lightning's Trainer over sharded modules. CI has no Lightning: `pip install lightning`, and all of it runs."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hf_zero
from hf_zero.errors import CheckpointError, ConfigError
from tests.distributed import ranks


needs_lightning = pytest.mark.skipif(find_spec("lightning") is None, reason="needs Lightning: pip install lightning")
# The loss of a rank's batch, about 4, in fp32 over some steps of Adam; seen: 5e-7.
ROUNDING = 1e-5


def test_without_lightning_the_import_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.pytorch.strategies", None)
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "hf_zero.lightning", raising=False)
    with pytest.raises(ImportError, match="hf_zero.lightning: requires Lightning.*pip install lightning"):
        import hf_zero.lightning  # noqa: F401


def make_module() -> nn.Module:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
            self.head = nn.Linear(16, 1)
            self.register_buffer("scale", torch.tensor(2.0))
            self.losses, self.evaluated = [], []

        def loss(self, batch):
            (hidden,) = batch
            wanted = hidden.sum(1, keepdim=True)
            for block in self.blocks:
                hidden = torch.relu(block(hidden))
            return (self.head(hidden) * self.scale - wanted).square().mean()

        def training_step(self, batch, index):
            loss = self.loss(batch)
            self.losses.append(float(loss))
            return loss

        def validation_step(self, batch, index):
            self.evaluated.append(float(self.loss(batch)))

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    torch.manual_seed(0)
    return Module()


def make_data() -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(32, 16, generator=torch.Generator().manual_seed(0))), batch_size=4)


def make_trainer(strategy, folder: str, **settings):
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    return pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        plugins=[TorchElasticEnvironment()],
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        **{"max_epochs": 3, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2, **settings},
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def as_launched():
    """What torchrun sets, and Lightning asks for."""
    rank, num_ranks = str(dist.get_rank()), str(dist.get_world_size())
    return mock.patch.dict(os.environ, {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "GROUP_RANK": "0"})


def fit(strategy, folder: str, ckpt_path: str | None = None, **settings) -> nn.Module:
    module = make_module()
    with as_launched():
        make_trainer(strategy, folder, **settings).fit(module, make_data(), make_data(), ckpt_path=ckpt_path)
    return module


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    with hf_zero.gathered(module):
        return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.full("more cases", after=2)
@needs_lightning
@pytest.mark.parametrize("stage, num_ranks", [(1, 2), (2, 2), (3, 2), (3, 1)])
@ranks("num_ranks", timeout=240)
def test_a_run_is_that_of_ddp_and_resumes_bit_for_bit(tmp_path, stage, num_ranks):
    from lightning.pytorch.strategies import DDPStrategy

    from hf_zero.lightning import ZeroStrategy

    wanted, module = fit(DDPStrategy(), f"{tmp_path}/ddp"), fit(ZeroStrategy(stage=stage), f"{tmp_path}/zero")
    assert module.losses == pytest.approx(wanted.losses, abs=ROUNDING) and len(module.losses) == len(wanted.losses)
    assert module.evaluated == pytest.approx(wanted.evaluated, abs=ROUNDING)
    assert [len(p) for p in module.parameters()] == [len(p) for p in wanted.parameters()]
    last = values(module)
    saved = load_file(f"{tmp_path}/zero/epoch=2.ckpt/model.safetensors")
    assert saved.keys() == last.keys() and all(torch.equal(saved[name], last[name]) for name in saved)

    resumed = fit(ZeroStrategy(stage=stage), f"{tmp_path}/resumed", f"{tmp_path}/zero/epoch=0.ckpt")
    assert resumed.losses == module.losses[len(module.losses) // 3 :]
    assert all(torch.equal(value, last[name]) for name, value in values(resumed).items())
    with as_launched():
        trainer, evaluated = make_trainer(ZeroStrategy(stage=stage), tmp_path), make_module()
        trainer.validate(evaluated, make_data(), ckpt_path=f"{tmp_path}/zero/epoch=2.ckpt")
    assert evaluated.evaluated == module.evaluated[-len(evaluated.evaluated) :]


@needs_lightning
@ranks(1)
def test_what_cannot_work_is_refused_in_one_line(tmp_path):
    from hf_zero.lightning import ZeroStrategy

    Path(tmp_path, "other.ckpt").touch()
    with pytest.raises(CheckpointError, match="other.ckpt: is not a folder of ZeroStrategy"):
        fit(ZeroStrategy(), tmp_path, f"{tmp_path}/other.ckpt")
    several = lambda self: [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.blocks, self.head)]  # noqa: E731
    module = make_module()
    module.automatic_optimization = False  # else Lightning refuses them
    trainer = make_trainer(ZeroStrategy(), tmp_path, gradient_clip_val=None, accumulate_grad_batches=1)
    with as_launched(), mock.patch.object(type(module), "configure_optimizers", several):
        with pytest.raises(ConfigError, match="configure_optimizers: returns 2 optimizers"):
            trainer.fit(module, make_data())
