"""The model card, which describes the training run to readers of the model's repository."""

import html
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData
from transformers import Trainer
from transformers.modelcard import TrainingSummary

from hf_zero.checkpoint.adapters import is_adapter_model
from hf_zero.engine import MemoryReport
from hf_zero.trainer.disk_space import checkpoints_in, complete_run


TAGS = ("hf_zero", "zero")
MIB = 2**20
MEMORY_CLASSES = (
    ("parameters", "parameter_nbytes"),
    ("gradients", "gradient_nbytes"),
    ("optimizer state", "optimizer_nbytes"),
    ("reused buffers", "buffer_nbytes"),
)
# Generic folder names: the card shows the parent folder too.
COMMON_FOLDER = re.compile(r"(final_?)?model|checkpoint-\d+|final|best|last|outputs?")
# Entries of time and progress; all other names that begin with "eval_" are metrics.
NO_METRICS = re.compile(r"eval_(runtime|.*_per_second|model_preparation_time)$")


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run. The card omits values that are `None` or empty."""

    model_name: str
    base_model: str | None = None  # the fine-tuned model: a Hub id or a local name
    base_on_hub: bool = True
    datasets: tuple[str, ...] = ()  # display names
    dataset_ids: tuple[str, ...] = ()  # Hub ids
    zero_stage: int | None = None
    num_ranks: int | None = None
    precision: str | None = None  # such as "bf16 with fp32 masters"
    train_seconds: float | None = None  # wall time
    num_steps: int | None = None  # optimizer steps
    memory: tuple[MemoryReport, ...] = ()  # by rank
    metrics: Mapping[str, float] = field(default_factory=dict)  # the last evaluation, and the training loss
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)  # by package
    metadata: Mapping[str, Any] = field(default_factory=dict)  # YAML metadata: language, license, pipeline_tag
    tags: tuple[str, ...] = ()  # in addition to hf_zero's tags
    library: str = "transformers"  # loads the model
    sections: Mapping[str, str] = field(default_factory=dict)  # additional Markdown, by title


def card_text(facts: RunFacts) -> str:
    """Returns the card: YAML metadata followed by Markdown. The result depends only on `facts`."""
    sections = [
        f"---\n{_head(facts)}\n---\n\n# {as_text(facts.model_name)}\n\n{_summary(facts)}",
        _table("Results", "metric", facts.metrics),
        _table("Training", "", _training_rows(facts)),
        _memory_section(facts),
        _table("Hyperparameters", "", facts.hyperparameters),
        *(f"## {title}\n\n{text}" for title, text in facts.sections.items()),
        _table("Versions", "package", facts.versions),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def facts_of(trainer: Trainer, memory: Iterable[MemoryReport] = (), **given: Any) -> RunFacts:
    """Collects the facts of a trainer on rank 0. Not a collective.

    Args:
        trainer (`Trainer`): A trainer with `ZeroTrainerMixin`.
        memory (`Iterable[MemoryReport]`): Reports of all ranks. If empty, this rank's report is used.
        given: Arguments of `create_model_card`. They take precedence over collected values.
    """
    # Without tags, transformers uses the name of the dataset builder, which is no Hub id and may be None.
    tags = _listed(given.get("dataset_tags"))
    summary = TrainingSummary.from_trainer(trainer, **given)
    history = trainer.state.log_history
    name = summary.finetuned_from or getattr(trainer.model.config, "_name_or_path", "") or ""
    base, on_hub = _base(name) if name else (None, False)
    task = summary.tasks if isinstance(summary.tasks, str) else None
    return RunFacts(
        model_name=summary.model_name or "model",
        base_model=base,
        base_on_hub=on_hub,
        datasets=_listed(given.get("dataset")) or tags,
        dataset_ids=tags,
        zero_stage=trainer.args.zero_stage,
        num_ranks=trainer.args.world_size,
        precision=_precision(trainer),
        train_seconds=_last(history, "train_runtime"),
        num_steps=trainer.state.global_step or None,
        memory=tuple(memory) or (trainer.memory_report(),),
        metrics=_metrics(history),
        hyperparameters=_hyperparameters(trainer, summary),
        versions=_versions("peft" if is_adapter_model(trainer.model) else None),
        metadata={"language": summary.language, "license": summary.license, "pipeline_tag": task},
        tags=_listed(summary.tags),
        library="peft" if is_adapter_model(trainer.model) else "transformers",
    )


def facts_of_folder(folder: Path, model_name: str) -> RunFacts:
    """Collects the facts from the JSON files of a folder and its newest checkpoint: configs, manifest and trainer
    state."""
    sources = (folder, *checkpoints_in(folder))
    config, adapter = _json(folder / "config.json"), _json(folder / "adapter_config.json")
    state = next(filter(None, (_json(source / "trainer_state.json") for source in sources)), {})
    run = next(filter(None, map(complete_run, sources)), None)
    base = adapter.get("base_model_name_or_path")
    base_model, base_on_hub = _base(base) if base else (base, False)
    history = state.get("log_history") or []
    return RunFacts(
        model_name=model_name,
        base_model=base_model,
        base_on_hub=base_on_hub,
        zero_stage=run.stage if run else None,
        num_ranks=run.num_ranks if run else None,
        precision="weights in " + ", ".join(run.weight_dtypes) if run else None,
        train_seconds=_last(history, "train_runtime"),
        num_steps=state.get("global_step"),
        metrics=_metrics(history),
        versions={"hf_zero": _version("hf-zero"), "transformers": config.get("transformers_version", "")},
        library="peft" if adapter else "transformers",
    )


def _head(facts: RunFacts) -> str:
    stage = () if facts.zero_stage is None else (f"zero-stage-{facts.zero_stage}",)
    return ModelCardData(
        library_name=facts.library,
        base_model=facts.base_model if facts.base_on_hub else None,
        datasets=list(facts.dataset_ids) or None,
        tags=list(dict.fromkeys((*facts.tags, *TAGS, *stage))),
        **{key: value for key, value in facts.metadata.items() if value},
    ).to_yaml()


def _summary(facts: RunFacts) -> str:
    how = "" if facts.zero_stage is None else f" with ZeRO stage {facts.zero_stage} by hf_zero"
    what = (
        f"This model was fine-tuned from {_as_code(facts.base_model)}"
        if facts.base_model
        else "This model was trained"
    )
    data = f" on {', '.join(map(as_text, facts.datasets))}" if facts.datasets else ""
    return f"{what}{data}{how}."


def _training_rows(facts: RunFacts) -> dict[str, Any]:
    return {
        "ZeRO stage": facts.zero_stage,
        "ranks": facts.num_ranks,
        "precision": facts.precision,
        "optimizer steps": facts.num_steps,
        "training time": None if facts.train_seconds is None else f"{facts.train_seconds:.1f} s",
    }


def _memory_section(facts: RunFacts) -> str:
    """Returns a table of MiB per tensor class and rank, compared with plain data parallelism."""
    if not facts.memory:
        return ""
    ranks = [f"rank {rank}" for rank in range(len(facts.memory))]
    lines = [_row("MiB per rank, measured", *ranks, "DDP"), _row("---", *["--:"] * (len(ranks) + 1))]
    for title, name in MEMORY_CLASSES:
        held = [getattr(report, name) for report in facts.memory]
        ddp = getattr(facts.memory[0], f"ddp_{name}", 0)
        lines.append(_row(title, *(f"{nbytes / MIB:.2f}" for nbytes in (*held, ddp))))
    note = "Memory that a rank holds between two steps, without activations."
    return "## Memory\n\n" + "\n".join(lines) + f"\n\n{note}"


def _table(title: str, what: str, rows: Mapping[str, Any]) -> str:
    rows = {name: value for name, value in rows.items() if value not in (None, "")}
    if not rows:
        return ""
    lines = [_row(what, "value" if what else ""), _row("---", "---")]
    lines += [_row(name, f"{value:.4g}" if isinstance(value, float) else value) for name, value in rows.items()]
    return f"## {title}\n\n" + "\n".join(lines)


def _row(*cells: Any) -> str:
    return "| " + " | ".join(as_text(cell).replace("|", "\\|") for cell in cells) + " |"


def as_text(value: Any) -> str:
    """Escapes a value for one line of Markdown, so that it creates no HTML, link or image."""
    return html.escape(" ".join(str(value).split()), quote=False).replace("[", "\\[").replace("`", "\\`")


def _as_code(text: str) -> str:
    return f"`{' '.join(text.replace('`', ' ').split())}`"


def fenced(text: str, language: str = "") -> str:
    """Returns a fenced code block. The fence is longer than any run of backticks in the text."""
    quotes = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{quotes}{language}\n{text.rstrip()}\n{quotes}"


def _base(name: str) -> tuple[str, bool]:
    """Returns the display name of a base model, and whether it is a Hub id."""
    in_cache = re.search(r"models--([^/]+)--([^/]+)/snapshots/", name)
    if in_cache:
        return f"{in_cache[1]}/{in_cache[2]}", True
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None and not Path(name).exists():
        return name, True
    parts = Path(name).parts[-2:]
    return "/".join(parts if COMMON_FOLDER.fullmatch(parts[-1]) else parts[-1:]), False


def _hyperparameters(trainer: Trainer, summary: TrainingSummary) -> dict[str, Any]:
    found = dict(summary.hyperparameters or {})
    if "distributed_type" in found:  # transformers calls every device a GPU
        found["distributed_type"] = f"multi-{trainer.args.device.type}".replace("cuda", "GPU").replace("cpu", "CPU")
    return found


def _precision(trainer: Trainer) -> str:
    half = "bf16" if trainer.args.bf16 else "fp16" if trainer.args.fp16 else None
    masters = {str(p.dtype).removeprefix("torch.") for p in trainer.model.parameters() if p.requires_grad}
    return f"{half} with fp32 masters" if half else ", ".join(sorted(masters))


def _metrics(history: list[dict]) -> dict[str, float]:
    """Returns the last value of each evaluation metric, and the mean training loss."""
    metrics = {name: value for entry in history for name, value in entry.items() if name.startswith("eval_")}
    metrics = {name: value for name, value in metrics.items() if not NO_METRICS.match(name)}
    loss = _last(history, "train_loss")
    return {**metrics, **({} if loss is None else {"train_loss": loss})}


def _last(history: list[dict], key: str) -> float | None:
    return next((entry[key] for entry in reversed(history) if key in entry), None)


def _versions(extra: str | None) -> dict[str, str]:
    names = ("transformers", "accelerate", "datasets", *([extra] if extra else []))
    return {"hf_zero": _version("hf-zero"), "torch": torch.__version__, **{name: _version(name) for name in names}}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _listed(value: str | Iterable[str] | None) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(map(str, value))


def _json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # the card omits what cannot be read
    return content if isinstance(content, dict) else {}
