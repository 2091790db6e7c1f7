"""What a run on two ranks leaves, and how it goes on after Ctrl-C."""

import json
import os
import re
import signal
import time
from multiprocessing.process import BaseProcess
from unittest import mock

import pytest
import yaml
from safetensors.torch import load_file

from hf_zero.recipes.output_dir import read_run
from hf_zero.recipes.run_config import RunConfig
from tests.distributed import ranks, run_ranks, start_program
from tests.output import without_imports
from tests.recipes.ranks import read_log


TIMEOUT = 240
STEPS = 30
SETTINGS = {
    "per_device_train_batch_size": 4,
    "max_steps": STEPS,
    "learning_rate": 0.005,
    "logging_steps": 1,
    "save_steps": 10,
    "eval_strategy": "steps",
    "eval_steps": 10,
    "use_cpu": True,
}


def argv_of(tiny_model, csv_file, output_dir, **settings) -> list[str]:
    settings = {
        **SETTINGS,
        "model_name_or_path": tiny_model,
        "train_file": csv_file,
        "output_dir": output_dir,
    } | settings
    return [f"--{name}={value}" for name, value in settings.items()]


def _train(argv: list[str]) -> list[dict]:
    """Trains on this rank; returns what a reporting callback was given."""
    from transformers import TrainerCallback
    from transformers.integrations import integration_utils

    from hf_zero.recipes.run import train

    reported = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if state.is_world_process_zero:
                reported.append(integration_utils.rewrite_logs(logs))

    before = integration_utils.INTEGRATION_TO_CALLBACK["tensorboard"]
    integration_utils.INTEGRATION_TO_CALLBACK["tensorboard"] = Reporter
    try:
        settings = RunConfig.parse("classify", [*argv, "--report_to", "tensorboard"])
        train(settings, settings.training_arguments())
    finally:
        integration_utils.INTEGRATION_TO_CALLBACK["tensorboard"] = before
    return reported


@pytest.fixture(scope="module")
def whole(tiny_model, csv_file, tmp_path_factory):
    """The folder of a run that nothing has interrupted, and what it reported."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    reported, others = run_ranks(_train, 2, argv_of(tiny_model, csv_file, folder), timeout=TIMEOUT)
    assert others == []
    return folder, reported


@ranks(2, timeout=TIMEOUT)
def test_a_run_that_breaks_off_before_its_report_has_not_finished(tiny_model, csv_file, tmp_path):
    with mock.patch("hf_zero.recipes.run.write_report", side_effect=RuntimeError("no report")):
        with pytest.raises(RuntimeError, match="no report"):
            _train(argv_of(tiny_model, csv_file, tmp_path / "out"))
    assert not read_run(tmp_path / "out")["finished"]


def test_the_report_is_one_file_with_curves_and_the_numbers_of_the_run(whole):
    folder, _ = whole
    text = (folder / "report.html").read_text(encoding="utf-8")
    texts = {tag: re.findall(f"<{tag}>([^<]+)</{tag}>", text) for tag in ("h3", "td", "span", "b")}
    assert "http" not in text and not re.search("(src|href|data)=", text)
    assert texts["h3"] == [
        *("eval_loss", "eval_accuracy", "loss", "grad_norm", "learning_rate"),
        *("zero/tokens_per_second", "zero/peak_memory_mib"),
    ]
    assert text.count("<svg") == text.count("<polyline") == 7
    cells = texts["td"]
    assert cells[:4] == ["between backward and optimizer step", "rank 0", "rank 1", "DDP"]
    # Half of everything on each of two ranks. Units of this tiny model are padded, and numbers have two decimals.
    for title in ("parameter", "gradient", "optimizer"):
        first, second, ddp = map(float, cells[cells.index(title) + 1 :][:3])
        assert first == second == pytest.approx(ddp / 2, abs=0.011)
    last = [entry for entry in read_log(folder / "training_log.jsonl") if "eval_loss" in entry][-1]
    assert texts["span"] == ["ZeRO stage", "ranks", "precision", "steps", "training time"]
    assert texts["b"][5:7] == [f"{last[name]:,.5g}" for name in ("eval_loss", "eval_accuracy")]


def test_every_entry_of_the_log_is_a_line_of_json_with_speed_and_memory(whole):
    lines = (whole[0] / "training_log.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    trained = [entry for entry in entries if "loss" in entry]
    assert [entry["step"] for entry in trained] == list(range(1, STEPS + 1))
    assert entries[0]["step"] == 0 and "eval_accuracy" in entries[0]  # before training
    for entry in trained:
        assert {"loss", "grad_norm", "learning_rate", "epoch"} <= set(entry)
        assert entry["zero/tokens_per_second"] > 0 and entry["zero/peak_memory_mib"] > 0


def test_those_who_report_are_given_what_was_measured(whole):
    reported = [logs for logs in whole[1] if "train/loss" in logs]
    assert len(reported) == STEPS
    wanted = {"train/zero/tokens_per_second", "train/zero/peak_memory_mib"}
    assert all(wanted <= set(logs) for logs in reported)


def test_the_configuration_beside_the_model_repeats_the_run(whole, tiny_model, csv_file):
    path = whole[0] / "resolved.yaml"
    again = RunConfig.parse("classify", ["--config", str(path)])
    once = RunConfig.parse("classify", [*argv_of(tiny_model, csv_file, whole[0]), "--report_to", "tensorboard"])
    assert again.arguments == once.arguments
    assert again.training == once.training
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["task"] == "classify"


def test_card_and_page_show_the_configuration_and_no_path_of_this_machine(whole, csv_file):
    card = (whole[0] / "README.md").read_text(encoding="utf-8")
    assert "max_steps: 30" in card and "train_file: rows.csv" in card
    assert "| ZeRO stage | 3 |" in card
    page = (whole[0] / "report.html").read_text(encoding="utf-8")
    assert "train_file: rows.csv" in page
    for text in (card, page):
        assert str(whole[0].parent) not in text and str(csv_file.parent) not in text


def _wait_for(what, process: BaseProcess) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not what():
        assert process.exitcode is None and time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.full("slow")
def test_ctrl_c_saves_and_the_same_command_ends_where_the_unbroken_run_did(whole, tiny_model, csv_file, tmp_path):
    folder, errors = tmp_path / "out", tmp_path / "0.err"
    argv = argv_of(tiny_model, csv_file, folder)
    run = ["-m", "hf_zero.recipes", "classify", *argv, "--num_processes=2", "--report_to=none"]
    (process,) = start_program(run, tmp_path, tmp_path)
    try:
        log = folder / "training_log.jsonl"
        _wait_for(lambda: log.exists() and len(log.read_text().splitlines()) > 3, process)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the launcher and all that is in its group
        process.join(TIMEOUT)
        assert process.exitcode == 130
    finally:
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
    said = without_imports(errors.read_text())
    saved = re.search(r"SIGINT: saved (\S+checkpoint-(\d+)) at step \2; to go on, run the same command again", said)
    assert saved, said
    assert said.count("Ctrl-C: ") == 1 and "Traceback" not in said
    assert 0 < int(saved[2]) < STEPS
    newest = max((path.name for path in folder.glob("checkpoint-*")), key=lambda name: int(name.split("-")[1]))
    assert newest == f"checkpoint-{saved[2]}"
    run_ranks(_train, 2, argv, timeout=TIMEOUT)
    expected, found = (load_file(path / "model.safetensors") for path in (whole[0], folder))
    assert all(found[name].allclose(expected[name], rtol=1e-5, atol=1e-6) for name in expected)
    losses = [[e["loss"] for e in read_log(path / "training_log.jsonl") if "loss" in e] for path in (whole[0], folder)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
