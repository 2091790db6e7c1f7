"""Classes of texts and images, from all kinds of sources to a model that tells them apart."""

import json
import re
import shutil
from pathlib import Path

import datasets
import pytest
import torch

from hf_zero.errors import CheckpointError, ConfigError, DataError
from tests.recipes.cases import Loaded
from tests.recipes.ranks import logged, trained


TEXTS = [
    "the soup was cold",
    "the film was dull",
    "the waiter was kind",
    "the actor sang",
    "a hot soup",
    "a long film",
]
LABELS = [0, 1, 0, 1, 0, 1]
NAMES = ["food", "film"]


def hub_folder(folder: Path, train: dict, test: dict | None = None, names=NAMES) -> Path:
    """A folder laid out as a data set on the hub, whose label column declares its classes."""
    for split, columns in (("train", train), ("test", test)):
        if columns is not None:
            rows = datasets.Dataset.from_dict(columns)
            if names:
                rows = rows.cast_column("label", datasets.ClassLabel(names=names))
            (folder / "data").mkdir(parents=True, exist_ok=True)
            rows.to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.fixture
def load(tiny_model, tmp_path, monkeypatch):
    """Reads rows as a run would, before it loads the model."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def call(**settings):
        settings = {"model_name_or_path": tiny_model, "output_dir": tmp_path / "out", **settings}
        call.loaded = Loaded(["classify", *(f"--{name}={value}" for name, value in settings.items())])
        return call.loaded.data

    return call


@pytest.mark.quick
def test_names_come_from_the_data_set_and_splits_by_name(load, tmp_path):
    rows = {"text": TEXTS, "label": LABELS}
    folder = hub_folder(tmp_path / "set", rows, {"text": TEXTS[:2], "label": [1, 0]})
    data = load(dataset_name=folder, dataset_test_split="test")
    assert data.train["labels"] == LABELS and data.test["labels"] == [1, 0]
    assert data.notes == ["6 training and 2 test rows, 2 classes: food, film"]
    model = load.loaded.load_model()
    assert model.config.id2label == {0: "food", 1: "film"}
    assert data.sample == "'the soup was cold' -> food"


def test_a_label_out_of_range_is_named(load, tmp_path):
    """As in the test split of GLUE's data sets, whose labels are secret."""
    folder = hub_folder(tmp_path / "set", {"text": TEXTS, "label": LABELS}, {"text": TEXTS[:2], "label": [1, -1]})
    with pytest.raises(DataError, match=r"set, split test: row 2: class '-1' of column 'label', expected one of 0, 1"):
        load(dataset_name=folder, dataset_test_split="test")
    data = load(dataset_name=folder, dataset_test_split="test", skip_bad_rows=True)
    assert data.test["labels"] == [1] and data.notes[1] == "1 bad row left out"


def test_whole_numbers_are_classes_in_their_order(load, tmp_path):
    rows = {"text": [f"{text} {n}" for n in range(4) for text in TEXTS], "label": [10, 2, 10, 2, 10, 2] * 4}
    data = load(dataset_name=hub_folder(tmp_path / "set", rows, names=None))
    assert data.extra["classes"].names == ["2", "10"]
    assert set(data.train["labels"]) == {0, 1}


@pytest.mark.parametrize(
    ("labels", "of_test", "message"),
    [
        (LABELS, [2, *LABELS[1:]], "split test: row 1: class '2' of column 'label', expected one of 0, 1"),
        ([0.5] * 6, [0.5] * 6, "a float in column 'label', expected a text or a whole number"),
        ([[0, 1]] * 6, [[0, 1]] * 6, "a list in column 'label', expected a text or a whole number"),
        ([1] * 6, [1] * 6, r"\d training and \d test rows, 1 classes; expected 2 classes or more"),
    ],
)
def test_a_column_that_holds_no_classes_is_refused(load, tmp_path, labels, of_test, message):
    columns = {"text": TEXTS, "label": labels}, {"text": TEXTS, "label": of_test}
    with pytest.raises(DataError, match=message):
        load(dataset_name=hub_folder(tmp_path / "set", *columns, None), dataset_test_split="test")


def test_json_lines_of_pairs_are_read_and_bad_ones_named(load, tmp_path):
    path = tmp_path / "rows.jsonl"
    good = [f'{{"a": "the soup {n}", "b": "was hot", "label": "{"yes" if n % 2 else "no"}"}}' for n in range(12)]
    path.write_text("\n".join([*good, "", '{"a": "x", "label": "yes"}']), encoding="utf-8")
    columns = {"text_column": "a", "text_pair_column": "b"}
    with pytest.raises(DataError, match="rows.jsonl: line 14: nothing in column 'b'"):
        load(train_file=path, **columns)
    data = load(train_file=path, skip_bad_rows=True, **columns)
    assert len(data.train) + len(data.test) == 12
    assert data.extra["classes"].names == ["no", "yes"]
    inputs, test = data.extra["inputs"], data.extra["test"]
    assert inputs.shown(test[0]) == {"text": test[0]["a"], "text_pair": "was hot"}
    assert len(data.train[0]["input_ids"]) == 5


def test_how_much_is_cut_is_said(load, tmp_path):
    lines = [f'{{"text": "{"soup " * (9 if n in (3, 5) else 2)}{n % 2}", "label": {n % 2}}}' for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    whole = load(train_file=tmp_path / "rows.jsonl", test_file=tmp_path / "rows.jsonl")
    data = load(train_file=tmp_path / "rows.jsonl", test_file=tmp_path / "rows.jsonl", max_length=8)
    lost = sum(len(ids) - 8 for half in (whole.train, whole.test) for ids in half["input_ids"] if len(ids) > 8)
    assert lost and data.notes[1:] == [f"4 rows cut to 8 tokens, {lost} tokens lost"]
    assert len(whole.notes) == 1


def test_a_head_of_another_size_is_replaced_and_another_base_is_not(load, tmp_path, tiny_model):
    from transformers import BertForSequenceClassification

    torch.manual_seed(0)
    BertForSequenceClassification.from_pretrained(tiny_model, num_labels=3).save_pretrained(tmp_path / "three")
    for file in tiny_model.glob("tokenizer*"):
        (tmp_path / "three" / file.name).write_bytes(file.read_bytes())
    folder = hub_folder(tmp_path / "set", {"text": TEXTS, "label": LABELS}, {"text": TEXTS, "label": LABELS})
    load(dataset_name=folder, dataset_test_split="test", model_name_or_path=tmp_path / "three")
    assert load.loaded.load_model().classifier.weight.shape == (2, 16)
    config = tmp_path / "three" / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 16', '"hidden_size": 32'))
    with pytest.raises(CheckpointError, match=r"tensor 'bert\..*' has shape \[.*16.*\], the model's has \[.*32.*\]"):
        load.loaded.load_model()


def test_a_model_that_does_no_classification_is_refused(load, tmp_path, tiny_model):
    folder = hub_folder(tmp_path / "set", {"text": TEXTS, "label": LABELS}, {"text": TEXTS, "label": LABELS})
    load(dataset_name=folder, dataset_test_split="test")
    config = (tiny_model / "config.json").read_text()
    try:
        (tiny_model / "config.json").write_text('{"model_type": "vit"}')
        with pytest.raises(ConfigError, match="of type vit, with which transformers does no text-classification"):
            load.loaded.load_model()
    finally:
        (tiny_model / "config.json").write_text(config)


@pytest.mark.full("slow")
def test_an_adapter_of_a_data_set_as_on_the_hub_learns_on_two_processes(tiny_model, tmp_path):
    texts = [f"{text} {n}" for n in range(8) for text in TEXTS]
    folder = hub_folder(tmp_path / "set", {"text": texts, "label": LABELS * 8}, {"text": TEXTS, "label": LABELS})
    settings = {"model_name_or_path": tiny_model, "dataset_name": folder, "dataset_test_split": "test"}
    settings |= {"use_peft": True, "lora_r": 4, "learning_rate": 0.02, "num_train_epochs": 4, "zero_stage": 2}
    said = trained("classify", tmp_path, **settings)
    assert re.search(r"test accuracy: [\d.]+ before, 1.000 after", said)
    assert "saved to out\nmerge it: " in said


# Images


@pytest.fixture(scope="module")
def tiny_vit(tmp_path_factory) -> Path:
    """A vision transformer of two layers, and its image processor."""
    pytest.importorskip("PIL")
    from transformers import ViTConfig, ViTImageProcessorPil, ViTModel

    folder = tmp_path_factory.mktemp("tiny_vit")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    ViTModel(ViTConfig(image_size=8, patch_size=4, **sizes), add_pooling_layer=False).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder)
    return folder


@pytest.fixture
def image_folder(tmp_path) -> Path:
    """Pictures in a folder for each class: one is bright on the left, one on the right."""
    from PIL import Image

    root = tmp_path / "pictures"
    for split, count in (("train", 24), ("test", 8)):
        for side in ("left", "right"):
            (root / split / side).mkdir(parents=True)
            for number in range(count):
                image = Image.new("RGB", (12, 12), (number, 2 * number, 30))
                image.paste((250, 240 - number, 230), (0, 0, 6, 12) if side == "left" else (6, 0, 12, 12))
                image.save(root / split / side / f"{number}.png")
    return root


@pytest.mark.full("slow")
def test_two_processes_learn_to_tell_images_apart(tiny_vit, image_folder, tmp_path):
    settings = {"model_name_or_path": tiny_vit, "dataset_name": image_folder, "dataset_test_split": "test"}
    said = trained("classify", tmp_path, learning_rate=0.01, num_train_epochs=6, zero_stage=3, **settings)
    assert "48 training and 16 test rows, 2 classes: left, right" in said
    assert re.search(r"test accuracy: [\d.]+ before, 1.000 after", said)
    losses = logged(tmp_path / "out", "loss")
    assert logged(tmp_path / "out", "eval_accuracy")[-1] == 1
    assert losses[-1] < losses[0] / 2
    assert "saved to out\ntry it: " in said

    from transformers import pipeline

    found = pipeline("image-classification", str(tmp_path / "out"))(str(image_folder / "test" / "right" / "3.png"))
    assert found[0]["label"] == "right"


def test_a_fifth_of_the_images_is_held_out_and_equal_ones_stay_together(load, tiny_vit, image_folder):
    for copied in range(30, 50):
        (image_folder / "train" / "left" / f"{copied}.png").write_bytes(
            (image_folder / "train" / "left" / "1.png").read_bytes()
        )
    data = load(dataset_name=image_folder, model_name_or_path=tiny_vit)
    assert len(data.train) + len(data.test) == 68 and 1 <= len(data.test) < 40
    train, test = ({row["pixel_values"].numpy().tobytes() for row in half} for half in (data.train, data.test))
    assert not train & test
    assert data.train[0]["pixel_values"].shape == (3, 8, 8)


def test_a_file_that_is_no_image_is_named(load, tiny_vit, image_folder):
    broken = image_folder / "train" / "left" / "0.png"
    broken.write_bytes(b"no image")
    with pytest.raises(DataError, match=f"split train: row 1: .*{broken}: UnidentifiedImageError"):
        load(dataset_name=image_folder, model_name_or_path=tiny_vit)
    data = load(dataset_name=image_folder, model_name_or_path=tiny_vit, skip_bad_rows=True)
    assert len(data.train) + len(data.test) == 47


def test_images_have_no_length_to_group_by(load, tiny_vit, image_folder):
    with pytest.raises(ConfigError, match="group_by_length: images have no length"):
        load(dataset_name=image_folder, model_name_or_path=tiny_vit, train_sampling_strategy="group_by_length")


def test_images_without_pillow_are_refused(load, tiny_vit, image_folder, monkeypatch):
    monkeypatch.setattr("hf_zero.recipes.data.images.is_vision_available", lambda: False)
    with pytest.raises(ConfigError, match=r"pip install 'hf-zero\[vision\]'"):
        load(dataset_name=image_folder, model_name_or_path=tiny_vit)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hidden_layers": "2"}, "model: its config does not load .*num_hidden_layers"),
        ({"hidden_act": "none"}, r"model: does not load for text-classification \(KeyError\('none'\)\)"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_in_one_line(load, tiny_model, csv_file, tmp_path, changed, message):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **changed}), encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        load(model_name_or_path=folder, train_file=csv_file)
        load.loaded.load_model()
    assert "\n" not in str(caught.value)
