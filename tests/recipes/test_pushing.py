"""`--push_to_hub`: a run ends in a repository that loads, with its report, card and configuration."""

import subprocess
import sys

import pytest

from tests.hub_client import environment, kill
from tests.hub_server import HubServer


TIMEOUT = 240
LOAD = """
import sys
from transformers import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1])
print(sorted(model.config.label2id), sum(p.numel() for p in model.parameters()))
"""


def run(argv: list[str], folder, url: str) -> subprocess.CompletedProcess:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(
        [sys.executable, *argv], cwd=folder, env=environment(url, folder / "home"), start_new_session=True, **pipes
    )
    try:
        out, err = process.communicate(timeout=TIMEOUT)
    finally:
        kill(process)
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


@pytest.mark.full("slow")
def test_a_run_is_pushed_with_its_report_and_loads_from_there(tiny_model, csv_file, tmp_path):
    with HubServer({"hf_alice": "alice"}) as server:
        argv = f"--model_name_or_path={tiny_model} --train_file={csv_file} --output_dir=out --max_steps=3".split()
        argv += "--save_steps=2 --push_to_hub --hub_model_id=alice/mine --hub_token=hf_alice --use_cpu".split()
        for _ in range(2):  # the second one has nothing left to train, and pushes what is there
            result = run(["-m", "hf_zero.recipes", "classify", *argv], tmp_path, server.url)
            assert result.returncode == 0, result.stderr
        files = {name: file.content for name, file in server.repos["alice/mine"].files().items()}
        names = {"model.safetensors", "tokenizer.json", "README.md", "report.html"}
        assert names | {"training_log.jsonl"} <= set(files) and "resolved.yaml" not in files
        assert not [name for name in files if name.startswith(("checkpoint", "_"))]
        assert (tmp_path / "out" / "resolved.yaml").is_file()
        of_this_machine = [name for name, content in files.items() if str(csv_file.parent).encode() in content]
        assert not of_this_machine and "training_args.bin" not in files
        assert b"the soup was" not in files["report.html"]
        for name in ("model.safetensors", "report.html"):
            assert files[name] == (tmp_path / "out" / name).read_bytes()
        card = files["README.md"].decode()
        assert "- zero-stage-3" in card
        assert not [name for name, content in files.items() if b"hf_alice" in content]
        here = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
        assert not [path for path in here if b"hf_alice" in path.read_bytes()]
        loaded = run(["-c", LOAD, "alice/mine"], tmp_path, server.url)
        assert loaded.stdout.split("\n")[0] == "['film', 'food'] 6130", loaded.stderr
