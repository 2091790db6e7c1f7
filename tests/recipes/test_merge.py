"""An adapter and its base become one model that needs neither."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

from hf_zero.recipes.cli import main


peft = pytest.importorskip("peft")

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory):
    """A LoRA adapter with a new head of three classes on the tiny encoder, moved as training would have."""
    torch.manual_seed(1)
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=3)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    model = peft.get_peft_model(base, config)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.1)
    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    model.save_pretrained(folder)
    return folder, model.eval()


@pytest.fixture
def adapter(trained, tmp_path):
    return shutil.copytree(trained[0], tmp_path / "adapter")


@pytest.fixture
def merge(adapter, tmp_path, capsys):
    """Runs `merge`; gives the exit code and what was said. It leaves nothing beside `output_dir`."""

    def call(*flags: str) -> tuple[int, str]:
        code = main(["merge", str(adapter), f"--output_dir={tmp_path / 'out'}", *flags])
        output = capsys.readouterr()
        assert not list(tmp_path.glob(".merging*"))
        assert output.err.count("\n") == (0 if code == 0 else 1), output.err
        return code, output.out + output.err

    return call


INPUT = {"input_ids": torch.arange(2, 12).view(2, 5), "attention_mask": torch.ones(2, 5, dtype=torch.long)}


@pytest.mark.quick
def test_the_merged_model_computes_what_the_adapted_one_does(merge, trained, tmp_path):
    code, said = merge()
    assert code == 0, said
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        expected, found = trained[1](**INPUT).logits, merged(**INPUT).logits
    assert found.shape == (2, 3)
    # Merging adds B A to W once instead of in every forward: fp32 rounding of sums over 16 elements.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("the soup").input_ids
    assert "6 of" in said  # query and value of two layers, weight and bias of the head


@pytest.mark.parametrize("whose", ["base", "adapter"])
@pytest.mark.full("more cases", after=1)
def test_a_model_of_images_keeps_its_processor(whose, tmp_path, capsys, tiny_model):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    base = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=3, **sizes))
    base.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "base")  # as a base of images and texts has
    base = ViTForImageClassification.from_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["classifier"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    ViTImageProcessorPil(size={"height": 8, "width": 8}, image_mean=[0.25] * 3).save_pretrained(tmp_path / whose)
    assert main(["merge", str(tmp_path / "adapter"), f"--output_dir={tmp_path / 'out'}"]) == 0, capsys.readouterr()
    found = AutoImageProcessor.from_pretrained(tmp_path / "out")
    assert found.size["height"] == 8 and list(found.image_mean) == [0.25] * 3


def test_the_merged_model_is_verified(merge, tmp_path, capsys):
    assert merge()[0] == 0
    assert main(["verify", str(tmp_path / "out")]) == 0


def test_dtype_is_that_of_the_saved_tensors(merge, tmp_path):
    assert merge("--dtype=bfloat16")[0] == 0
    dtypes = {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()}
    assert dtypes == {torch.bfloat16}
    assert AutoModel.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


def test_an_adapter_that_changes_nothing_is_refused(merge, adapter, tmp_path, tiny_model):
    base = AutoModel.from_pretrained(tiny_model)
    shutil.rmtree(adapter)
    peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["query"])).save_pretrained(adapter)
    code, said = merge()
    assert code == 1
    assert "the adapter changes none of the" in said
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_replaced_only_when_asked(merge, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine", encoding="utf-8")
    code, said = merge()
    assert code == 2
    assert "is not empty; give another, or --overwrite" in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious.txt"]
    assert merge("--overwrite")[0] == 0
    assert not (tmp_path / "out" / "precious.txt").exists()
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_what_was_there_stays_when_saving_fails(merge, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine", encoding="utf-8")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    code, said = merge("--overwrite")
    assert code == 1
    assert "No space left on device" in said
    assert (tmp_path / "out" / "precious.txt").read_text(encoding="utf-8") == "mine"


def _config(adapter, **changes) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def test_the_base_can_be_given(merge, adapter, tiny_model):
    _config(adapter, base_model_name_or_path=None)
    code, said = merge()
    assert code == 2
    assert "names no base model; give --base_model_name_or_path" in said
    assert merge(f"--base_model_name_or_path={tiny_model}")[0] == 0


def test_a_base_that_lacks_parameters_is_refused(merge, tiny_model, tmp_path):
    base = shutil.copytree(tiny_model, tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    del tensors["encoder.layer.0.output.dense.weight"]
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    code, said = merge(f"--base_model_name_or_path={base}")
    assert code == 1
    assert "neither in it nor in the adapter (bert.encoder.layer.0.output.dense.weight)" in said


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"base_model_name_or_path": "./gone"}, 2, "base_model_name_or_path './gone': no such folder"),
        ({"peft_type": "PROMPT_TUNING"}, 1, "learned prompts"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_named(merge, adapter, changes, code, message):
    _config(adapter, **changes)
    found, said = merge()
    assert found == code and message in said


@pytest.mark.parametrize(
    ("flag", "message"),
    [("--dtype=int8", "dtype: invalid choice: int8"), ("--output_dir=", "output_dir: not set")],
)
def test_a_bad_setting_is_exit_code_2(merge, flag, message):
    code, said = merge(flag)
    assert code == 2
    assert message in said.replace("'", "")


def test_a_model_that_is_no_adapter_is_refused(merge, adapter, tiny_model):
    shutil.rmtree(adapter)
    shutil.copytree(tiny_model, adapter)
    code, said = merge()
    assert code == 1
    assert "there is no adapter_config.json" in said


def test_verify_takes_adapters(adapter, capsys):
    assert main(["verify", str(adapter)]) == 0
    assert "LORA on BertForSequenceClassification" in capsys.readouterr().out


def _first_b(tensors) -> str:
    return next(name for name in tensors if "lora_B" in name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(_first_b(tensors)), "1 tensors of the adapter are missing"),
        (
            lambda tensors: tensors.update({"base_model.model.extra.lora_A.weight": torch.ones(2)}),
            "1 tensors of the adapter are unexpected",
        ),
        (lambda tensors: tensors.update({_first_b(tensors): torch.ones(3, 2)}), "size mismatch"),
    ],
)
def test_verify_names_tensors_that_are_not_the_adapters(adapter, capsys, change, message):
    tensors = load_file(adapter / WEIGHTS)
    change(tensors)
    save_file(tensors, adapter / WEIGHTS, metadata={"format": "pt"})
    assert main(["verify", str(adapter)]) == 1
    assert message in capsys.readouterr().out
