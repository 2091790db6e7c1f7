"""What the columns of a row mean for `sft` and `pretrain`, and how they become what TRL takes.

| format | columns | becomes |
|---|---|---|
| `text` | `text` | the same |
| `messages` | `messages`: a list of `{"role": ..., "content": ...}` | the same |
| `conversations` | ShareGPT's list of `{"from": ..., "value": ...}`, and `system` if there is one | `messages` |
| `prompt` | `prompt` and `completion`, both texts or both lists of messages | the same |
| `alpaca` | `instruction`, `output`, and `input`, `system` and `history` if there are such | `prompt`, `completion` |
| `tokenized` | `input_ids`, and `labels`, or `completion_mask` and `assistant_masks`, if there are such | the same |

Messages may call tools, whose descriptions are in the column `tools`: a list, or JSON of one. A chat template writes
them: the second half is about which one it is, and whether it does.
"""

import json
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from datasets import Features, Json, List, Value
from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes.data.rows import IGNORED, BadRow, Rows, text_of


Message = dict[str, Any]

TEXT_COLUMN = "text"  # unless another is named
TOKENS, LABELS = "input_ids", "labels"
MASKS = ("completion_mask", "assistant_masks")  # 1 at what the loss may count
INTEGERS = {TOKENS: "int32", LABELS: "int64", **dict.fromkeys(MASKS, "int8")}  # as TRL keeps them
ROLES = ("system", "developer", "user", "assistant", "tool")
# Other names of roles in public data, in lower case.
ALIASES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "model", "bot", "chatbot", "ai"), "assistant"),
    **dict.fromkeys(("observation", "function", "function_response", "tool_response"), "tool"),
}
CALLS = ("function_call", "tool_call")  # roles of an assistant's message whose content is a call, as JSON
WEIGHTS = ("weight", "train", "loss_weight")  # keys of a message; 0 or false excludes it from the loss
IMAGE_COLUMNS = ("images", "image")  # a list of images, or one
MEDIA = (*IMAGE_COLUMNS, "audios", "videos")  # columns of what is no text
TEXT_BLOCK = ("text", "value")  # keys under which a block of type text has it
UNTRAINED = "untrained"  # a column of our own: numbers of the assistant's messages that are excluded from the loss
TEMPLATE_KWARGS = "chat_template_kwargs"  # a column with settings for the chat template, as in TRL
NUM_WORDS = 5  # of a text that serve as a prompt, or tokens
TOKENIZED = "tokenized"
DEFAULT = "default"  # the name of our own template, where a path could be
# Like ChatML, but every turn ends with the end-of-sequence token that the tokenizer has: no token is added, and
# generation ends where a turn does. With the end-of-sequence token <|im_end|>, as of Qwen3, it is ChatML itself.
DEFAULT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{ message['content'] + eos_token }}{% endgeneration %}
    {%- else %}
        {{- message['content'] + eos_token }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TEXTS_ALONE = "this run trains on texts (sft on images, too, if the first row has some)"
TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, LookupError)
# A template that cannot render this either is broken, whatever the rows are.
PLAIN_CHAT: list[Message] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@dataclass(frozen=True)
class Format:
    """What columns make a row of this kind, and how."""

    name: str  # as in the table above
    columns: tuple[str, ...]  # those that it takes
    gives: tuple[str, ...]  # those that TRL gets
    # gives their values, of the format itself and a row; raises [`BadRow`]
    convert: Callable[[Any, dict[str, Any]], dict[str, Any]] = field(repr=False)
    counts: str | None = None  # what the loss counts alone unless told otherwise: "completion", "assistant"
    is_chat: bool = True  # whether rows hold messages, and not texts
    # whether rows may have `TEMPLATE_KWARGS`, which trainers that generate take from their configuration, and do
    takes_settings: bool = True
    has_settings: bool = False
    refuses: tuple[str, ...] = MEDIA  # columns that have to be empty, for what they hold would be lost
    vocab_size: int = 0  # token ids are below it, where rows hold them
    # whose token ids rows hold, and no texts
    tokenizer: PreTrainedTokenizerBase | None = field(default=None, repr=False)

    @property
    def features(self) -> Features:
        """What `read` gives."""
        if self.is_chat:
            more = {UNTRAINED: List(Value("int32"))} if "messages" in self.gives else {}
            settings = (TEMPLATE_KWARGS,) if self.has_settings else ()
            return Features({**dict.fromkeys((*self.gives, "tools", *settings), Json()), **more})
        if self.tokenizer is not None:
            return Features({name: List(Value(INTEGERS[name])) for name in self.gives})
        return Features(dict.fromkeys(self.gives, Value("string")))

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        """Makes what TRL takes of a row. Raises [`BadRow`] where something is missing, or of another kind."""
        for column in self.columns:
            if row.get(column) is None:
                raise BadRow(f"nothing in column {column!r}")
        if full := next((column for column in self.refuses if row.get(column)), None):
            raise BadRow(f"column {full!r} is not empty, and {TEXTS_ALONE}; leave the column out")
        values = self.convert(self, row)
        if not self.is_chat:
            return values
        untrained = [take_weights(values[column], column) for column in self.gives]
        values["tools"] = _tools(row)
        if self.takes_settings:
            settings = template_kwargs(row)
            if settings and not self.has_settings:
                raise BadRow(f"column {TEMPLATE_KWARGS!r}, which the first row does not have")
            if self.has_settings:
                values[TEMPLATE_KWARGS] = settings
        if "messages" in self.gives:
            values[UNTRAINED] = untrained[0]
        elif untrained[-1]:  # TRL counts the whole completion
            raise BadRow("column 'completion' has a message of weight 0; put the conversation into 'messages'")
        return values

    def chat_of(self, row: dict[str, Any]) -> list[Message] | None:
        """The conversation that a row which was read holds; `None` where rows are texts."""
        return [turn for column in self.gives for turn in row[column]] if self.is_chat else None

    def prompt_of(self, row: dict[str, Any]) -> str | list[Message]:
        """What to try the model on, of a row which was read: what comes before the first answer, or a few words."""
        if self.tokenizer is not None:
            return self.tokenizer.decode(row[TOKENS][: num_prompt_tokens(row)])
        if not self.is_chat:
            return row[self.gives[0]] if len(self.gives) > 1 else " ".join(row[self.gives[0]].split()[:NUM_WORDS])
        said = [turn["content"] for turn in self.chat_of(row) or () if turn["role"] == "user"]
        texts = [textwrap.shorten(text, 60, placeholder="") for text in said[:1] if isinstance(text, str)]
        return [{"role": "user", "content": text} for text in texts] or ""


def _texts(form: Format, row: dict[str, Any]) -> dict[str, Any]:
    return {column: text_of(row[column], column) for column in form.columns}


def _messages(form: Format, row: dict[str, Any]) -> dict[str, Any]:
    return {"messages": chat_in(row["messages"], "messages", form)}


def _conversations(form: Format, row: dict[str, Any]) -> dict[str, Any]:
    return {"messages": system_of(row) + chat_in(row["conversations"], "conversations", form)}


def _prompt(form: Format, row: dict[str, Any]) -> dict[str, Any]:
    if form.is_chat:
        return {column: chat_in(row[column], column, form) for column in ("prompt", "completion")}
    prompt = row["prompt"] and text_of(row["prompt"], "prompt")
    return {"prompt": prompt, "completion": text_of(row["completion"], "completion")}


def _alpaca(form: Format, row: dict[str, Any]) -> dict[str, Any]:
    question = text_of(row["instruction"], "instruction")
    if row.get("input"):
        question += "\n\n" + text_of(row["input"], "input")
    prompt = [*system_of(row), *_history(row), {"role": "user", "content": question}]
    return {"prompt": prompt, "completion": [{"role": "assistant", "content": text_of(row["output"], "output")}]}


def _history(row: dict[str, Any]) -> list[Message]:
    """The turns before the instruction: pairs of a question and its answer, as LLaMA-Factory has them."""
    pairs = row.get("history") or []
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRow(f"column 'history' holds {str(pair)[:40]!r}, expected pairs of a question and its answer")
    roles = ("user", "assistant")
    return [{"role": role, "content": text_of(text, "history")} for pair in pairs for role, text in zip(roles, pair)]


FORMATS = (
    Format("messages", ("messages",), ("messages",), _messages, "assistant"),
    Format("conversations", ("conversations",), ("messages",), _conversations, "assistant"),
    Format("prompt", ("prompt", "completion"), ("prompt", "completion"), _prompt, "completion"),
    Format("alpaca", ("instruction", "output"), ("prompt", "completion"), _alpaca, "completion"),
)
FormatName = Literal["text", "messages", "conversations", "prompt", "alpaca", "tokenized"]
FORMAT_NAMES: tuple[str, ...] = get_args(FormatName)


def text_format(column: str) -> Format:
    """The format whose rows are texts."""
    return Format("text", (column,), (column,), _texts, is_chat=False)


def _tokenized_format(columns: Collection[str], tokenizer: PreTrainedTokenizerBase) -> Format:
    """The format of rows that are tokenized already: no token is added. Labels count before masks, as for TRL."""
    more = [LABELS] if LABELS in columns else [name for name in MASKS if name in columns]
    gives = (TOKENS, *more)
    counts = "completion" if MASKS[0] in more else None
    return Format(TOKENIZED, gives, gives, _tokens, counts, False, vocab_size=len(tokenizer), tokenizer=tokenizer)


def num_prompt_tokens(row: Mapping[str, list[int]]) -> int:
    """How many tokens come before the first that the loss counts; where it is the first one of all, a few."""
    masks = [row[name] for name in MASKS if name in row]
    counted = [label != IGNORED for label in row[LABELS]] if LABELS in row else [bit == 1 for bit in (*masks, [])[0]]
    return next((number for number, counts in enumerate(counted) if counts), 0) or NUM_WORDS


def recognise(rows: Rows, names: Collection[str], text_column: str, tokenizer: PreTrainedTokenizerBase) -> Format:
    """Finds the format of rows by their columns, among the `names` of `FORMAT_NAMES`. Rows with token ids are
    tokenized, whatever other columns they have, as for TRL. Raises [`DataError`] where the columns fit none, or
    several."""
    known = (text_format(text_column), *FORMATS, _tokenized_format(rows.columns, tokenizer))
    formats = [form for form in known if form.name in names]
    fits = [form for form in formats if set(form.columns) <= set(rows.columns)]
    fits = [form for form in fits if form.name == TOKENIZED] or fits
    if len(fits) == 1:
        form = replace(fits[0], has_settings=TEMPLATE_KWARGS in rows.columns)
        holds_texts = form.name == "prompt" and not isinstance(rows.example["completion"], list)
        return replace(form, is_chat=False) if holds_texts else form
    found = f"{rows.source}: columns found {rows.columns}"
    if fits:
        names = " and ".join(form.name for form in fits)
        raise DataError(f"{found}, which fit the formats {names}; choose one with --dataset_format")
    expected = ", or ".join(" and ".join(form.columns) for form in formats)
    raise DataError(f"{found}, expected {expected}; rename them, or name the one of texts with --dataset_text_field")


def check_text_column(column: str, read: Sequence[tuple[Rows, Any]]) -> None:
    """Refuses the name of a column of texts where it is set, and no rows are texts."""
    if column != TEXT_COLUMN and all(form.name != "text" for _, form in read):
        rows, form = read[0]
        found = f"{rows.source} has rows of the format {form.name}"
        raise ConfigError(f"dataset_text_field {column!r}: {found}; leave it out")


def _tokens(form: Format, row: dict[str, Any]) -> dict[str, Any]:
    more = [name for name in (LABELS, *MASKS) if row.get(name) is not None and name not in form.columns]
    if more and LABELS not in form.columns:
        raise BadRow(f"column {more[0]!r}, which the first row does not have")
    if not isinstance(mask := row.get("attention_mask"), list | None):
        raise BadRow(f"column 'attention_mask' holds a {type(mask).__name__}, expected a list of integers")
    if 0 in (mask or ()):
        raise BadRow("column 'attention_mask' holds 0, so the row is padded; leave the padding out")
    for name in form.columns:
        _check_integers(row[name], name, range(2) if name in MASKS else range(form.vocab_size))
        if len(row[name]) != len(row[TOKENS]):
            raise BadRow(
                f"column {name!r} holds {len(row[name])} numbers, expected {len(row[TOKENS])} as in {TOKENS!r}"
            )
    return {name: row[name] for name in form.columns}


def _check_integers(values: Any, column: str, allowed: range) -> None:
    """Refuses what is no list of allowed numbers; labels may be `IGNORED` too."""
    if values == []:
        raise BadRow(f"nothing in column {column!r}")
    if not isinstance(values, list):
        raise BadRow(f"column {column!r} holds a {type(values).__name__}, expected a list of integers")
    odd = [value for value in values if type(value) is not int]
    if odd:
        raise BadRow(f"column {column!r} holds {str(odd[0])[:40]}, expected integers alone")
    also = (IGNORED,) if column == LABELS else ()
    odd = [value for value in values if value not in allowed and value not in also]
    if odd:
        more = "".join(f", or {number}" for number in also)
        raise BadRow(f"column {column!r} holds {odd[0]}, expected 0 to {allowed.stop - 1}{more}")


def chat_in(turns: Any, column: str, form: Format) -> list[Message]:
    """The messages that a row holds in a column. Raises [`BadRow`] where it holds something else, or images that the
    format does not take."""
    if turns is None or turns == []:
        raise BadRow(f"nothing in column {column!r}")
    if not isinstance(turns, list):
        raise BadRow(f"column {column!r} holds a {type(turns).__name__}, expected a list of messages")
    messages = []
    for number, turn in enumerate(turns, start=1):
        where = f"message {number} of column {column!r}"
        messages.append(_message(turn, where))
        if isinstance(messages[-1]["content"], list) and IMAGE_COLUMNS[0] in form.refuses:
            raise BadRow(f"{where} has an image, and {TEXTS_ALONE}")
    return messages


def _message(turn: Any, where: str) -> Message:
    """A message with role and content, also of ShareGPT's `from` and `value`."""
    if not isinstance(turn, dict):
        raise BadRow(f"{where} is a {type(turn).__name__}, expected role and content")
    if turn.get("role") is None and turn.get("from") is not None:
        turn = {**turn, "role": turn["from"], "content": turn.get("value")}
        turn = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if not isinstance(turn.get("role"), str):
        raise BadRow(f"{where} has keys {list(turn)}, expected role and content")
    role = turn["role"].strip().lower()
    if role in CALLS:
        turn = {**turn, "role": "assistant", "content": "", "tool_calls": _calls(turn.get("content"), where)}
    elif ALIASES.get(role, role) in ROLES:
        turn = {**turn, "role": ALIASES.get(role, role)}
    else:
        known = ", ".join((*ROLES, *ALIASES, *CALLS))
        raise BadRow(f"{where} has the role {turn['role']!r}, expected one of {known}; rename it")
    if not isinstance(turn.get("content"), str | list) and not turn.get("tool_calls"):
        raise BadRow(f"{where} has no content")
    # Arrow gives every message the keys of all of them
    kept = {key: value for key, value in turn.items() if value is not None or key == "content"}
    return {**kept, "content": _content(turn.get("content"), where)}


def _content(content: Any, where: str) -> Any:
    """A text, where it was one or lies in blocks of type text alone; with images, all blocks."""
    if not isinstance(content, list):
        return content
    blocks = [_block(block, where) for block in content]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    return "".join(texts) if len(texts) == len(blocks) else blocks


def _block(block: Any, where: str) -> dict[str, Any]:
    if not isinstance(block, Mapping) or not isinstance(kind := block.get("type"), str):
        raise BadRow(f"{where} holds a block without a type, expected type text with text, or type image")
    if kind == "image_url" and isinstance(link := block.get("image_url"), Mapping):  # as OpenAI has them
        return {"type": "image", "url": link.get("url")}
    if kind == "image":
        return {key: value for key, value in block.items() if value is not None}  # Arrow gives each the keys of all
    text = next((block[key] for key in TEXT_BLOCK if isinstance(block.get(key), str)), None)
    if kind != "text" or text is None:
        raise BadRow(f"{where} holds a block of type {kind!r}, expected type text with text, or type image")
    return {"type": "text", "text": text}


def _calls(content: Any, where: str) -> list[dict[str, Any]]:
    """The calls of a message whose content is JSON of one call, or of a list of them."""
    try:
        calls = json.loads(content) if isinstance(content, str) else content
    except ValueError as error:
        raise BadRow(f"{where} calls a function, and its content is no JSON ({error})") from error
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise BadRow(f"{where} calls a function, and its content has no name and arguments")
    return [{"type": "function", "function": call} for call in calls]


def take_weights(messages: list[Message], column: str) -> list[int]:
    """Removes the weights from messages. Returns which of the assistant's messages, counted from 0, are excluded from
    the loss. Raises [`BadRow`] for a weight between 0 and 1."""
    untrained, number = [], 0
    for place, turn in enumerate(messages, start=1):
        weights = {key: turn.pop(key) for key in WEIGHTS if key in turn}
        for key, weight in weights.items():
            if weight not in (0, 1):
                raise BadRow(f"message {place} of column {column!r} has {key} {weight!r}, expected 0 or 1")
        if turn["role"] == "assistant":
            untrained += [number] if 0 in weights.values() else []
            number += 1
    return untrained


def template_kwargs(row: dict[str, Any]) -> dict[str, Any]:
    """The settings that a row has for the chat template. Raises [`BadRow`] where they are no dict."""
    settings = row.get(TEMPLATE_KWARGS)
    if isinstance(settings, str):
        try:
            settings = json.loads(settings)
        except ValueError as error:
            raise BadRow(f"column {TEMPLATE_KWARGS!r} holds no JSON ({error})") from error
    if settings is not None and not isinstance(settings, dict):
        raise BadRow(f"column {TEMPLATE_KWARGS!r} holds a {type(settings).__name__}, expected a dict")
    # Arrow gives every row the keys of all of them
    return {key: value for key, value in (settings or {}).items() if value is not None}


def system_of(row: dict[str, Any]) -> list[Message]:
    return [{"role": "system", "content": text_of(row["system"], "system")}] if row.get("system") else []


def _tools(row: dict[str, Any]) -> list | None:
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise BadRow(f"column 'tools' holds no JSON ({error})") from error
    if tools is not None and not isinstance(tools, list):
        raise BadRow(f"column 'tools' holds a {type(tools).__name__}, expected a list")
    return tools or None


def set_chat_template(tokenizer: PreTrainedTokenizerBase, path: str | None) -> str:
    """Gives the tokenizer its own template, or the file at `path`, or ours, and returns in words which one it is.
    Raises [`ConfigError`] where the file cannot be read, or none is given and ours does not fit."""
    if path not in (None, DEFAULT):
        tokenizer.chat_template = read_template(path)
        return path
    if path is None and tokenizer.chat_template:
        return "the tokenizer's"
    if isinstance(tokenizer, ProcessorMixin):
        raise ConfigError(
            "chat_template_path: the model's processor has no chat template, and our default places no images; give "
            "a Jinja file"
            if path is None
            else f"chat_template_path {DEFAULT}: places no images; leave it out, or give a Jinja file"
        )
    if tokenizer.eos_token is None:
        raise ConfigError("the tokenizer has neither chat template nor eos_token; give --chat_template_path")
    tokenizer.chat_template = DEFAULT_TEMPLATE
    reason = "" if path else ", as the tokenizer has none"
    return f"our default{reason}: <|im_start|>role, a new line, the content, {tokenizer.eos_token}"


def template_notes(
    tokenizer: PreTrainedTokenizerBase,
    path: str | None,
    *,
    chat: list[Message] | None,
    source: str,
    tools: list | None = None,
) -> list[str]:
    """Gives the tokenizer its template if rows are chats, and says which one it is. Of the first row `chat` is empty
    where it cannot be read, and `None` where it is a text. Raises [`ConfigError`] where a template is given for texts,
    or is broken."""
    if chat is not None:
        note = f"chat template: {set_chat_template(tokenizer, path)}"
        _refuse_broken(tokenizer, path, chat, tools)
        return [note]
    if path is not None:
        raise ConfigError(f"chat_template_path: rows of {source} hold no messages; leave it out")
    return []


def _refuse_broken(
    tokenizer: PreTrainedTokenizerBase, path: str | None, chat: list[Message], tools: list | None
) -> None:
    """Tells a template that is broken from rows that it refuses: those are told by their lines."""
    failures = [_failure(tokenizer, chat, tools), _failure(tokenizer, PLAIN_CHAT, None)]
    if not (all(failures) and chat or isinstance(failures[1], TemplateSyntaxError)):
        return
    line = f"line {failures[1].lineno}: " if isinstance(failures[1], TemplateSyntaxError) else ""
    what = "the tokenizer's chat template" if path is None else f"chat_template_path {path}"
    raise ConfigError(
        f"{what}: is broken ({line}{_reason(failures[1])}); correct it, or give --chat_template_path {DEFAULT}"
    )


def _failure(tokenizer: PreTrainedTokenizerBase, chat: list[Message], tools: list | None) -> Exception | None:
    """What the template fails with, other than that it refuses the messages in words of its own."""
    try:
        tokenizer.apply_chat_template(chat, tools=tools, tokenize=False)
    except TEMPLATE_ERRORS as error:
        return None if type(error) is TemplateError else error
    return None


def read_template(path: str) -> str:
    """Reads the file of a chat template; "default" names ours."""
    if path == DEFAULT:
        return DEFAULT_TEMPLATE
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template_path {path}: cannot be read ({error}); give a Jinja file, or {DEFAULT}"
        ) from error


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list | None,
    *,
    is_prompt: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> str:
    """Writes a chat as the model reads it, with what comes before an answer of the assistant where it `is_prompt`.
    Raises [`BadRow`] where the template refuses the messages, or would leave out one of them, or tools."""
    options = {"tokenize": False, "add_generation_prompt": is_prompt, **(settings or {})}

    def write(messages: list[Message], tools: list | None) -> str:
        return tokenizer.apply_chat_template(messages, **{"tools": tools, **options})

    try:
        text = write(messages, tools)
    except TEMPLATE_ERRORS as error:
        raise BadRow(f"the chat template refuses it ({_reason(error)})") from error

    def is_written_without(messages: list[Message], tools: list | None) -> bool:
        try:
            return write(messages, tools) == text
        except TEMPLATE_ERRORS:
            return False

    remedy = "give --chat_template_path a file that does, or leave them out"
    if tools and is_written_without(messages, None):
        raise BadRow(f"it has tools, which the chat template does not write; {remedy}")
    without_calls = [{key: turn[key] for key in turn if key != "tool_calls"} for turn in messages]
    if without_calls != messages and is_written_without(without_calls, tools):
        raise BadRow(f"it calls tools, which the chat template does not write; {remedy}")
    for number, turn in enumerate(messages):
        # A template may write a text in another way, such as without thoughts, but it has to depend on it.
        if not _is_in(turn["content"], text):
            longer = {**turn, "content": _longer(turn["content"])}
            if is_written_without([*messages[:number], longer, *messages[number + 1 :]], tools):
                raise BadRow(
                    f"the chat template leaves out message {number + 1}, of role {turn['role']!r}; give "
                    "--chat_template_path a file that writes it, or drop the message"
                )
    return text


def _is_in(content: str | list | None, text: str) -> bool:
    if isinstance(content, list):
        return all(_is_in(block.get("text"), text) for block in content)
    return (content or "").strip() in text


def _longer(content: str | list) -> str | list:
    if isinstance(content, str):
        return content + "x"
    return [{**block, "text": block["text"] + "x"} if "text" in block else block for block in content]


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
