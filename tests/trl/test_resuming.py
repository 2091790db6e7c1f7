"""Answers that further steps train on, in checkpoints: whatever is logged with them, and wherever they are read."""

from collections import defaultdict, deque
from types import SimpleNamespace

import numpy
import pytest
import torch


pytest.importorskip("trl")

from hf_zero.checkpoint.manifest import STATE_FOLDER
from hf_zero.trl import ZeroGRPOTrainer
from hf_zero.trl.resuming import GENERATED, ResumingTrlMixin


SHARED = {"every": 4, "rows": 2, "ranks": 1}


class _Trainer(ZeroGRPOTrainer):
    _engine = None  # a property of the class


def trainer(*, device: str = "cpu", others: tuple = ()):
    """What `ResumingTrlMixin` looks at in a trainer; `others` are what the other ranks say."""
    made = _Trainer.__new__(_Trainer)
    sizes = {"steps_per_generation": 2, "per_device_train_batch_size": 2, "world_size": 1}
    made.args = SimpleNamespace(**sizes, gradient_accumulation_steps=2, process_index=0, should_log=True)
    made.accelerator = SimpleNamespace(device=torch.device(device))
    made._engine = SimpleNamespace(comm=SimpleNamespace(all_gather_object=lambda own, what: [own, *others]))
    made.num_iterations, made._step, made._is_vlm, made._buffered_inputs = 2, 0, False, None
    logs = ("prompt", "completion", "advantages")
    made._logs = {name: deque(maxlen=8) for name in logs}
    made._logs.update({name: defaultdict(lambda: deque(maxlen=8)) for name in ("rewards", "extra")})
    return made


def saved(folder, answers: int = 6, completion: str = "a bytearray") -> list:
    """Saves answers in the midst of the steps that share them, and returns them."""
    made = trainer()
    made._buffered_inputs = [{"ids": torch.arange(answers) + step, "images": None} for step in range(2)]
    made._logs["completion"].append(completion)
    made._logs["prompt"].append([{"role": "user", "content": "why"}])
    made._logs["rewards"]["variety"].append(0.1)
    made._logs["extra"]["score"].extend([numpy.float32(2.5), torch.tensor(3), object(), None])
    (folder / STATE_FOLDER).mkdir()
    made._save_generated(folder / STATE_FOLDER / GENERATED.format(0))
    return made._buffered_inputs


def test_answers_come_back_with_whatever_was_logged(tmp_path):
    answers, resumed = saved(tmp_path), trainer()
    resumed._go_on_with_generated(str(tmp_path), 6, SHARED)
    assert resumed._step == 6
    assert all(torch.equal(one["ids"], two["ids"]) for one, two in zip(resumed._buffered_inputs, answers, strict=True))
    logs = resumed._logs
    assert list(logs["completion"]) == ["a bytearray"] and logs["prompt"][0][0]["content"] == "why"
    assert list(logs["rewards"]["variety"]) == [0.1]
    *numbers, thing, absent = logs["extra"]["score"]
    assert numbers == [2.5, 3] and thing.startswith("<object") and absent is None


def test_answers_come_back_to_the_device_that_trains(tmp_path):
    saved(tmp_path)
    resumed = trainer(device="meta")
    resumed._go_on_with_generated(str(tmp_path), 6, SHARED)
    assert {inputs["ids"].device.type for inputs in resumed._buffered_inputs} == {"meta"}


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "objects": lambda path: torch.save({"inputs": [SimpleNamespace()], "logs": "{}"}, path),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_answers_that_cannot_be_read_are_generated_anew(tmp_path, caplog, damage):
    saved(tmp_path)
    DAMAGES[damage](tmp_path / STATE_FOLDER / GENERATED.format(0))
    resumed = trainer()
    resumed._go_on_with_generated(str(tmp_path), 6, SHARED)
    assert resumed._buffered_inputs is None and not resumed._logs["completion"] and resumed._step == 6
    assert "generate new ones" in caplog.text and str(tmp_path) in caplog.text


def test_all_ranks_generate_anew_where_one_cannot_read(tmp_path, caplog):
    saved(tmp_path)
    resumed = trainer(others=(("generated_1.pt: cannot be read", None, False),))
    resumed._go_on_with_generated(str(tmp_path), 6, SHARED)
    assert resumed._buffered_inputs is None and not resumed._logs["completion"]
    assert "generated_1.pt: cannot be read" in caplog.text


def test_a_trainer_that_keeps_answers_in_another_way_is_left_to_itself():
    made = ResumingTrlMixin.__new__(ResumingTrlMixin)
    made._buffered_inputs, made._buffer_step = None, 0
    assert made._generation() is None
