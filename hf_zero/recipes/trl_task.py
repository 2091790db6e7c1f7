"""What the tasks have in common whose trainer is one of TRL's: rows, model, adapter, trainer, and what is said."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from importlib.metadata import version
from itertools import groupby
from typing import Any, ClassVar, TypeAlias

import trl
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainingArguments,
)

from hf_zero.errors import ConfigError, DataError, HfZeroError
from hf_zero.recipes.data.formats import TEMPLATE_KWARGS, UNTRAINED, Format, read_template, render, template_notes
from hf_zero.recipes.data.images import has_images, image_column
from hf_zero.recipes.data.mixture import Mixture, MixtureArguments, check_mixture, load_each
from hf_zero.recipes.data.preferences import Answers, format_of
from hf_zero.recipes.data.rows import BadRow, Data, Rows, encode_rows, is_reused, plural, quiet_datasets
from hf_zero.recipes.data.sources import Stream, check_stream, load_rows
from hf_zero.recipes.language_models import (
    LoadArguments,
    check_language_model,
    check_source,
    config_of,
    load_language_model,
    load_tokenizer,
    named_model,
)
from hf_zero.recipes.loading import check_positions, positions_of, resolve_config
from hf_zero.recipes.lora import (
    AdapterArguments,
    FreezingArguments,
    check_adapter,
    check_freezing,
    check_quantization,
    head_of,
    lora_config,
)
from hf_zero.recipes.parser import option
from hf_zero.recipes.report import usage_command
from hf_zero.recipes.task import Task
from hf_zero.trl import ZeroTrlArgumentsMixin, ZeroTrlTrainerMixin


ProcessingClass: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin

# Keys of TRL's configs that change how a run computes, and not what it learns.
_INDECISIVE = frozenset(
    "model_init_kwargs trust_remote_code dataset_num_proc pad_to_multiple_of padding_free activation_offloading "
    "precompute_ref_log_probs precompute_ref_batch_size cache_implementation log_completions log_multimodal "
    "num_completions_to_print log_unique_prompts log_completions_hub_repo ds3_gather_for_generation".split()
)


@dataclass
class TrlArguments(AdapterArguments, FreezingArguments, LoadArguments, MixtureArguments):
    """What a task takes beside the configuration of its trainer, which may have a `chat_template_path` of its own."""

    samples: int = option(3, "Number of test rows to answer before and after training.")


@dataclass
class TrlTemplateArguments(TrlArguments):
    """Likewise, where it has none."""

    chat_template_path: str | None = option(
        None, "A Jinja file that replaces the tokenizer's chat template, or default for hf_zero's."
    )


@dataclass
class DataSource:
    """One of the data sets that are trained on."""

    rows: Rows  # as they were read
    form: Format  # what they are
    training: Any  # as they are for these rows alone
    data: Any = None  # what the trainer takes of them


class TrlTask(Task):
    """A task that one of TRL's trainers trains."""

    trainer: ClassVar[type[ZeroTrlTrainerMixin]]  # of `hf_zero.trl`
    formats: ClassVar[tuple[Answers, ...]] = ()  # how rows may be read, the first that fits
    test_line: ClassVar[str]  # what to say of the metrics of the test rows, for `str.format`
    decisive_too: ClassVar[tuple[str, ...]] = ()  # keys of `TrainingArguments` that decide what is learned
    Arguments: type[TrlArguments] = TrlTemplateArguments  # keys beside those of the trainer's configuration

    @property
    def Training(self) -> type[ZeroTrlArgumentsMixin]:
        """The class of the training arguments."""
        return self.trainer.config_class

    @property
    def decisive(self) -> tuple[str, ...]:
        """Which of the training arguments decide what is learned: TRL's own but for those of how it is computed."""
        of_trainer = {each.name for each in fields(TrainingArguments)}
        found = [base for base in self.Training.__mro__ if base.__module__.startswith("trl.")]
        names = {each.name for base in found for each in fields(base)} - of_trainer - _INDECISIVE
        of_engine = ("vllm_", "use_vllm", "use_transformers")
        return (*sorted(name for name in names if not name.startswith(of_engine)), *self.decisive_too)

    def check(self, arguments: Any, training: Mapping[str, Any]) -> None:
        check_mixture(arguments)
        check_adapter(arguments)
        check_freezing(arguments, use_peft=arguments.use_peft)
        check_quantization(arguments, use_peft=arguments.use_peft)
        if (template := _template_path(arguments, training)) is not None:
            read_template(template)
        self._check_training(training)
        if self.generates and arguments.dataset_streaming:
            raise ConfigError("dataset_streaming: prompts are drawn several times each; leave it out")
        check_stream(arguments, training)
        check_language_model(arguments, use_peft=arguments.use_peft)
        (_, name), limit = named_model(arguments), positions_of(config_of(arguments))
        if not self.generates:
            check_positions(name, limit, training["max_length"])
        elif limit is not None and (length := training["max_completion_length"]) >= limit:
            raise ConfigError(
                f"max_completion_length {length}: {name} has {limit} positions for prompt and answer; set less"
            )

    def _check_training(self, training: Mapping[str, Any]) -> None:
        if training["model_init_kwargs"]:
            raise ConfigError("model_init_kwargs: has no effect; give dtype, attn_implementation or model_revision")
        if training["label_smoothing_factor"]:
            loss = self.trainer.__name__.removeprefix("Zero").removesuffix("Trainer")
            own = f"give label_smoothing, that of {loss}'s loss" if "label_smoothing" in training else "leave it out"
            raise ConfigError(f"label_smoothing_factor: has no effect; {own}")
        if training["trust_remote_code"]:
            name = f"hf_zero.trl.{self.trainer.__name__}"
            raise ConfigError(f"trust_remote_code: not supported; train such a model with {name}")

    def load_data(self, arguments: TrlArguments, training: Any) -> Data:
        mixture = Mixture(arguments, training)
        source = ", ".join(mixture.names)
        with training.main_process_first():
            found = load_each(arguments)
            tokenizer = self.load_processing_class(
                next(filter(has_images, found), next(filter(image_column, found), found[0])), arguments
            )
            test_rows = load_rows(arguments, "test")
            sources = [
                DataSource(rows, self.format_of(rows, arguments, training, tokenizer), training)
                for rows in (*found, *([test_rows] if test_rows else []))
            ]
            shown = next((each for each in sources if each.form.is_chat), sources[0])
            chat, tools = _example_chat(shown.form, shown.rows)
            test_source = sources.pop() if test_rows else None
            template = _template_path(arguments, vars(training))
            notes = template_notes(tokenizer, template, chat=chat, tools=tools, source=source)
            if hasattr(training, "chat_template_path"):
                training.chat_template_path = None  # the tokenizer has it now
            notes += self.settle(sources, test_source, tokenizer, training)
            for name, each in zip(mixture.names, sources):
                label = "train" if len(sources) == 1 else f"train, {name}"
                notes += _encode(each, arguments, tokenizer, label)
            if len(sources) > 1:
                notes.append(mixture.note([each.data for each in sources]))
            train = self.joined(sources, mixture)
            if test_source is not None:
                notes += _encode(test_source, arguments, tokenizer, "test")
        firsts = [next(iter(each.data), None) for each in sources]
        if None in firsts:
            raise DataError(f"{mixture.names[firsts.index(None)]}: no good row, expected one at least; correct them")
        return Data(
            train=train,
            test=None if test_source is None else test_source.data,
            processing_class=tokenizer,
            source=source,
            notes=notes,
            sample="\n".join(f"{name}: {value!r}" for name, value in (firsts[0] or {}).items()),
            rows=[each.rows for each in sources],
            extra={
                "prompt": sources[0].form.prompt_of(firsts[0]),
                "sources": sources,
                "test_source": test_source,
                "mixture": mixture,
            },
        )

    def load_processing_class(self, rows: Rows, arguments: TrlArguments) -> ProcessingClass:
        """The tokenizer, or what else makes the inputs of the model."""
        return load_tokenizer(arguments)

    def format_of(self, rows: Rows, arguments: TrlArguments, training: Any, tokenizer: ProcessingClass) -> Format:
        """How rows are read: by the first of the formats all of whose columns they have. Raises [`DataError`] where a
        column is missing."""
        return format_of(self.formats, rows)

    def settle(
        self, sources: list[DataSource], test: DataSource | None, tokenizer: ProcessingClass, training: Any
    ) -> list[str]:
        """Settles what the training arguments leave to the rows, those to test on too. Gives lines about that."""
        return []

    def joined(self, sources: list[DataSource], mixture: Mixture) -> Dataset | IterableDataset:
        """The rows of all data sets, which are of one kind, as the trainer takes them."""
        kinds = {(each.form.name, each.form.is_chat, frozenset(each.form.features)): each for each in sources}
        if len(kinds) > 1:
            found = [
                f"{each.rows.source} has {', '.join(each.form.features)}, {'messages' if is_chat else 'texts'}"
                for (_, is_chat, _), each in kinds.items()
            ]
            raise DataError(f"datasets: {'; '.join(found)}; mix data sets of one kind")
        return mixture.mix([each.data for each in sources])

    def load_model(self, arguments: TrlArguments, training: Any, data: Data) -> PreTrainedModel:
        return load_language_model(arguments, training, data.processing_class)

    def parts(self, arguments: Any, training: Any, data: Data) -> dict[str, Any]:
        """Returns what the trainer takes beside model, arguments and data."""
        return {}

    def lost(self, trainer: Any, data: Data) -> list[str]:
        """Returns lines about rows that `max_length` cuts or excludes."""
        return []

    def make_trainer(self, model: nn.Module, arguments: TrlArguments, training: Any, data: Data) -> Any:
        """The trainer, with what else it needs beside the model. Raises [`ConfigError`] where TRL or PEFT refuses a
        setting, and [`DataError`] where no row fits into `max_length`."""
        peft_task, new_modules = ("SEQ_CLS", head_of(model)) if self.scores else ("CAUSAL_LM", [])
        try:
            with quiet_datasets():
                trainer = self.trainer(
                    model=model,
                    args=training,
                    train_dataset=data.train,
                    eval_dataset=data.test,
                    processing_class=data.processing_class,
                    peft_config=lora_config(arguments, None if data.has_images else peft_task, new_modules),
                    **self.parts(arguments, training, data),
                )
        except HfZeroError:
            raise
        except ValueError as error:  # a setting that TRL or PEFT refuses
            raise ConfigError(" ".join(str(error).split())[:400]) from error
        if isinstance(trainer.train_dataset, IterableDataset):
            trainer.train_dataset = Stream(trainer.train_dataset)
        elif not len(trainer.train_dataset):
            key = "max_completion_length" if self.generates else "max_length"
            raise DataError(f"{data.source}: no row fits into {key} {getattr(training, key)}; set a larger --{key}")
        return trainer

    def before(self, trainer: Any, data: Data, say: Callable[..., None]) -> None:
        if isinstance(data.train, Dataset) and getattr(trainer.args, "max_length", None) is not None:
            for line in self.lost(trainer, data):
                say(line)

    def after(self, trainer: Any, data: Data, arguments: TrlArguments, say: Callable[..., None]) -> None:
        if data.test is not None:
            say(f"test rows: {self.test_line.format(**trainer.evaluate())}")
            # metrics that are computed of all rows count each once; those of TRL's are means over batches
            is_mean_of_batches = trainer.compute_metrics is None and not self.generates
            if is_mean_of_batches and isinstance(trainer.eval_dataset, Dataset):
                for line in unevenly_counted(len(trainer.eval_dataset), trainer.args):
                    say(line)
        folder = trainer.args.output_dir
        say(f"saved to {folder}")
        prompt = data.extra["prompt"]
        pipeline = "image-text-to-text" if data.has_images else "text-generation"
        if self.scores:
            pipeline = "text-classification"  # which takes no messages
            prompt = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        say(f"try it: {usage_command(folder, prompt, pipeline)}")

    def check_plan(self, arguments: TrlArguments) -> None:
        check_source(arguments, use_peft=arguments.use_peft)

    def model_name(self, arguments: TrlArguments) -> str:
        return named_model(arguments)[1]

    def load_config(self, arguments: TrlArguments) -> PretrainedConfig:
        return config_of(arguments, resolve_config)


def unevenly_counted(num_rows: int, training: TrainingArguments) -> list[str]:
    """Says where the mean over test rows is not that of each row once: it is one over batches, of which the last is
    smaller, or on several ranks filled up with rows that were there already."""
    at_once = training.per_device_eval_batch_size * training.world_size
    if num_rows % at_once == 0 or (training.world_size == 1 and num_rows < at_once):
        return []
    return [
        f"test rows: some may count more than others: {plural(num_rows, 'row')} cannot be divided by {at_once}, which "
        "all ranks take at a time (--per_device_eval_batch_size)"
    ]


def _template_path(arguments: TrlArguments, training: Mapping[str, Any]) -> str | None:
    """The key of the task, or that of the trainer's configuration, where it has one."""
    return getattr(arguments, "chat_template_path", None) or training.get("chat_template_path")


def _example_chat(form: Format, rows: Rows) -> tuple[list | None, list | None]:
    """The messages and tools of the first row: no messages where it cannot be read, `None` where rows are texts."""
    try:
        row = form.read(rows.example)
    except BadRow:
        return ([] if form.is_chat else None), None
    return form.chat_of(row), row.get("tools")


def _encode(source: DataSource, arguments: TrlArguments, tokenizer: ProcessingClass, split: str) -> list[str]:
    """Reads the rows of a data set as the trainer takes them. Gives lines about that."""
    rows, form, since = source.rows, source.form, time.time()
    says_only = getattr(source.training, "assistant_only_loss", False)
    versions = f"{trl.__version__} {version('hf-zero')}"
    source.data, num_bad = encode_rows(
        rows,
        partial(_read, form, tokenizer, says_only),
        form.features,
        skip_bad_rows=arguments.skip_bad_rows,
        key=f"{type(form).__name__} {form} {tokenizer.chat_template} {says_only} {versions}",
        num_proc=getattr(source.training, "dataset_num_proc", None),
    )
    said = ["a stream of rows" if rows.is_stream else plural(len(source.data), "row")]
    if not rows.is_stream and is_reused(source.data, since):
        said.append("read and checked before, found in the cache of datasets")
    if num_bad:
        said.append(f"{plural(num_bad, 'bad row')} left out")
    return [f"{split}: {each}" for each in said]


def _read(form: Format, tokenizer: ProcessingClass, assistant_only: bool, row: dict[str, Any]) -> dict[str, Any]:
    """Reads a row, and refuses a chat that the template cannot write, or of which the loss would count nothing."""
    values = form.read(row)
    if (chat := form.chat_of(values)) is not None:
        render(tokenizer, chat, values.get("tools"), settings=values.get(TEMPLATE_KWARGS))
        if values.get(UNTRAINED) and not assistant_only:
            raise BadRow("a message of the assistant has weight 0, which needs assistant_only_loss")
        if values.get(UNTRAINED):
            _check_runs(tokenizer, chat, values)
        if assistant_only and not any(turn["role"] == "assistant" for turn in chat):
            raise BadRow("no message is the assistant's, and assistant_only_loss counts those alone")
    return values


def _check_runs(tokenizer: ProcessingClass, chat: list, values: dict[str, Any]) -> None:
    """Raises [`BadRow`] for messages of weight 0 if the template does not mark each of the assistant's messages."""
    from trl.chat_template_utils import get_training_chat_template

    settings = {"tools": values.get("tools"), "chat_template": get_training_chat_template(tokenizer)}
    settings |= values.get(TEMPLATE_KWARGS) or {}
    found = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True, **settings)
    num_runs = len(counted_runs(found["assistant_masks"]))
    num_messages = sum(turn["role"] == "assistant" for turn in chat)
    if num_runs != num_messages:
        raise BadRow(
            f"a message of the assistant has weight 0, and the chat template marks {num_runs} parts as the "
            f"assistant's, of {num_messages} messages; give a template that marks each"
        )


def counted_runs(counts: Iterable[bool | int]) -> list[range]:
    """Returns the runs of tokens that count, in order."""
    runs, start = [], 0
    for counts_here, group in groupby(map(bool, counts)):
        stop = start + sum(1 for _ in group)
        runs += [range(start, stop)] if counts_here else []
        start = stop
    return runs
