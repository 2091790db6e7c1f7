"""Tasks run as `run_task` runs them, in ranks that have imported all they need."""

from pathlib import Path

import datasets
import torch
import transformers

from tests.recipes.cases import Loaded


THEIR_SETTINGS = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "logging_steps": 1}
THEIR_SETTINGS["disable_tqdm"] = True
QUIET = ["--report_to", "none", "--save_strategy", "no", "--disable_tqdm", "true", "--logging_steps", "1"]


def run(task: str, cache: Path, argv: list[str], do: str = "train") -> dict:
    """Trains or evaluates, or stops once the rows are tokenized.

    Args:
        task (`str`): a key of `TASKS`.
        cache (`Path`): for `datasets`.
        argv (`list[str]`): the command line.
        do (`str`): "train", "evaluate", "data".

    Returns:
        `dict`: "losses" of all steps, "log" of all that was logged, "eval_loss", "rows" that are trained on, "notes",
        "sample".
    """
    datasets.config.HF_DATASETS_CACHE = cache
    loaded = Loaded([task, *argv, *QUIET])
    data, trainer = loaded.data, loaded.make_trainer()
    found = {"notes": data.notes, "sample": data.sample}
    if do == "data":
        return {**found, "rows": [dict(row) for _, row in zip(range(50), trainer.train_dataset)]}
    if do == "train":
        trainer.train()
        trainer.save_model()
        found["log"] = trainer.state.log_history
        found["losses"] = [line["loss"] for line in found["log"] if "loss" in line]
    if data.test is not None:
        found["eval_loss"] = trainer.evaluate()["eval_loss"]
    return found


def trained_by_trl(name: str, model, rows, processing_class, folder: Path, settings: dict, **parts):
    """Trains the same rows with TRL's own trainer, such as "SFT", in this process. Returns the trainer."""
    import trl

    settings = {**THEIR_SETTINGS, "output_dir": f"{folder}/theirs", **settings}
    trainer = getattr(trl, f"{name}Trainer")(
        model=model,
        args=getattr(trl, f"{name}Config")(**settings),
        train_dataset=rows,
        processing_class=processing_class,
        **parts,
    )
    trainer.train()
    return trainer


def mean_token_loss(folder: Path, rows: list[dict]) -> float:
    """Of each row for itself, by plain transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for row in rows:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row.get("labels", row["input_ids"])])
        number = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=labels).loss) * number
        count += number
    return total / count
