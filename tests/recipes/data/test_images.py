"""Vision-language models: from rows that name images to a folder that plain transformers loads, and refusals."""

import base64
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes.cli import main
from tests.distributed import run_ranks
from tests.recipes.cases import Loaded
from tests.recipes.data.tasks import trained_by_trl
from tests.recipes.preferences import write_rows
from tests.recipes.ranks import flags_of, logged, trained
from tests.tiers import in_core
from tests.trainer.harness import reset_accelerate


pytest.importorskip("PIL", reason="what reads images")

# As those of LLaVA: content is a list of blocks.
TEMPLATE = """\
{%- for message in messages %}
    {{- message['role'] + ': ' }}
    {%- for block in message['content'] if block['type'] == 'image' %}{{ '<image>' }}{% endfor %}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {%- for block in message['content'] if block['type'] == 'text' %}{{ block['text'] }}{% endfor %}
            {{- eos_token }}
        {%- endgeneration %}
    {%- else %}
        {%- for block in message['content'] if block['type'] == 'text' %}{{ block['text'] }}{% endfor %}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}
"""
COLOURS = {"red": (220, 20, 20), "blue": (20, 20, 220)}
SETTINGS = {"max_steps": 4, "learning_rate": 0.01, "seed": 7, "max_length": 64, "logging_steps": 1}


@pytest.fixture(scope="module")
def tiny_llava(tmp_path_factory, tokenizer) -> Path:
    """A Llava whose image is four tokens, with its processor."""
    import copy

    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    folder, tokenizer = tmp_path_factory.mktemp("tiny_llava"), copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sizes, image_size=8, patch_size=4),
        text_config=LlamaConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=128, **ids),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    edges = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
    LlavaProcessor(
        CLIPImageProcessorPil(**edges),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return folder


def turns(question, answer: str) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def rows_of(folder: Path, count: int = 8) -> list[dict]:
    """Rows whose images are files beside them; the third has two images, and the fourth none."""
    from PIL import Image

    (folder / "pictures").mkdir(exist_ok=True)
    rows = []
    for number in range(count):
        name = list(COLOURS)[number % 2]
        Image.new("RGB", (12, 10), COLOURS[name]).save(folder / "pictures" / f"{number}.png")
        images = [f"pictures/{number}.png"] * {2: 2, 3: 0}.get(number, 1)
        blocks = [{"type": "image"} for _ in images] + [{"type": "text", "text": "What colour?"}]
        rows.append({"images": images, "messages": turns(blocks, f"It is {name}.")})
    return rows


def settings_of(model: Path, data: Path) -> dict:
    return {"model_name_or_path": model, "train_file": data, "output_dir": "out", "report_to": "none", **SETTINGS}


def losses_of_trl(folder: Path, model: Path) -> list[float]:
    """What TRL's own trainer, on one rank, says of the same rows, four a step."""
    import datasets
    from transformers import AutoModelForImageTextToText, AutoProcessor

    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    features = datasets.Features({"messages": datasets.Json()})
    if "images" in rows[0]:
        rows = [{**row, "images": [str(folder / name) for name in row["images"]]} for row in rows]
        features["images"] = datasets.List(datasets.Image())
    settings = {**SETTINGS, "per_device_train_batch_size": 4, "assistant_only_loss": True}
    trainer = trained_by_trl(
        "SFT",
        AutoModelForImageTextToText.from_pretrained(model, dtype="float32"),
        datasets.Dataset.from_list(rows, features=features),
        AutoProcessor.from_pretrained(model),
        folder,
        {**settings, "gradient_checkpointing": False},
    )
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("stage", in_core([3], [2, 3]))
def test_a_run_on_two_ranks_is_that_of_trl_and_goes_on_bit_for_bit(tiny_llava, tmp_path, stage, capsys):
    """One of the ranks has a batch without any image: the weights of the vision tower are its, too."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    data = write_rows(tmp_path / "rows.jsonl", rows_of(tmp_path))
    settings = {**settings_of(tiny_llava, data), "zero_stage": stage, "per_device_train_batch_size": 1}
    settings |= {"gradient_accumulation_steps": 2, "gradient_checkpointing": False, "test_file": data}
    for added in ({}, {"resume": "out/checkpoint-2", "output_dir": "again"}):
        said = trained("sft", tmp_path, **{**settings, "save_strategy": "steps", "save_steps": 2, **added})
    assert "format messages; the loss counts what the assistant says" in said
    assert "try it: python -m hf_zero.recipes chat again\n" in said
    whole, again = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert all(torch.equal(whole[name], again[name]) for name in whole) and len(whole) == len(again) > 0
    before = load_file(tiny_llava / "model.safetensors")
    changed = {name.split(".")[0] for name in whole if not torch.equal(whole[name], before[name])}
    assert changed == {"language_model", "multi_modal_projector", "vision_tower"}
    [theirs] = run_ranks(losses_of_trl, 1, tmp_path, tiny_llava)
    assert logged(tmp_path / "out", "loss") == pytest.approx(theirs, abs=1e-5)
    _, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert AutoProcessor.from_pretrained(tmp_path / "out").chat_template == TEMPLATE
    assert main(["chat", str(tmp_path / "out"), "--prompt=What colour?", "--use_cpu", "--max_new_tokens=4"]) == 0


@pytest.mark.full("slow")
def test_an_adapter_of_such_a_model_is_merged_with_its_processor(tiny_llava, tmp_path):
    from transformers import AutoProcessor

    data = write_rows(tmp_path / "rows.jsonl", rows_of(tmp_path, 4))
    settings = {**settings_of(tiny_llava, data), "use_peft": True, "lora_r": 2, "max_steps": 1}
    trained("sft", tmp_path, num_ranks=1, **settings)
    assert main(["merge", str(tmp_path / "out"), f"--output_dir={tmp_path / 'merged'}"]) == 0
    assert AutoProcessor.from_pretrained(tmp_path / "merged").chat_template == TEMPLATE
    assert (
        load_file(tmp_path / "merged" / "model.safetensors").keys()
        == load_file(tiny_llava / "model.safetensors").keys()
    )


# Rows


@pytest.fixture
def load(tiny_llava, tmp_path, monkeypatch):
    """Reads rows as a run would, before it loads the model."""

    def call(data: Path, **settings):
        monkeypatch.chdir(tmp_path)
        name = settings.pop("task", "sft")
        model = settings.pop("model", tiny_llava)
        return Loaded([name, *flags_of({**settings_of(model, data), **settings})]).data

    return call


PLACE, TEXT = {"type": "image"}, {"type": "text", "text": "What colour?"}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("row", "content"),
    [
        pytest.param({"messages": turns([PLACE, TEXT], "red")}, [PLACE, TEXT], id="blocks"),
        pytest.param({"messages": turns("What colour?", "red")}, [PLACE, TEXT], id="text"),
        pytest.param({"messages": turns("What colour?<image>", "red")}, [TEXT, PLACE], id="mark"),
        pytest.param(
            {"conversations": [{"from": "human", "value": "<image>\nWhat colour?"}, {"from": "gpt", "value": "red"}]},
            [PLACE, TEXT],
            id="llava",
        ),
        pytest.param(
            {"prompt": turns("What colour?", "")[:1], "completion": turns("", "red")[1:]}, [PLACE, TEXT], id="prompt"
        ),
        pytest.param({"instruction": "What colour?", "output": "red"}, [PLACE, TEXT], id="alpaca"),
    ],
)
def test_images_get_their_places_in_every_format(load, tmp_path, row, content):
    rows_of(tmp_path, 1)
    data = write_rows(tmp_path / "rows.jsonl", [{**row, "image": "pictures/0.png"}])
    [found] = load(data).train
    assert found["images"] == [{"bytes": None, "path": str(tmp_path / "pictures" / "0.png")}]
    assert found.get("messages", found.get("prompt"))[0]["content"] == content


@pytest.mark.parametrize("is_in_block", [True, False])
@pytest.mark.parametrize("kind", ["path", "base64", "data URL", "data URL alone", "base64 in lines"])
def test_images_may_lie_in_blocks_and_be_base64(load, tmp_path, kind, is_in_block):
    rows_of(tmp_path, 1)
    name, content = "pictures/0.png", (tmp_path / "pictures" / "0.png").read_bytes()
    encoded = base64.b64encode(content * 9).decode()  # longer than a file's name may be
    lines = base64.encodebytes(content * 9).decode()
    image = {"path": name, "base64": encoded, "base64 in lines": lines}.get(kind, f"data:image/png;base64,{encoded}")
    links = {"data URL": {"url": image}, "data URL alone": image}
    block = {"type": "image_url", "image_url": links[kind]} if kind in links else {"type": "image", "image": image}
    column = {} if is_in_block else {"images": [image]}
    row = {"messages": turns([block if is_in_block else PLACE, TEXT], "red"), **column}
    [found] = load(write_rows(tmp_path / "rows.jsonl", [row])).train
    assert found["messages"][0]["content"] == [PLACE, TEXT]
    [stored] = found["images"]
    path = str(tmp_path / name)
    assert stored == ({"bytes": None, "path": path} if kind == "path" else {"bytes": content * 9, "path": None})


@pytest.mark.parametrize("task", in_core(["sft"], ["sft", "dpo", "grpo"]))
def test_a_model_of_images_and_texts_learns_texts_alone_as_trl_does(tiny_llava, tmp_path, task):
    """Its chat template renders texts in blocks alone, and the rows have none."""
    asked, *answers = turns("What colour?", "")[:1], *(turns("", f"It is {name}.")[1:] for name in COLOURS)
    rows = {
        "sft": [{"messages": asked + answers[number % 2]} for number in range(4)],
        "dpo": [{"prompt": asked, "chosen": answers[0], "rejected": answers[1]}],
        "grpo": [{"prompt": asked}] * 4,
    }
    data = write_rows(tmp_path / "rows.jsonl", rows[task])
    settings = {**settings_of(tiny_llava, data), "max_steps": 1, "per_device_train_batch_size": 4}
    settings |= {"gradient_checkpointing": False}
    if task == "grpo":
        del settings["max_length"]
        judge = "def length(prompts, completions, **_):\n    assert prompts[0][-1]['content'] == 'What colour?'\n"
        (tmp_path / "judge.py").write_text(f"{judge}    return [*range(len(completions))]\n")
        settings |= {"reward_funcs": f"{tmp_path}/judge.py:length", "max_completion_length": 4, "num_generations": 2}
    trained(task, tmp_path, num_ranks=1, **settings)
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_llava, tmp_path / "out"))
    changed = {name.split(".")[0] for name in after if not torch.equal(after[name], before[name])}
    assert changed == {"language_model"} and before.keys() == after.keys()
    if task == "sft":
        [theirs] = run_ranks(losses_of_trl, 1, tmp_path, tiny_llava)
        assert logged(tmp_path / "out", "loss") == pytest.approx(theirs[:1], abs=1e-5)


def test_images_that_parquet_holds_are_those_of_the_files(load, tiny_llava, tmp_path):
    from datasets import Dataset, Features, Image, Json, List

    rows = rows_of(tmp_path, 4)
    data = write_rows(tmp_path / "rows.jsonl", rows)
    features = Features({"images": List(Image()), "messages": Json()})
    whole = [{**row, "images": [{"bytes": (tmp_path / name).read_bytes()} for name in row["images"]]} for row in rows]
    Dataset.from_list(whole, features=features).to_parquet(tmp_path / "rows.parquet")
    held, named = load(tmp_path / "rows.parquet").train, load(data).train
    assert [row["messages"] for row in held] == [row["messages"] for row in named]
    for one, other in zip(held, named, strict=True):
        files = [Path(image["path"]).read_bytes() for image in other["images"]]
        assert [image["bytes"] for image in one["images"]] == files
    assert not load(data, dataset_streaming=True).train.features["images"].feature.decode


def test_a_stream_of_files_in_subfolders_finds_images_beside_them(load, tmp_path):
    for name in ("a", "b"):
        folder = tmp_path / "rows" / name
        folder.mkdir(parents=True)
        [row, _] = rows_of(folder, 2)
        (folder / "pictures" / "0.png").rename(folder / f"{name}.png")
        write_rows(folder / "train.jsonl", [{**row, "images": [f"{name}.png"]}])
    for streams in (False, True):
        data = load(tmp_path / "rows", dataset_streaming=streams)
        paths = [image["path"] for row in data.train for image in row["images"]]
        assert paths == [str(tmp_path / "rows" / name / f"{name}.png") for name in ("a", "b")], streams


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"images": ["none.png"]}, "line 2: column 'images': there is no file .*/none.png; correct it"),
        ({"images": ["rows.jsonl"]}, "line 2: column 'images': no image that can be read .*rows.jsonl: Unid"),
        (
            {"images": []},
            r"line 2: Number of images provided \(0\) does not match number of image place",
        ),
        ({"images": "pictures/0.png"}, "line 2: column 'images' holds a str, expected a list of images"),
        ({"images": [3]}, "line 2: column 'images' holds a int, expected the path of an image"),
        ({"messages": turns([{"type": "image", "url": "a.png"}], "red")}, "it has images in blocks and in the column"),
        ({"messages": turns([{"text": "a"}], "red")}, "message 1 of column 'messages' holds a block without a type"),
        (
            {"messages": turns([PLACE, {"type": "video"}], "red")},
            "message 1 of column 'messages' holds a block of type 'video'",
        ),
        ({"messages": turns([PLACE, TEXT], "<image>")}, "does not match number of image placeholders"),
        ({"messages": [*turns([PLACE, TEXT], "red"), CALL]}, "line 2: it calls tools, which rows with images cannot"),
        ({"tools": [{"type": "function"}]}, "it has tools, which rows with images cannot have"),
        (
            {"messages": [*turns([PLACE, TEXT], "red")[:1], {**turns("", "red")[1], "weight": 0}]},
            "a message has weight 0, which rows with images cannot have",
        ),
    ],
)
def test_bad_rows_are_named_before_the_model_is_loaded(load, tmp_path, row, message):
    good, *_ = rows_of(tmp_path, 1)
    data = write_rows(tmp_path / "rows.jsonl", [good, {**good, **row}])
    with pytest.raises(DataError, match=message):
        load(data)
    assert len(load(data, skip_bad_rows=True).train) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"packing": True}, "packing: rows with images stay rows of their own"),
        ({"chat_template_path": "default"}, "chat_template_path default: places no images"),
        ({"model": "Llama"}, "of type llama, which takes no images, and the rows have some"),
        ({"dataset_format": "text"}, "text with images, expected messages"),
    ],
)
def test_settings_that_images_cannot_have_are_refused(load, language_models, tmp_path, settings, message):
    rows = [{**row, "text": "red"} for row in rows_of(tmp_path, 1)]
    if "model" in settings:
        settings["model"] = language_models[settings["model"]]
    with pytest.raises((ConfigError, DataError), match=message):
        load(write_rows(tmp_path / "rows.jsonl", rows), **{"dataset_format": "messages", **settings})


def test_images_that_would_be_lost_are_refused(load, language_models, tmp_path):
    row = {"prompt": "What colour?", "completion": "red", "image": None}
    data = write_rows(tmp_path / "rows.jsonl", [row, {**row, "image": "pictures/0.png"}])
    lost = (
        "line 2: column 'image' is not empty, and this run trains on texts .sft on images, too, if the first row has"
    )
    with pytest.raises(DataError, match=lost):
        load(data, model=language_models["Llama"])
    answers = [{**each, "chosen": "red", "rejected": "blue"} for each in (row, {**row, "image": "pictures/0.png"})]
    with pytest.raises(DataError, match=lost):
        load(write_rows(tmp_path / "answers.jsonl", answers), model=language_models["Llama"], task="dpo")
    row = {"text": "What colour?", "image": None}
    texts = write_rows(tmp_path / "texts.jsonl", [row, {**row, "image": "pictures/0.png"}])
    for task in ("pretrain", "sft"):
        with pytest.raises(DataError, match=lost):
            load(texts, model=language_models["Llama"], task=task)


def test_a_batch_that_cannot_be_made_says_why(load, tiny_llava, tmp_path):
    from transformers import AutoProcessor
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    from hf_zero.recipes.data.images import with_pixels

    def refuses(rows: list):
        raise ValueError("Mismatch in `image` token count")

    with pytest.raises(DataError, match="images: Mismatch in `image` token count; correct them, or set a larger"):
        with_pixels(refuses, [])
    rows = list(load(write_rows(tmp_path / "rows.jsonl", rows_of(tmp_path, 1))).train)
    processor = AutoProcessor.from_pretrained(tiny_llava)
    collate = partial(DataCollatorForVisionLanguageModeling, processor, assistant_only_loss=True)
    assert processor.tokenizer.eos_token_id in with_pixels(collate(), rows)["labels"][0]
    with pytest.raises(DataError, match="no token of the row of .*0.png counts within max_length 9; set a larger"):
        with_pixels(collate(max_length=9), rows)
    Path(rows[0]["images"][0]["path"]).write_bytes(b"no image")
    with pytest.raises(DataError, match="0.png: UnidentifiedImageError"):
        with_pixels(collate(), rows)


def test_an_image_too_large_to_decode_is_a_bad_row(load, tmp_path, monkeypatch):
    data = write_rows(tmp_path / "rows.jsonl", rows_of(tmp_path, 1))
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 8)
    with pytest.raises(DataError, match="line 1: column 'images': no image .*0.png: DecompressionBombError"):
        load(data)


def test_a_name_that_two_folders_have_is_refused(tmp_path):
    from hf_zero.recipes.data.images import find_image

    folders = (tmp_path / "a", tmp_path / "b")
    for folder in folders:
        folder.mkdir()
        rows_of(folder, 1)
    whole = str(folders[1] / "pictures" / "0.png")
    assert find_image(whole, folders, "images")["path"] == whole
    with pytest.raises(ValueError, match="'images': pictures/0.png may be .*/a/pictures/0.png or .*/b/pictures/0.png"):
        find_image("pictures/0.png", folders, "images")


def test_generate_and_chat_answer_texts_alone(tiny_llava, tmp_path, capsys):
    data = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "What colour?", "image": "0.png"}])
    argv = ["generate", str(tiny_llava), "--use_cpu", f"--output={tmp_path / 'answers.jsonl'}", "--max_new_tokens=2"]
    reset_accelerate()
    assert main([*argv, f"--prompts={data}"]) == 1
    assert "column 'image': generate does not read images; leave it out" in capsys.readouterr().err
    reset_accelerate()
    assert main([*argv, f"--prompts={write_rows(tmp_path / 'texts.jsonl', [{'prompt': 'What colour?'}])}"]) == 0
