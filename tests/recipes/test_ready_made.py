"""The YAML files of recipes/: they parse, say what they need, and get through a dry run with a tiny model."""

import copy
import re
import shlex
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from hf_zero.recipes.cli import main
from hf_zero.recipes.data.templates import set_chat_template
from hf_zero.recipes.plan_input import PlanInput
from hf_zero.recipes.run_config import RunConfig
from tests.public_models import CONFIGS, config_of
from tests.recipes.data import conftest, test_images
from tests.recipes.data.conftest import SENTENCES, chats
from tests.recipes.preferences import write_rows
from tests.test_docs_tables import check_command
from tests.tiers import in_core
from tests.trainer.harness import reset_accelerate


ROOT = Path(__file__).parents[2]
QUICKSTART = "quickstart"  # run whole, by tests of its own
FILES = sorted((ROOT / "recipes").glob("*.yaml"))
NEEDS = re.compile(
    r"^# (?:One GPU|Each of (?P<ranks>\d+) GPUs) holds (?P<device>[\d.]+) GiB beside activations"
    r"(?:, and (?P<host>[\d.]+) GiB of host memory)?(?P<reference>, the reference model's shard included)?\.$"
)
PEAK = re.compile(
    r"^# With rows of (?P<tokens>\d+) tokens (?:one GPU|each of (?P<ranks>\d+) GPUs) reaches [\d.]+ GiB at the peak\.$"
)
GIB = 2**30

tokenizer, tiny_llava = conftest.tokenizer, test_images.tiny_llava


NAMES = [path.stem for path in FILES]
LARGE = [name for name in NAMES if name != QUICKSTART]


def read(name: str) -> dict:
    return yaml.safe_load(text_of(name))


def text_of(name: str) -> str:
    return (ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")


def parsed(name: str) -> RunConfig:
    return RunConfig.parse(read(name)["task"], ["--config", str(ROOT / "recipes" / f"{name}.yaml")])


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
def test_it_parses_and_leaves_what_it_makes_in_a_folder_of_its_name(name):
    settings = parsed(name)
    assert settings.training["output_dir"] == f"outputs/{name}"
    assert settings.num_processes is None, "how many processes is for the command line"
    assert name == QUICKSTART or settings.arguments.model_name_or_path in CONFIGS


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_in_its_comment_are_for_this_file(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    comment = [line[1:] for line in text_of(name).splitlines() if line.startswith("#")]
    lines = "\n".join(comment).replace("\\\n", " ").splitlines()
    commands = [line.strip() for line in lines if line.startswith("   ")]
    assert any(f"--config {name}.yaml" in command for command in commands)
    for command in commands:
        check_command(shlex.split(command))


# What it needs


def needs(name: str, num_ranks: int, num_tokens: int | None = None) -> tuple[float, float]:
    """GiB on the device and on the host, of each rank; on the device at the peak of a step with rows of so many
    tokens."""
    settings = replace(parsed(name), num_processes=num_ranks)
    model = settings.arguments.model_name_or_path
    run = PlanInput.of(settings.kind, settings, config=config_of(model), num_tokens=num_tokens or 1)
    if num_tokens is not None:
        prediction = run.predict()
        return prediction.peak_nbytes / GIB, prediction.host_nbytes / GIB
    told = run.predictor.predict(settings.zero, None)
    return told.resting_nbytes / GIB, told.host_nbytes / GIB


def computed_comment(name: str) -> str:
    """The file's text with the numbers of its comment computed."""
    return "\n".join(_computed_line(name, line) for line in text_of(name).splitlines()) + "\n"


def _computed_line(name: str, line: str) -> str:
    if (said := PEAK.match(line)) is not None:
        device, _ = needs(name, int(said["ranks"] or 1), int(said["tokens"]))
        each = f"each of {said['ranks']} GPUs" if said["ranks"] else "one GPU"
        return f"# With rows of {said['tokens']} tokens {each} reaches {device:.1f} GiB at the peak."
    said = NEEDS.match(line)
    if said is None:
        return line
    num_ranks = int(said["ranks"] or 1)
    device, host = needs(name, num_ranks)
    each = "One GPU" if num_ranks == 1 else f"Each of {num_ranks} GPUs"
    on_host = f", and {host:.1f} GiB of host memory" if host else ""
    return f"# {each} holds {device:.1f} GiB beside activations{on_host}{said['reference'] or ''}."


@pytest.mark.parametrize("name", in_core(["smollm2-135m-sft"], LARGE))
def test_its_comment_says_what_is_predicted_for_each_gpu(name, request):
    wanted = computed_comment(name)
    assert "GiB beside activations" in wanted
    if request.config.getoption("--write-docs"):
        (ROOT / "recipes" / f"{name}.yaml").write_text(wanted, encoding="utf-8")
    assert text_of(name) == wanted, "run this test with --write-docs"


# A dry run of it


TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "image_size": 32,
    "patch_size": 16,
}


@pytest.fixture
def tiny(tokenizer, tmp_path, request):
    """Makes a folder with a small model of the same type as a large one."""

    def make(name: str) -> str:
        from transformers import (
            AutoConfig,
            AutoModelForCausalLM,
            ModernBertForSequenceClassification,
            ViTForImageClassification,
            ViTImageProcessor,
        )

        own = CONFIGS[name]
        kind = own["model_type"]
        if kind == "llava":
            return str(request.getfixturevalue("tiny_llava"))
        sizes = {key: TINY[key] for key in own if key in TINY} | {
            key: value for key, value in own.items() if key in ("tie_word_embeddings",)
        }
        folder = tmp_path / "model"
        classes = {"vit": ViTForImageClassification, "modernbert": ModernBertForSequenceClassification}
        if kind == "vit":
            sizes |= {"image_size": 32, "patch_size": 16}
            ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
        else:
            ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
            sizes |= {"vocab_size": len(tokenizer), "max_position_embeddings": 128, "bos_token_id": None, **ids}
            if kind == "modernbert":
                sizes |= {"cls_token_id": 0, "sep_token_id": 0}
            (qwen3_tokenizer(tokenizer) if kind.startswith("qwen3") else tokenizer).save_pretrained(folder)
        config = AutoConfig.for_model(kind, **sizes)
        model = classes[kind](config) if kind in classes else AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder)
        return str(folder)

    return make


def qwen3_tokenizer(tokenizer):
    """With Qwen3's own chat template, which TRL has a copy of, and its end of a turn."""
    made = copy.deepcopy(tokenizer)
    made.eos_token = "<|im_end|>"
    made.chat_template = (Path(find_spec("trl").origin).parent / "chat_templates" / "qwen3.jinja").read_text("utf-8")
    return made


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("qwen3") and name.endswith("sft")])
def test_chats_of_several_turns_are_rendered_for_qwen3_as_it_knows_them(name, tokenizer):
    given = qwen3_tokenizer(tokenizer)
    for row in chats():
        known = given.apply_chat_template(row["messages"], tokenize=False).replace("<think>\n\n</think>\n\n", "")
        changed = copy.deepcopy(given)
        set_chat_template(changed, parsed(name).training["chat_template_path"])
        found = changed.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        ids, said = found["input_ids"], found["assistant_masks"]
        assert changed.decode(ids) == known
        answers = [f"{turn['content']}<|im_end|>" for turn in row["messages"] if turn["role"] == "assistant"]
        assert changed.decode([token for token, is_said in zip(ids, said) if is_said]) == "".join(answers)


def rows_for(settings: RunConfig) -> list[dict]:
    if settings.task == "classify":
        return [{"text": text, "label": "house" if "house" in text else "elsewhere"} for text in SENTENCES]
    if settings.task == "pretrain":
        return [{"text": text} for text in SENTENCES]
    if settings.task == "grpo":
        return [{"prompt": row["messages"][:1], "solution": "1"} for row in chats()]
    if settings.task == "dpo":
        return [{"prompt": "Tell", "chosen": f" {good}", "rejected": " no"} for good in SENTENCES]
    return chats()


def images_in(folder: Path) -> str:
    """A folder of small images, one folder a class."""
    from PIL import Image

    for number in range(20):
        path = folder / ("red" if number % 2 else "blue") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (200 - number, number, 0) if number % 2 else (0, number, 200)).save(path)
    return str(folder)


@pytest.mark.parametrize("name", in_core(["llama-3.1-8b-lora"], LARGE))
def test_a_dry_run_with_a_tiny_model_in_place_of_the_large_one(name, tiny, tmp_path, capsys):
    settings, content = parsed(name), read(name)
    for key in ("dataset_name", "dataset_config", "dataset_test_split", "max_test_rows"):
        content.pop(key, None)
    content |= {"model_name_or_path": tiny(settings.arguments.model_name_or_path), "use_cpu": True}
    if "max_length" in content:
        content["max_length"] = 64
    if "image_column" in content:
        content["dataset_name"] = images_in(tmp_path / "images")
    else:
        is_llava = "llava" in settings.arguments.model_name_or_path
        rows = test_images.rows_of(tmp_path) if is_llava else rows_for(settings)
        content["train_file"] = str(write_rows(tmp_path / "rows.jsonl", rows))
    if "reward_funcs" in content:
        code = "def right(completions, solution, **_):\n    return [1.0] * len(solution)\n"
        (tmp_path / "rewards.py").write_text(code)
        content |= {"reward_funcs": f"{tmp_path / 'rewards.py'}:right", "max_completion_length": 16}
    content.pop("eval_strategy", None)  # nothing to evaluate on
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    reset_accelerate()
    code = main([settings.task, "--config", str(path), "--dry_run"])
    output = capsys.readouterr()
    assert code == 0, output.err
    assert "dry run: nothing was trained or written" in output.out
    assert f"zero_stage: {content['zero_stage']}" in output.out or content["zero_stage"] == 3  # the default
    assert re.search(r"[\d,]+ parameters, [\d,]+ of them trained", output.out)
    assert not (ROOT / "outputs" / name).exists()
