"""One check for adapters of any kind: trained, saved, loaded by PEFT and resumed at every stage, beside Trainer."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import hf_zero
from hf_zero.engine import engine_of
from tests import models
from tests.compare import assert_equal, weights_of
from tests.trainer.harness import PLAIN, Rows, Run, assert_close, assert_learned, make, record, seed_everything, train


class TaskRows(Rows):
    """Rows that say which task they belong to, as adapters for several tasks want it."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**self.rows[index], "task_ids": torch.tensor(index % 2)}


def check_adapter(
    folder: str,
    base: str,
    adapt: Callable[[nn.Module], nn.Module],
    *,
    data=None,
    all_used: bool = True,
    loads: bool = True,
    **settings,
) -> dict[int, Run]:
    """Returns the runs of the stages. To be run on 2 ranks.

    Args:
        folder (`str`): for checkpoints.
        base (`str`): one of `tests.models`.
        adapt (`Callable`): puts the adapter on it; the same each time.
        data: rows to train on, instead of the base's.
        all_used (`bool`): every parameter of the adapter gets a gradient.
        loads (`bool`): PEFT loads what it has saved.
        settings: for the trainer.
    """
    data = Rows(base) if data is None else data
    settings = {"learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 2, **settings}
    settings["ddp_find_unused_parameters"] = not all_used
    plain = train(PLAIN, f"{folder}/plain", data=data, model=adapt(models.build(base)), **settings)
    assert_learned(plain)
    start, runs = weights_of(adapt(models.build(base))), {}
    for stage in (1, 2, 3):
        seed_everything()
        model = adapt(models.build(base))
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        trainer = make(stage, f"{folder}/{stage}", model, data, **settings)
        trainer.train()
        run = runs[stage] = record(trainer)
        assert_close(run, plain, f"stage {stage} and Trainer")
        assert any(not torch.equal(run.weights[name], start[name]) for name in trained), "nothing was learned"
        assert all(torch.equal(run.weights[name], start[name]) for name in start.keys() - trained), "the base changed"
        assert_memory(trainer, stage, all_used)
        if loads:
            _assert_loads(f"{folder}/{stage}/checkpoint-4", base, trainer.model, run, trained)

        again = adapt(models.build(base))
        resumed = train(
            stage, f"{folder}/{stage}", data=data, model=again, resume=f"{folder}/{stage}/checkpoint-2", **settings
        )
        assert_equal(resumed, run, f"stage {stage}: resumed and unbroken")
    return runs


def assert_memory(trainer, stage: int, all_used: bool = True) -> None:
    """Gradients and optimizer state are those of what is trained, and of nothing else: this rank's part of Adam's two
    fp32 moments, and a gradient that is whole at stage 1 and given back after the step beyond. Padding is extra: each
    buffer ends at a multiple of 32 elements, and each parameter at one of 16."""
    engine, report = engine_of(trainer.model), trainer.memory_report()
    flats = [flat for unit in engine.units for flat in unit.flats if flat.trainable]
    numel = sum(p.numel() for flat in flats for p in flat.params)
    padding = sum(16 * len(flat.params) + 32 for flat in flats)
    assert numel == sum(p.numel() for p in engine.model.parameters() if p.requires_grad)
    moments = 2 * 4 * numel // engine.comm.num_ranks
    assert moments * all_used <= report.optimizer_nbytes <= moments + 4 * padding
    assert report.gradient_nbytes <= (4 * (numel + padding) if stage == 1 else 0)


def _assert_loads(folder: str, base: str, model: nn.Module, run: Run, trained: set[str]) -> None:
    """The folder is one that PEFT itself loads, with the very same tensors."""
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(models.build(base), folder)
    own = dict(loaded.named_parameters())
    if model.peft_config["default"].is_prompt_learning:
        own = {name: p for name, p in own.items() if not name.startswith("prompt_encoder.")}
        with hf_zero.gathered(model.prompt_encoder), torch.no_grad():
            wanted = model.get_prompt_embedding_to_save("default")
        assert torch.equal(loaded.prompt_encoder["default"].embedding.weight, wanted), "learned prompts"
    else:
        assert own.keys() & trained
    for name in own.keys() & run.weights.keys():
        assert torch.equal(own[name], run.weights[name]), f"{name} as PEFT loads it"
