"""From a row to token ids, and which of them the loss counts."""

from dataclasses import dataclass
from hashlib import sha256
from itertools import takewhile
from typing import Any, cast

from datasets import Features, List, Value
from transformers import PreTrainedTokenizerBase

from hf_zero.errors import ConfigError
from hf_zero.recipes.data.chat import chat_tokens, render
from hf_zero.recipes.data.formats import Format, Sample
from hf_zero.recipes.data.rows import BadRow


NUM_PROMPT = 5  # tokens of a text that serve as a prompt
IGNORED = -100  # the label of a token that the loss does not count
TOKEN_FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "num_tokens": Value("int32"),
        "num_counted": Value("int32"),  # by the loss
        "num_cut": Value("int32"),  # tokens beyond max_length
        "diverged": Value("bool"),  # the prompt alone has other tokens than before its completion
    }
)
STATS = ["num_counted", "num_cut", "diverged"]  # what is used up when rows are accounted for


@dataclass(frozen=True)
class Counted:
    """What the loss counts.

    Args:
        completion (`bool`): only the completion, not the prompt.
        assistant (`bool`): only what the assistant says.
    """

    completion: bool
    assistant: bool

    def __str__(self) -> str:
        if self.completion and self.assistant:
            return "what the assistant says in the completion"
        return "the completion" if self.completion else "what the assistant says" if self.assistant else "all tokens"


def counted_by(form: Format, completion_only: bool | None, assistant_only: bool | None) -> Counted:
    """Settles what the loss counts: what is set, or by default what the format tells apart.

    Raises:
        ConfigError: something is to be counted alone that the format does not tell apart.
    """
    has_completion = form.counts == "completion"
    if completion_only and not has_completion:
        raise ConfigError(f"completion_only_loss: rows of {', '.join(form.columns)} have no prompt; leave it out")
    if assistant_only and form.counts is None:
        raise ConfigError(f"assistant_only_loss: rows of {', '.join(form.columns)} have no messages; leave it out")
    return Counted(
        completion=has_completion if completion_only is None else completion_only,
        assistant=form.counts == "assistant" if assistant_only is None else assistant_only,
    )


@dataclass(frozen=True)
class Tokenize:
    """Makes token ids and labels of a row.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): with a chat template where rows are chats.
        form ([`Format`]): reads a row.
        counted ([`Counted`]): by the loss.
        max_length (`int`): what is longer is cut at its end.
    """

    tokenizer: PreTrainedTokenizerBase
    form: Format
    counted: Counted
    max_length: int

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """The values of `TOKEN_FEATURES`.

        Raises:
            BadRow: on a row that cannot be trained on.
        """
        sample = self.form.read(row)
        if self.counted.assistant and not sample.is_chat:
            raise BadRow("texts, expected messages, as assistant_only_loss is on")
        ids, counts, diverged = self._chat(sample) if sample.is_chat else self._text(sample)
        labels = [token if count else IGNORED for token, count in zip(ids, counts, strict=True)][: self.max_length]
        return {
            "input_ids": ids[: self.max_length],
            "labels": labels,
            "num_tokens": len(labels),
            "num_counted": sum(label != IGNORED for label in labels[1:]),  # the first is predicted from nothing
            "num_cut": len(ids) - len(labels),
            "diverged": diverged,
        }

    def _text(self, sample: Sample) -> tuple[list[int], list[int], bool]:
        text = ended(cast(str, sample.completion), self.tokenizer)
        ids = self.tokenizer(cast(str, sample.prompt or "") + text)["input_ids"]
        prompt = self.tokenizer(sample.prompt)["input_ids"] if sample.prompt and self.counted.completion else []
        return ids, *_after(prompt, ids)

    def _chat(self, sample: Sample) -> tuple[list[int], list[int], bool]:
        ids, counts = chat_tokens(self.tokenizer, sample.messages, sample.tools, marked=self.counted.assistant)
        if not (sample.prompt and self.counted.completion):
            return ids, counts, False
        asked = render(self.tokenizer, cast(list[dict[str, Any]], sample.prompt), sample.tools, is_prompt=True)
        after, diverged = _after(self.tokenizer(asked, add_special_tokens=False)["input_ids"], ids)
        return ids, [min(pair) for pair in zip(counts, after, strict=True)], diverged


def ended(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A text with the end-of-sequence token behind it, as the model is to end it."""
    return text if text.endswith(tokenizer.eos_token) else text + tokenizer.eos_token


def _after(prompt: list[int], ids: list[int]) -> tuple[list[int], bool]:
    """What comes after the tokens that `ids` has in common with `prompt`, and whether `prompt` has more."""
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, ids)))
    return [0] * length + [1] * (len(ids) - length), length < len(prompt)


def sample_of(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Writes a row out.

    Args:
        row (`dict`): with `input_ids` and, unless all count, `labels`.
        tokenizer (`PreTrainedTokenizerBase`): decodes it.

    Returns:
        The row with what the loss counts between ⟦ and ⟧, and a text to try the model on: what comes before that, or
        a few tokens.
    """
    ids = row["input_ids"]
    counts = [label != IGNORED for label in row.get("labels", ids)]
    pieces, start = [], 0
    for stop in range(1, len(ids) + 1):
        if stop == len(ids) or counts[stop] != counts[start]:
            text = tokenizer.decode(ids[start:stop])
            pieces.append(f"⟦{text}⟧" if counts[start] else text)
            start = stop
    prompt = counts.index(True) or min(len(ids), NUM_PROMPT)
    return "".join(pieces), tokenizer.decode(ids[:prompt], skip_special_tokens=True)


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of all that a tokenizer does, to find its work in a cache."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    does = backend.to_str() if backend is not None else repr((tokenizer.name_or_path, tokenizer.get_vocab()))
    return sha256(f"{type(tokenizer)} {tokenizer} {does} {tokenizer.chat_template}".encode()).hexdigest()
