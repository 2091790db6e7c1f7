"""Trackers, by Trainer's `report_to`: what each was given is read back from its files. Nothing is sent anywhere."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recipes.ranks import logged, run_on_ranks
from tests.tiers import in_core


NAMES = ["loss", "zero/tokens_per_second", "zero/peak_memory_mib"]
Values = dict[str, list[float]]


def of_tensorboard(folder: Path) -> Values:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {name: [event.value for event in events.Scalars(f"train/{name}")] for name in NAMES}


def of_trackio(folder: Path) -> Values:
    (path,) = [path for path in folder.glob("*.db") if path.stem == "huggingface"]  # Trainer's default project
    with sqlite3.connect(path) as database:
        entries = [json.loads(text) for (text,) in database.execute("select metrics from metrics order by id")]
    return {name: [entry[f"train/{name}"] for entry in entries if f"train/{name}" in entry] for name in NAMES}


def of_wandb(folder: Path) -> Values:
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    values: Values = {name: [] for name in NAMES}
    for content in records_of(path.read_bytes()):
        for item in Record.FromString(content).history.item:
            name = (item.key or "/".join(item.nested_key)).removeprefix("train/")
            if name in values:
                values[name].append(json.loads(item.value_json))
    return values


def records_of(content: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format: blocks of 32 KiB, each part with a checksum, a length and a type."""
    at, record = 7, b""  # behind the file's own header
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768  # what does not hold a header is padding
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


READERS = {"tensorboard": of_tensorboard, "trackio": of_trackio, "wandb": of_wandb}


@pytest.mark.parametrize("tracker", in_core(["tensorboard"], READERS))
def test_a_tracker_is_given_loss_speed_and_memory(tracker, tiny_model, csv_file, tmp_path):
    pytest.importorskip(tracker)
    logs = tmp_path / "logs"
    logs.mkdir()
    environment = {name: str(logs) for name in ("TENSORBOARD_LOGGING_DIR", "TRACKIO_DIR", "WANDB_DIR")}
    environment |= {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
    argv = ["classify", f"--model_name_or_path={tiny_model}", f"--train_file={csv_file}", "--use_cpu"]
    argv += ["--max_steps=4", "--logging_steps=1", "--save_strategy=no", "--output_dir=out", "--report_to", tracker]
    for rank in run_on_ranks(argv, tmp_path, environment=environment):
        assert rank.code == 0, rank.err
    found = READERS[tracker](logs)
    for name in NAMES:
        assert found[name] == pytest.approx(logged(tmp_path / "out", name), rel=1e-5), name
        assert len(found[name]) == 4 and min(found[name]) > 0
