"""Signals come at random times, to one rank or to all, once or twice; launchers are killed or told to end."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.trials.runs import NUM_RANKS, Run, incomplete_in, is_equal, steps_in
from tests.trials.table import Count


SIGNALS, KILLED, TOLD = "signals to ranks", "launchers killed", "launchers and ranks told to end"
GRACE_SECONDS = 5.0  # in which no rank may outlive its launcher
ROWS = "text,label\n" + "".join(f"the soup was {word},{index % 2}\n" for index, word in enumerate("abcdefghij" * 6))


def signals(root: Path, whole: Path, num_trials: int, generator: random.Random) -> dict[str, Count]:
    """SIGTERM and SIGUSR1 while ranks train. They save and leave with 128 + the number, and the run goes on.

    Args:
        root (`Path`): an empty folder.
        whole (`Path`): of a run that ended undisturbed.
        num_trials (`int`): how many.
        generator (`random.Random`): decides when, which, and to whom.
    """
    count = Count()
    for trial in range(num_trials):
        number = generator.choice([signal.SIGTERM, signal.SIGUSR1])
        told, times = generator.choice([[0], [1], [0, 1]]), generator.choice([1, 1, 2])
        run = Run.start(root / str(trial), in_background=generator.random() < 0.5)
        run.wait_for_training()
        time.sleep(generator.uniform(0, 2))
        for _ in range(times):
            for rank in told:
                if run.processes[rank].is_alive():
                    os.kill(run.processes[rank].pid, number)
            time.sleep(generator.uniform(0, 0.3))
        count.trials += 1
        count.hung += not run.end()
        codes = set(run.codes)
        # before training has begun a signal ends the rank that it reaches, as it does to any program
        is_documented = codes <= {0, 128 + number} or -number in codes
        count.unnoticed += not is_documented
        if not is_documented:
            print(f"  {number.name}: ended with {run.codes}: {run.last_line(0)[:200]}", flush=True)
        if codes == {128 + number} and not steps_in(run.folder / "out"):
            count.lost += 1
        count.incomplete += bool(incomplete_in(run.folder / "out"))
        if any(codes):
            run = Run.start(run.folder)
            count.hung += not run.end()
        is_same = run.codes == [0] * NUM_RANKS and is_equal(run.folder, whole)
        count.survived += is_same
        count.lost += not is_same
    return {SIGNALS: count}


def launchers(root: Path, whole: Path, num_trials: int, generator: random.Random) -> dict[str, Count]:
    """`--num_processes 2` from its first moment on: killed, or all of its processes told to end, once or twice.

    Args:
        root (`Path`): an empty folder.
        whole (`Path`): not looked at.
        num_trials (`int`): how many.
        generator (`random.Random`): decides when.
    """
    counts = {KILLED: Count(), TOLD: Count()}
    root.mkdir(parents=True)
    (root / "rows.csv").write_text(ROWS, encoding="utf-8")
    _save_tiny_model(root / "model")
    for trial in range(num_trials):
        process = _launch(root, trial)
        ranks = _ranks_of(process)
        time.sleep(generator.uniform(0, 12))
        try:
            if trial % 2:
                _kill(counts[KILLED], process, ranks)
            else:
                _tell(counts[TOLD], process, ranks, times=generator.choice([1, 2]))
        finally:
            for each in (process, *ranks):
                if each.is_running() if isinstance(each, psutil.Process) else each.poll() is None:
                    each.kill()
            process.wait()
    return counts


def _kill(count: Count, process: subprocess.Popen, ranks: list[psutil.Process]) -> None:
    if process.poll() is not None:
        return
    count.trials += 1
    process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=GRACE_SECONDS)
    count.hung += bool(alive)
    count.survived += not alive


def _tell(count: Count, process: subprocess.Popen, ranks: list[psutil.Process], times: int) -> None:
    for _ in range(times):
        for each in (process, *ranks):
            if process.poll() is None and psutil.pid_exists(each.pid):
                os.kill(each.pid, signal.SIGTERM)
        time.sleep(0.3)
    try:
        code = process.wait(60)
    except subprocess.TimeoutExpired:
        count.trials, count.hung = count.trials + 1, count.hung + 1
        return
    if code == 0:
        return  # it had ended before
    count.trials += 1
    is_documented = code in (128 + signal.SIGTERM, -signal.SIGTERM)
    count.survived += is_documented
    count.unnoticed += not is_documented
    if not is_documented:
        print(f"  SIGTERM {times} times: the launcher ended with {code}", flush=True)


def _launch(root: Path, trial: int) -> subprocess.Popen:
    settings = {
        "model_name_or_path": root / "model",
        "train_file": root / "rows.csv",
        "output_dir": root / f"out-{trial}",
        "num_processes": NUM_RANKS,
        "max_steps": 2000,
        "save_steps": 20,
        "save_total_limit": 2,
        "use_cpu": True,
    }
    command = [sys.executable, "-m", "hf_zero.recipes", "classify", *(f"--{k}={v}" for k, v in settings.items())]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(root)}
    with (root / f"said-{trial}").open("w") as said:
        return subprocess.Popen(command, stdout=said, stderr=said, env=environment, start_new_session=True)


def _ranks_of(process: subprocess.Popen) -> list[psutil.Process]:
    """Once they have been started."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        ranks = [p for p in psutil.Process(process.pid).children() if "resource_tracker" not in " ".join(p.cmdline())]
        if len(ranks) == NUM_RANKS:
            return ranks
        time.sleep(0.01)
    raise RuntimeError("the launcher has started no ranks")


def _save_tiny_model(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "the", "soup", "was", *"abcdefghij"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(words), **size)).save_pretrained(folder)
