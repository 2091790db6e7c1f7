"""The base class of the tasks that TRL's trainers train."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar, TypeAlias

from datasets import Features, IterableDataset
from torch import nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainingArguments,
)

from hf_zero.errors import ConfigError, DataError, HfZeroError
from hf_zero.recipes.data.formats import TEMPLATE_KWARGS, Answers, Format, format_of
from hf_zero.recipes.data.rows import Data, Rows, encode_rows, plural
from hf_zero.recipes.data.sources import (
    MixtureArguments,
    Stream,
    check_mixture,
    check_stream,
    load_each,
    load_rows,
    mix,
)
from hf_zero.recipes.data.templates import needs_blocks, read_template, render, set_chat_template
from hf_zero.recipes.lora import (
    TrainedArguments,
    check_quantization,
    check_trained,
    head_of,
    lora_config,
)
from hf_zero.recipes.models import (
    LoadArguments,
    check_language_model,
    check_positions,
    check_source,
    config_of,
    load_language_model,
    named_model,
    positions_of,
    tokenizer_of,
)
from hf_zero.recipes.parser import option, program, refuse_less
from hf_zero.recipes.report import usage_command
from hf_zero.recipes.task import Task
from hf_zero.trl import ZeroTrlArgumentsMixin, ZeroTrlTrainerMixin


NUM_ASKED = 100  # test rows that may serve as samples
ProcessingClass: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin

# Keys of TRL's configs that change how a run computes, but not what it learns.
_INDECISIVE = frozenset(
    "model_init_kwargs trust_remote_code dataset_num_proc pad_to_multiple_of padding_free activation_offloading "
    "precompute_ref_log_probs precompute_ref_batch_size cache_implementation log_completions log_multimodal "
    "num_completions_to_print log_unique_prompts log_completions_hub_repo ds3_gather_for_generation".split()
)


@dataclass
class TrlArguments(TrainedArguments, LoadArguments, MixtureArguments):
    """Keys of a task beside the configuration of its trainer, which may have a `chat_template_path` of its own."""

    samples: int = option(3, "Number of test rows to answer before and after training.")


@dataclass
class TrlTemplateArguments(TrlArguments):
    """Keys of a task whose trainer has no `chat_template_path`."""

    chat_template_path: str | None = option(
        None, "A Jinja file that replaces the tokenizer's chat template, or default for hf_zero's."
    )


class TrlTask(Task):
    """A task that one of TRL's trainers trains."""

    trainer: ClassVar[type[ZeroTrlTrainerMixin]]  # of `hf_zero.trl`
    formats: ClassVar[tuple[Answers, ...]] = ()  # of its rows; the first that fits
    test_line: ClassVar[str]  # printed about the metrics of the test rows, for `str.format`
    decisive_too: ClassVar[tuple[str, ...]] = ()  # keys of `TrainingArguments` that decide what is learned
    Arguments: type[TrlArguments] = TrlTemplateArguments  # keys beside those of the trainer's configuration

    @property
    def Training(self) -> type[ZeroTrlArgumentsMixin]:
        """The class of the training arguments."""
        return self.trainer.config_class

    @property
    def decisive(self) -> tuple[str, ...]:
        """The training arguments that decide what is learned: TRL's own, except those that only change how."""
        of_trainer = {each.name for each in fields(TrainingArguments)}
        found = [base for base in self.Training.__mro__ if base.__module__.startswith("trl.")]
        names = {each.name for base in found for each in fields(base)} - of_trainer - _INDECISIVE
        of_engine = ("vllm_", "use_vllm", "use_transformers")
        return (*sorted(name for name in names if not name.startswith(of_engine)), *self.decisive_too)

    def check(self, arguments: Any, training: Mapping[str, Any]) -> None:
        refuse_less(arguments, samples=0)
        check_mixture(arguments)
        check_trained(arguments)
        check_quantization(arguments)
        if (template := _template_path(arguments, training)) is not None:
            read_template(template)
        self._check_training(training)
        if self.generates and arguments.dataset_streaming:
            raise ConfigError("dataset_streaming: prompts are drawn several times each; leave it out")
        check_stream(arguments, training)
        check_language_model(arguments)
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
        with training.main_process_first():
            rows, test = load_each(arguments), load_rows(arguments, "test")
            tokenizer = self.load_processing_class(rows, arguments)
            if getattr(training, "eos_token", None):  # TRL sets it once rows are read
                getattr(tokenizer, "tokenizer", tokenizer).eos_token = training.eos_token
            every = [*rows, *([test] if test else [])]
            forms = [self.format_of(each, arguments, training, tokenizer) for each in every]
            notes, template = [], _template_path(arguments, vars(training))
            is_chat = any(form.is_chat for form in forms)
            if is_chat:
                notes.append(f"chat template: {set_chat_template(tokenizer, template)}")
            elif template is not None:
                raise ConfigError(f"chat_template_path: rows of {rows[0].source} hold no messages; leave it out")
            if hasattr(training, "chat_template_path"):
                training.chat_template_path = None  # the tokenizer has it now
            in_blocks = is_chat and not isinstance(tokenizer, ProcessorMixin) and needs_blocks(tokenizer)
            labels = [f"train, {name}" for name in arguments.names] if len(rows) > 1 else ["train"]
            num_proc, encoded = getattr(training, "dataset_num_proc", None), []
            for each, form, label in zip(every, forms, [*labels, "test"]):
                function, features, note = self.encoder(replace(form, in_blocks=in_blocks), tokenizer, training)
                skips = arguments.skip_bad_rows
                data, num_bad = encode_rows(each, function, features, skip_bad_rows=skips, num_proc=num_proc)
                encoded.append(data)
                notes += [f"{label}: {each.source}, {note}"] if note else []
                notes.append(f"{label}: {'a stream of rows' if each.is_stream else plural(len(data), 'row')}")
                notes += [f"{label}: {plural(num_bad, 'bad row')} left out"] if num_bad else []
            train = mix(encoded[: len(rows)], arguments, training)
        if len(rows) > 1:
            counted = "" if isinstance(train, IterableDataset) else f"{plural(len(train), 'row')}, "
            notes.append(f"train: {counted}{arguments.dataset_mixing}d")
        return Data(
            train=train,
            test=encoded[-1] if test else None,
            processing_class=tokenizer,
            source=", ".join(arguments.names),
            notes=notes,
            sample="\n".join(f"{name}: {value!r}" for name, value in next(forms[0].good(rows[0])).items()),
            rows=rows,
            asked=list(islice(forms[-1].good(test), NUM_ASKED)) if test else (),
            extra={"is_chat": is_chat, "in_blocks": in_blocks},
        )

    def load_processing_class(self, rows: list[Rows], arguments: TrlArguments) -> ProcessingClass:
        """Loads the tokenizer, or whatever else makes the inputs of the model."""
        return tokenizer_of(arguments)

    def format_of(self, rows: Rows, arguments: TrlArguments, training: Any, tokenizer: ProcessingClass) -> Format:
        """Returns the first of the task's formats whose columns the rows have. Raises [`DataError`] if one is
        missing."""
        return format_of(self.formats, rows)

    def encoder(
        self, form: Any, tokenizer: ProcessingClass, training: Any
    ) -> tuple[Callable[[dict[str, Any]], dict[str, Any]], Features, str]:
        """Returns the function that makes what the trainer takes of a row, the columns that it gives, and a note."""
        return partial(_checked, form, tokenizer), form.features, ""

    def load_model(self, arguments: TrlArguments, training: Any, data: Data) -> PreTrainedModel:
        return load_language_model(arguments, training, data.processing_class)

    def parts(self, arguments: Any, training: Any, data: Data) -> dict[str, Any]:
        """Returns the trainer's arguments beside model, configuration and data."""
        return {}

    def num_examples(self, data: Data) -> int:
        """Returns the number of examples that the trainer makes of the rows, before it drops those that are too
        long."""
        return len(data.train)

    def make_trainer(self, model: nn.Module, arguments: TrlArguments, training: Any, data: Data) -> Any:
        """Makes the trainer. Raises [`ConfigError`] if TRL or PEFT refuses a setting, and [`DataError`] if no row fits
        into `max_length`."""
        peft_task, new_modules = ("SEQ_CLS", head_of(model)) if self.scores else ("CAUSAL_LM", [])
        try:
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
            raise self.no_row_fits(training, data)
        elif not self.sums_tokens and (lost := self.num_examples(data) - len(trainer.train_dataset)) > 0:
            data.notes.append(f"train: {plural(lost, 'row')} left out, too long for max_length {training.max_length}")
        return trainer

    def no_row_fits(self, training: Any, data: Data) -> DataError:
        key = "max_completion_length" if self.generates else "max_length"
        return DataError(f"{data.source}: no row fits into {key} {getattr(training, key)}; set a larger --{key}")

    def after(self, trainer: Any, data: Data, arguments: TrlArguments, say: Callable[..., None]) -> None:
        if data.test is not None:
            say(f"test rows: {self.test_line.format(**trainer.evaluate())}")
        folder = trainer.args.output_dir
        say(f"saved to {folder}")
        command = f"{program()} chat {shlex.quote(folder)}{'' if data.extra['is_chat'] else ' --plain'}"
        say(f"try it: {usage_command(folder, 'Hello') if self.scores else command}")

    def check_plan(self, arguments: TrlArguments) -> None:
        check_source(arguments)


def _template_path(arguments: TrlArguments, training: Mapping[str, Any]) -> str | None:
    """Returns the chat template that the task or the trainer's configuration names."""
    return getattr(arguments, "chat_template_path", None) or training.get("chat_template_path")


def _checked(form: Format, tokenizer: ProcessingClass, row: dict[str, Any]) -> dict[str, Any]:
    """Reads a row, and refuses a chat that the template does not render whole."""
    values = form.read(row)
    for chat in form.chats_of(values):
        render(tokenizer, chat, None, settings=values.get(TEMPLATE_KWARGS))
    return values
