"""Generates text with the model of a folder, for `chat` and `generate`, or with the model of a run, which answers test
rows before and after its training."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedTokenizerBase, TextStreamer
from transformers.utils import cached_file

from hf_zero.activation import shard
from hf_zero.checkpoint import load_pretrained
from hf_zero.engine import placeholders
from hf_zero.errors import ConfigError, HfZeroError
from hf_zero.recipes.data.formats import TOKENS, Message, in_blocks, num_prompt_tokens
from hf_zero.recipes.data.rows import BadRow, Data, plural
from hf_zero.recipes.data.templates import needs_blocks, render
from hf_zero.recipes.lora import QuantizationArguments, check_quantization, quantization_of
from hf_zero.recipes.models import (
    ADAPTER_CONFIG_NAME,
    LoadedIn,
    attach,
    check_vocabulary,
    is_adapter,
    load_base,
    load_model,
    load_tokenizer,
    positions_of,
    quiet,
    reason_of,
    resolve_model,
)
from hf_zero.recipes.parser import option, refuse_less


if TYPE_CHECKING:  # importing it takes seconds, and `chat` does not need it
    from hf_zero.trainer import ZeroTrainer


SAMPLING = ("temperature", "top_p", "top_k", "min_p")
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model")
# The files of an adapter on the Hub, without checkpoints and optimizer state.
ADAPTER_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "adapter_model.*"]
# Of the answers to test rows.
MAX_NEW_TOKENS, MAX_PROMPT_TOKENS = 64, 1024
BATCH_SIZE = 8
NUM_WORDS = 8  # of a text, which the model continues
WIDTH = 300  # characters of a text that are printed


@dataclass
class GenerationArguments(QuantizationArguments):
    """Keys of `chat` and `generate`. Those of generation have the names that transformers gives them."""

    base_model_name_or_path: str | None = option(
        None, "Base model of an adapter, instead of the one that its config names."
    )
    dtype: LoadedIn = option("auto", "Dtype of the model; auto is that of the files.")
    use_cpu: bool = option(False, "Use the CPU on a machine that has an accelerator.")
    system: str | None = option(None, "System prompt.")
    plain: bool = option(False, "Continue texts as they are, without the chat template.")
    max_new_tokens: int = option(256, "Maximum number of tokens of an answer.")
    do_sample: bool | None = option(None, "Sample tokens. Default: as generation_config.json says.")
    temperature: float | None = option(None, "Sampling temperature.")
    top_p: float | None = option(None, "Sample from the most likely tokens with this total probability.")
    top_k: int | None = option(None, "Sample from this many of the most likely tokens.")
    min_p: float | None = option(None, "Minimum probability of a sampled token, relative to the most likely one.")
    repetition_penalty: float | None = option(None, "Above 1, tokens that occurred before become less likely.")
    seed: int = option(42, "Random seed for sampling.")

    def __post_init__(self):
        refuse_less(self, max_new_tokens=1)
        check_quantization(self)
        for name in SAMPLING:
            if self.do_sample is False and getattr(self, name) is not None:
                raise ConfigError(f"{name}: has no effect with --do_sample false; leave one of them out")


@dataclass(frozen=True)
class TextGenerator:
    """A model that continues prompts."""

    name: str  # for messages
    model: Any  # may be sharded; all ranks then call `generate` equally often
    tokenizer: PreTrainedTokenizerBase
    options: dict[str, Any]  # for `model.generate`, `max_new_tokens` among them
    system: str | None = None  # system prompt
    plain: bool = False  # whether texts are continued without the chat template

    def __post_init__(self):
        """Makes answers end with the end-of-sequence token of the tokenizer too, which ends turns of a chat."""
        ends = getattr(self.model.generation_config, "eos_token_id", None)
        ends = [*(ends if isinstance(ends, list) else [ends]), self.tokenizer.eos_token_id]
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.convert_ids_to_tokens(0)
        self.options.setdefault("eos_token_id", sorted({token for token in ends if token is not None}))
        self.options.setdefault("pad_token_id", self.tokenizer.pad_token_id)

    def prompt_of(self, prompt: str | list[Message]) -> str | list[Message]:
        """Makes a text the message of a user, if there is a chat template, and adds the system prompt. Raises
        [`ConfigError`] for a chat without a chat template."""
        has_template = bool(self.tokenizer.chat_template)
        if isinstance(prompt, str):
            if self.plain or not has_template:
                return prompt
            prompt = [{"role": "user", "content": prompt}]
        if not has_template:
            raise ConfigError(f"{self.name}: has no chat template, which prompts of messages need")
        if self.system and prompt[0]["role"] != "system":
            return [{"role": "system", "content": self.system}, *prompt]
        return prompt

    def tokens(self, prompt: str | list[Message], tools: list | None = None) -> list[int]:
        """Returns the token ids of a text, or of a chat up to the answer. Raises [`BadRow`] if the chat template
        refuses the messages, or the prompt has no tokens."""
        text = prompt if isinstance(prompt, str) else self._rendered(prompt, tools)
        ids = self.tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"]
        if not ids:
            raise BadRow("the prompt has no tokens")
        return ids

    def _rendered(self, prompt: list[Message], tools: list | None) -> str:
        chat = in_blocks(prompt) if needs_blocks(self.tokenizer) else prompt
        return render(self.tokenizer, chat, tools, is_prompt=True)

    def room(self, prompt: Sequence[int]) -> int:
        """Returns the maximum number of new tokens: `max_new_tokens`, or fewer if prompt and answer together would
        exceed the model's maximum length. Raises [`BadRow`] if the prompt already fills it."""
        most, limit = self.options["max_new_tokens"], positions_of(self.model.config)
        if limit is None or self.model.config.is_encoder_decoder:
            return most
        if len(prompt) >= limit:
            raise BadRow(f"{len(prompt)} tokens, and {self.name} has {limit} positions for prompt and answer")
        return min(most, limit - len(prompt))

    def generate(
        self, prompts: Sequence[list[int]], streamer: TextStreamer | None = None, **options: Any
    ) -> list[str]:
        """Answers a batch of prompts, which are token ids. Returns the answers without special tokens. A streamer
        receives the tokens of a single answer as they are generated."""
        with quiet(), torch.no_grad():
            padded = self.tokenizer.pad({"input_ids": list(prompts)}, padding_side="left", return_tensors="pt")
            options = {**padded.to(self.model.device), **self.options, **options, "streamer": streamer}
            try:
                found = self.model.generate(**options)
            except (HfZeroError, UnicodeError):
                raise
            except ValueError as error:  # an option that transformers refuses
                raise ConfigError(f"{self.name}: does not generate ({reason_of(error)})") from error
        start = 0 if self.model.config.is_encoder_decoder else padded["input_ids"].shape[1]
        return self.tokenizer.batch_decode(found[:, start:], skip_special_tokens=True)


def load_generator(
    name: str, arguments: GenerationArguments, device: torch.device, *, is_sharded: bool = False
) -> TextGenerator:
    """Loads a model, or an adapter with its base, and its tokenizer.

    Args:
        name (`str`): a folder, a Hub id, or `package:<name>/<folder>`.
        arguments (`GenerationArguments`): dtype, quantization and settings of generation.
        device (`torch.device`): device of the model, unless bitsandbytes quantizes and places it.
        is_sharded (`bool`): whether to shard the parameters over all ranks (stage 3), which all call it.

    Raises:
        `ConfigError`: if there is no model, tokenizer, or text generation, or a key does not fit.
        `CheckpointError`: if the model does not load.
    """
    settings: dict[str, Any] = {"dtype": arguments.dtype}
    if (quantization := quantization_of(arguments, arguments.dtype)) is not None:
        settings["quantization_config"] = quantization
    if is_sharded:
        settings["load"] = load_pretrained
    folder = _folder_of(name)
    if not is_adapter(folder):
        if arguments.base_model_name_or_path:
            raise ConfigError(f"base_model_name_or_path: {name} is no adapter; leave it out")
        model, source = load_model(folder, **settings), str(folder)
    else:
        model, source = load_base(folder, arguments.base_model_name_or_path, **settings)
        with placeholders(model):
            model = attach(model, folder)
    if not model.can_generate():
        raise ConfigError(f"{name}: holds a {type(model).__name__}, which writes no text; give a language model")
    tokenizer = _tokenizer_of(name, folder, source)
    check_vocabulary(model, name, tokenizer)
    if arguments.system and (arguments.plain or not tokenizer.chat_template):
        raise ConfigError(
            f"system: needs a chat template, and {'--plain is set' if arguments.plain else name + ' has none'}"
        )
    model = model.eval().requires_grad_(False)
    if is_sharded:
        shard(model, stage=3, device=device)
    elif getattr(model, "hf_quantizer", None) is None:
        model = model.to(device)
    names = ("max_new_tokens", *SAMPLING, "repetition_penalty", "do_sample")
    options = {key: value for key in names if (value := getattr(arguments, key)) is not None}
    if options.keys() & set(SAMPLING):
        options.setdefault("do_sample", True)
    return TextGenerator(name, model, tokenizer, options, arguments.system, arguments.plain)


def _folder_of(name: str) -> Path:
    """Returns the folder of a model or an adapter. For a model on the Hub it is the id, which transformers takes."""
    try:
        return Path(resolve_model(name, "folder"))
    except ConfigError:
        with suppress(OSError, ValueError):  # not an adapter on the Hub either
            cached_file(name, ADAPTER_CONFIG_NAME)
            return Path(snapshot_download(name, allow_patterns=ADAPTER_FILES))
        raise


def _tokenizer_of(name: str, folder: Path, source: str) -> PreTrainedTokenizerBase:
    """Loads the tokenizer beside an adapter, or that of its base model."""
    found = [path for path in (folder, Path(source)) if any((path / file).is_file() for file in TOKENIZER_FILES)]
    if not found and Path(source).is_dir():
        raise ConfigError(f"{name}: contains no tokenizer; save the one that the model was trained with there")
    return load_tokenizer(str(found[0]) if found else source)


class Samples:
    """Some test rows and the answers to them.

    All ranks generate the same answers together, so the parameters stay sharded; rank 0 prints.

    Args:
        trainer (`ZeroTrainer`): its model answers.
        data (`Data`): the rows of the run.
        number (`int`): number of test rows. None are used if the model generates no text or reads images.
        say (`Callable`): prints on rank 0.
    """

    def __init__(self, trainer: "ZeroTrainer", data: Data, number: int, say: Callable[..., None]):
        self._trainer, self._say = trainer, say
        self._rows: list[tuple[dict[str, str], list[int]]] = []  # texts by their titles, and tokens of the prompt
        if number and data.test is not None and not data.has_images and trainer.model.can_generate():
            options = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, "use_cache": True}
            self._generator = TextGenerator("the model", trainer.model, data.processing_class, options)
            self._rows = list(islice(_questions(data.asked, self._generator), number))

    def answer(self, when: str) -> None:
        """Generates and prints the answers, `when` being "before" or "after" training. All ranks call it."""
        if not self._rows:
            return
        model = self._trainer.model.eval()
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices), self._trainer.compute_loss_context_manager():
            for start in range(0, len(self._rows), BATCH_SIZE):
                rows, prompts = zip(*self._rows[start : start + BATCH_SIZE])
                room = min(map(self._generator.room, prompts))
                for row, text in zip(rows, self._generator.generate(prompts, max_new_tokens=room)):
                    row[when] = text
        self._say(f"answers to {plural(len(self._rows), 'test row')}, {when} training:")
        for row, _ in self._rows:
            self._say(f"  {_shown(row['prompt'])}")
            for key in ("before",) if when == "before" else ("before", "after", "expected"):
                if row.get(key):
                    self._say(f"    {key}: {_shown(row[key])}")


def _questions(test: Sequence[dict[str, Any]], generator: TextGenerator) -> Iterator[tuple[dict[str, str], list[int]]]:
    """Yields the prompt and the expected answer of each row that the model can answer, with the prompt's tokens."""
    for row in test:
        try:
            if TOKENS in row:  # tokenized
                ids, start = row[TOKENS], num_prompt_tokens(row)
                tokens, prompt, expected = ids[:start], *map(generator.tokenizer.decode, (ids[:start], ids[start:]))
            else:
                question, expected = question_of(row)
                tokens, prompt = generator.tokens(question, row.get("tools")), text_of(question)
            generator.room(tokens)
        except BadRow:
            continue
        if len(tokens) <= MAX_PROMPT_TOKENS:
            yield {"prompt": prompt, "expected": expected or ""}, tokens


def question_of(row: Mapping[str, Any]) -> tuple[str | list[Message], str | None]:
    """Returns the prompt and the expected answer of a row with `messages`, with `prompt` and perhaps `completion` or
    `chosen`, or with a text."""
    if row.get("messages"):
        turns = row["messages"]
        last = max((number for number, turn in enumerate(turns) if turn["role"] == "assistant"), default=len(turns))
        return turns[:last], turns[last]["content"] if last < len(turns) else None
    if "prompt" in row:
        expected = row.get("chosen", row.get("completion") if row.get("label", True) else None)
        return row["prompt"], expected if expected is None else text_of(expected)
    words = next((value for value in row.values() if isinstance(value, str)), "").split(" ")
    return " ".join(words[:NUM_WORDS]), " ".join(words[NUM_WORDS:])


def text_of(prompt: str | list[Message]) -> str:
    """Returns a text, or the text of the last message of a chat."""
    return prompt if isinstance(prompt, str) else "\n".join(str(turn.get("content")) for turn in prompt[-1:])


def _shown(text: str) -> str:
    return textwrap.shorten(text, WIDTH, placeholder=" ...") or repr(text)
