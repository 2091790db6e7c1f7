"""The formats of rows, recognised by their columns, and their conversion to what TRL's trainers take.

The columns of each format are in `docs/recipes.md`. Rows of other programs become TRL's: the conversations of ShareGPT
`messages`, those of Alpaca `prompt` and `completion`. Messages may call tools, whose descriptions are in the column
`tools`: a list, or JSON of one.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

from datasets import Features, Json, Value

from hf_zero.errors import DataError
from hf_zero.recipes.data.rows import CONTENT, IGNORED, BadRow, Rows, text_of


Message = dict[str, Any]

TOKENS, LABELS = "input_ids", "labels"
MASKS = ("completion_mask", "assistant_masks")  # 1 where the loss may count a token
ROLES = ("system", "developer", "user", "assistant", "tool")
# Other names of roles in public data, in lower case.
ALIASES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "model", "bot", "chatbot", "ai"), "assistant"),
    **dict.fromkeys(("observation", "function", "function_response", "tool_response"), "tool"),
}
RENAMED = {"from": "role", "value": "content"}  # keys of ShareGPT's messages
CALLS = ("function_call", "tool_call")  # roles of an assistant's message whose content is a call, as JSON
WEIGHT = "weight"
WEIGHTS = (WEIGHT, "train", "loss_weight")  # keys of a message; 0 or false excludes it from the loss
IMAGE_COLUMNS = ("images", "image")  # a list of images, or one
MEDIA = (*IMAGE_COLUMNS, "audios", "videos")
TEXT_BLOCK = ("text", "value")  # keys of a block of type text that may hold it
UNTRAINED = "untrained"  # a key of our own: numbers of the assistant's messages that are excluded from the loss
TEMPLATE_KWARGS = "chat_template_kwargs"  # a column with settings for the chat template, as in TRL
NUM_TOKENS = 5  # of a prompt, where the loss counts every token
TOKENIZED = "tokenized"
TEXTS_ALONE = "this run trains on texts (sft on images, too, if the first row has some)"


@dataclass(frozen=True)
class Format:
    """A format of rows."""

    name: str  # one of `FORMAT_NAMES`
    columns: tuple[str, ...]  # those that it needs
    gives: tuple[str, ...]  # the columns of texts, messages or tokens that `read` returns
    # gives their values, of the format itself and a row; raises [`BadRow`]
    convert: Callable[[Any, dict[str, Any]], dict[str, Any]] = field(repr=False)
    counts: str | None = None  # what the loss counts by default: "completion", "assistant", or all of it
    is_chat: bool = True  # whether rows hold messages, and not texts
    refuses: tuple[str, ...] = MEDIA  # columns that have to be empty, since their content would be lost
    asks: tuple[tuple[str, ...], ...] = ()  # the columns of each conversation; of the only one, all that it gives
    in_blocks: bool = False  # whether texts of messages become blocks, for templates that render nothing else

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        """Converts a row. Chats come with `tools` and `chat_template_kwargs`, and `messages` with `untrained`. Raises
        [`BadRow`] if something is missing, or of another kind."""
        for column in self.columns:
            if row.get(column) is None:
                raise BadRow(f"nothing in column {column!r}")
        if full := next((column for column in self.refuses if row.get(column)), None):
            raise BadRow(f"column {full!r} is not empty, and {TEXTS_ALONE}; leave the column out")
        values = self.convert(self, row)
        if self.is_chat:
            settings = _json_column(row, TEMPLATE_KWARGS, dict) or {}
            settings = {key: value for key, value in settings.items() if value is not None}
            values |= {"tools": _json_column(row, "tools", list), TEMPLATE_KWARGS: settings}
            untrained = {column: _untrained(values[column]) for column in self.gives}
            if "messages" in self.gives:
                values[UNTRAINED] = untrained["messages"]
            elif untrained[self.gives[-1]]:  # TRL counts the whole completion
                raise BadRow("column 'completion' has a message of weight 0; put the conversation into 'messages'")
            if self.in_blocks:
                values |= {column: in_blocks(values[column]) for column in self.gives}
        return values

    def good(self, rows: Rows) -> Iterator[dict[str, Any]]:
        """Yields the rows that can be converted."""
        for row in rows.good():
            with suppress(BadRow):
                yield self.read(row)

    def chats_of(self, values: dict[str, Any]) -> list[list[Message]]:
        """Returns the conversations of a row that was read; none for texts."""
        asks = (self.asks or (self.gives,)) if self.is_chat else ()
        return [[turn for column in columns for turn in values[column]] for columns in asks]


def _messages(form: Format, row: dict[str, Any]) -> dict[str, Any]:
    (column,) = form.columns
    system = _system_of(row) if column == "conversations" else []
    return {"messages": system + _chat_in(row[column], column, form)}


def _prompt(form: Format, row: dict[str, Any]) -> dict[str, Any]:
    if form.is_chat:
        return {column: _chat_in(row[column], column, form) for column in ("prompt", "completion")}
    prompt = row["prompt"] and text_of(row["prompt"], "prompt")
    return {"prompt": prompt, "completion": text_of(row["completion"], "completion")}


def _alpaca(form: Format, row: dict[str, Any]) -> dict[str, Any]:
    question = text_of(row["instruction"], "instruction")
    if row.get("input"):
        question += "\n\n" + text_of(row["input"], "input")
    prompt = [*_system_of(row), *_history(row), {"role": "user", "content": question}]
    return {"prompt": prompt, "completion": [{"role": "assistant", "content": text_of(row["output"], "output")}]}


def _history(row: dict[str, Any]) -> list[Message]:
    """Returns the turns before the instruction: pairs of a question and its answer, as in LLaMA-Factory."""
    pairs = row.get("history") or []
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRow(f"column 'history' holds {str(pair)[:40]!r}, expected pairs of a question and its answer")
    roles = ("user", "assistant")
    return [{"role": role, "content": text_of(text, "history")} for pair in pairs for role, text in zip(roles, pair)]


FORMATS = (
    Format("messages", ("messages",), ("messages",), _messages, "assistant"),
    Format("conversations", ("conversations",), ("messages",), _messages, "assistant"),
    Format("prompt", ("prompt", "completion"), ("prompt", "completion"), _prompt, "completion"),
    Format("alpaca", ("instruction", "output"), ("prompt", "completion"), _alpaca, "completion"),
)
FormatName = Literal["text", "messages", "conversations", "prompt", "alpaca", "tokenized"]
FORMAT_NAMES: tuple[str, ...] = get_args(FormatName)


def text_format(column: str) -> Format:
    """Returns the format of rows of texts."""
    return Format("text", (column,), ("text",), _text, is_chat=False)


def _text(form: Format, row: dict[str, Any]) -> dict[str, Any]:
    return {"text": text_of(row[form.columns[0]], form.columns[0])}


def _tokenized_format(columns: Collection[str], vocab_size: int) -> Format:
    """Returns the format of rows of token ids, to which nothing is added. As in TRL, labels override masks."""
    more = [LABELS] if LABELS in columns else [name for name in MASKS if name in columns]
    gives = (TOKENS, *more)
    counts = "completion" if MASKS[0] in more else None
    return Format(TOKENIZED, gives, gives, partial(_tokens, vocab_size), counts, is_chat=False)


def num_prompt_tokens(row: Mapping[str, list[int]]) -> int:
    """Returns the number of tokens before the first that the loss counts; if it counts the first one, a few."""
    masks = [row[name] for name in MASKS if name in row]
    counted = [label != IGNORED for label in row[LABELS]] if LABELS in row else [bit == 1 for bit in (*masks, [])[0]]
    return next((number for number, counts in enumerate(counted) if counts), 0) or NUM_TOKENS


def recognise(rows: Rows, names: Collection[str], text_column: str, vocab_size: int) -> Format:
    """Finds the format of rows by their columns, among the `names` of `FORMAT_NAMES`. As in TRL, rows with token ids
    are tokenized, whatever other columns they have. Raises [`DataError`] if the columns fit none, or several."""
    known = (text_format(text_column), *FORMATS, _tokenized_format(rows.columns, vocab_size))
    hint = ", or name the one of texts with --dataset_text_field"
    fits = _fitting([form for form in known if form.name in names], rows, hint)
    fits = [form for form in fits if form.name == TOKENIZED] or fits
    if len(fits) > 1:
        names = " and ".join(form.name for form in fits)
        raise DataError(
            f"{rows.source}: columns found {rows.columns}, which fit the formats {names}; choose one with "
            "--dataset_format"
        )
    return _as_in(rows, fits[0]) if fits[0].name == "prompt" else fits[0]


def _as_in(rows: Rows, form: Any) -> Any:
    """Returns a format for chats if a column of the first row holds messages, and otherwise for texts. A text beside
    messages is then what is wrong with a row, and not the messages."""
    return replace(form, is_chat=any(_holds_messages(rows.example[column]) for column in form.columns))


def _holds_messages(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and all(isinstance(turn, dict) for turn in value))


def _fitting(formats: Sequence[Any], rows: Rows, hint: str = "") -> list[Any]:
    """Returns the formats whose columns the rows have."""
    fits = [form for form in formats if set(form.columns) <= set(rows.columns)]
    if not fits:
        expected = ", or ".join(" and ".join(form.columns) for form in formats)
        raise DataError(f"{rows.source}: columns found {rows.columns}, expected {expected}; rename them{hint}")
    return fits


def _tokens(vocab_size: int, form: Format, row: dict[str, Any]) -> dict[str, Any]:
    more = [name for name in (LABELS, *MASKS) if row.get(name) is not None and name not in form.columns]
    if more and LABELS not in form.columns:
        raise BadRow(f"column {more[0]!r}, which the first row does not have")
    if 0 in (row.get("attention_mask") or ()):
        raise BadRow("column 'attention_mask' holds 0, so the row is padded; leave the padding out")
    for name in form.columns:
        values, limit = row[name], 2 if name in MASKS else vocab_size
        least, also = (IGNORED, f", or {IGNORED}") if name == LABELS else (0, "")
        are_integers = isinstance(values, list) and values and all(type(value) is int for value in values)
        if not are_integers or not all(0 <= value < limit or value == least for value in values):
            raise BadRow(f"column {name!r} holds {str(values)[:40]}, expected integers from 0 to {limit - 1}{also}")
        if len(values) != len(row[TOKENS]):
            raise BadRow(f"column {name!r} holds {len(values)} numbers, expected {len(row[TOKENS])} as in {TOKENS!r}")
    return {name: row[name] for name in form.columns}


def _chat_in(turns: Any, column: str, form: Format) -> list[Message]:
    """Returns the messages in a column. Raises [`BadRow`] for anything else, and for images that the format does not
    take."""
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
    """Returns a message with role and content, also of ShareGPT's `from` and `value`. A message of the assistant that
    is excluded from the loss has a weight, which is 0."""
    if not isinstance(turn, dict):
        raise BadRow(f"{where} is a {type(turn).__name__}, expected role and content")
    # in a JSON array or a table, every message may have the keys of all
    turn = {key: value for key, value in turn.items() if value is not None}
    for key, name in RENAMED.items():
        if key in turn:
            value = turn.pop(key)
            turn.setdefault(name, value)  # beside a role or content it means something else
    role = str(turn.get("role", "")).strip().lower()
    if role in CALLS:
        turn |= {"role": "assistant", "content": "", "tool_calls": _calls(turn.get("content"), where)}
    elif ALIASES.get(role, role) in ROLES:
        turn["role"] = ALIASES.get(role, role)
    else:
        known = ", ".join((*ROLES, *ALIASES, *CALLS))
        raise BadRow(f"{where} has the role {role!r}, expected one of {known}; rename it")
    weights = {key: turn.pop(key) for key in WEIGHTS if key in turn}
    for key, weight in weights.items():
        if weight not in (0, 1):
            raise BadRow(f"{where} has {key} {weight!r}, expected 0 or 1")
    if 0 in weights.values() and turn["role"] == "assistant":
        turn[WEIGHT] = 0
    content = turn.setdefault("content", None)
    if content is None and not turn.get("tool_calls"):
        raise BadRow(f"{where} has no content")
    if not isinstance(content, str | list | None):
        raise BadRow(f"{where} holds a {type(content).__name__} as content, expected a text")
    if isinstance(content, list):
        blocks = [_block(block, where) for block in content]
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        turn["content"] = "".join(texts) if len(texts) == len(blocks) else blocks
    return turn


def in_blocks(messages: list[Message]) -> list[Message]:
    """Returns messages whose texts are blocks."""
    return [
        {**turn, "content": [{"type": "text", "text": turn["content"]}]} if isinstance(turn["content"], str) else turn
        for turn in messages
    ]


def in_texts(messages: list[Message]) -> list[Message]:
    """Undoes `in_blocks`."""
    return [
        {**turn, "content": "".join(block["text"] for block in turn["content"])}
        if isinstance(turn["content"], list)
        else turn
        for turn in messages
    ]


def _untrained(messages: list[Message]) -> list[int]:
    """Removes the weights of messages. Returns the numbers of the assistant's messages, counted from 0, that are
    excluded from the loss."""
    of_assistant = [turn for turn in messages if turn["role"] == "assistant"]
    return [number for number, turn in enumerate(of_assistant) if turn.pop(WEIGHT, 1) == 0]


def _block(block: Any, where: str) -> dict[str, Any]:
    if not isinstance(block, Mapping) or not isinstance(kind := block.get("type"), str):
        raise BadRow(f"{where} holds a block without a type, expected type text with text, or type image")
    if kind == "image_url":  # as OpenAI has them
        link = block.get("image_url")
        url = link.get("url") if isinstance(link, Mapping) else link
        if not isinstance(url, str):
            raise BadRow(f"{where} holds a block of type 'image_url' without a url")
        return {"type": "image", "url": url}
    if kind == "image":
        return {key: value for key, value in block.items() if value is not None}
    text = next((block[key] for key in TEXT_BLOCK if isinstance(block.get(key), str)), None)
    if kind != "text" or text is None:
        raise BadRow(f"{where} holds a block of type {kind!r}, expected type text with text, or type image")
    return {"type": "text", "text": text}


def _calls(content: Any, where: str) -> list[dict[str, Any]]:
    """Returns the calls of a message whose content is JSON of one call, or of a list of them."""
    calls = _from_json(content, f"{where} calls a function, and its content is")
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise BadRow(f"{where} calls a function, and its content has no name and arguments")
    return [{"type": "function", "function": call} for call in calls]


def _from_json(value: Any, what: str) -> Any:
    try:
        return (json.loads(value) if value.strip() else None) if isinstance(value, str) else value
    except ValueError as error:
        raise BadRow(f"{what} no JSON ({error})") from error


def _json_column(row: dict[str, Any], column: str, kind: type) -> Any:
    """Returns the value of a column, which may be JSON; `None` if it is empty."""
    value = _from_json(row.get(column), f"column {column!r} holds")
    if value is not None and not isinstance(value, kind):
        raise BadRow(f"column {column!r} holds a {type(value).__name__}, expected a {kind.__name__}")
    return value or None


def _system_of(row: dict[str, Any]) -> list[Message]:
    return [{"role": "system", "content": text_of(row["system"], "system")}] if row.get("system") else []


ANSWERS = ("chosen", "rejected")
COLUMNS = ("prompt", *ANSWERS)


@dataclass(frozen=True)
class Answers(Format):
    """A format of prompts, perhaps with answers: texts, or messages of texts that call no tools."""

    takes_settings: bool = True  # whether chats have settings for the template; other trainers have one for all rows
    others: Features = field(default_factory=Features)  # further columns that are kept

    @property
    def features(self) -> Features:
        """The columns that `read` returns."""
        settings = {TEMPLATE_KWARGS: Json()} if self.is_chat and self.takes_settings else {}
        kind = Json() if self.is_chat else Value("string")
        return Features({**dict.fromkeys(self.gives, kind), **settings, **self.others})

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        """Converts a row. Raises [`BadRow`] as `Format.read` does, and for tools."""
        if row.get("tools"):
            raise BadRow("column 'tools' holds tools, which are not supported")
        values = {**row, **super().read(row)}
        return {name: values.get(name) for name in self.features}


def _given(form: Answers, row: dict[str, Any]) -> dict[str, Any]:
    check = _chat if form.is_chat else lambda value, column, form: text_of(value, column)
    return {column: check(row[column], column, form) for column in form.gives if row.get(column) is not None}


def _chat(turns: Any, column: str, form: Answers) -> list[Message]:
    messages = _chat_in(turns, column, form)
    for number, message in enumerate(messages, start=1):
        if message.get("tool_calls"):
            raise BadRow(f"message {number} of column {column!r} calls tools, which is not supported")
        if WEIGHT in message:
            raise BadRow(f"message {number} of column {column!r} has weight 0, which only sft honours")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _preference(form: Answers, row: dict[str, Any]) -> dict[str, Any]:
    """Converts a preference. Without a prompt, the common beginning of both answers is one, as in TRL; a text beside
    answers in messages, as in UltraFeedback, may be in that beginning."""
    from trl import extract_prompt

    row, asked = {**row}, None if "conversations" in form.columns else row.get("prompt")
    is_text = form.is_chat and isinstance(asked, str)
    if form.is_chat:  # ShareGPT's answers are one message each
        row |= {name: [row[name]] for name in ANSWERS if isinstance(row[name], dict)}
        if "conversations" in form.columns:
            turns = row["conversations"]
            row["prompt"] = _system_of(row) + turns if isinstance(turns, list) else turns
    values = _given(form, {**row, "prompt": None} if is_text else row)
    chosen, rejected = values["chosen"], values["rejected"]
    if is_text and chosen[0]["role"] == rejected[0]["role"] == "assistant":
        return {"prompt": [{"role": "user", "content": text_of(asked, "prompt")}], **values}
    if "prompt" in values:
        return values
    shorter = min(len(chosen), len(rejected))
    if chosen[:shorter] == rejected[:shorter]:
        raise BadRow("one of chosen and rejected is what the other begins with, and there is no column 'prompt'")
    values = extract_prompt({"chosen": chosen, "rejected": rejected}) if chosen[0] == rejected[0] else {}
    if not values.get("prompt"):
        raise BadRow("chosen and rejected begin differently, and there is no column 'prompt'")
    if is_text and not any(turn["content"].strip() == asked.strip() for turn in values["prompt"]):
        raise BadRow("column 'prompt' holds a text that no message has with which chosen and rejected begin")
    return values


def _judged(form: Answers, row: dict[str, Any]) -> dict[str, Any]:
    label = row["label"]
    if isinstance(label, str):  # of a table
        label = {"true": True, "false": False}.get(label.strip().lower(), label)
    if not isinstance(label, bool):
        raise BadRow(f"column 'label' holds {label!r}, expected true or false")
    return {**_given(form, row), "label": label}


PREFERENCES = Answers("preferences", ANSWERS, COLUMNS, _preference, asks=tuple(("prompt", each) for each in ANSWERS))
_PAIR, _LABEL = ("prompt", "completion"), Features({"label": Value("bool")})
JUDGED = Answers("judged", (*_PAIR, *_LABEL), _PAIR, _judged, others=_LABEL)
PROMPTS = Answers("prompts", ("prompt",), ("prompt",), _given, takes_settings=False)


def format_of(formats: Sequence[Answers], rows: Rows) -> Answers:
    """Returns the first of several formats whose columns the rows have, for texts or chats as in the first row. Raises
    [`DataError`] if a column is missing."""
    form = _fitting(formats, rows)[0]
    if form is PREFERENCES:
        asked = next((name for name in ("prompt", "conversations") if name in rows.columns), None)
        form = replace(form, columns=(asked, *ANSWERS) if asked else ANSWERS)
    if form is PROMPTS:
        form = replace(form, others=_features_beside(rows, "prompt"))
    return _as_in(rows, form)


def _features_beside(rows: Rows, column: str) -> Features:
    """Returns the features of all columns but one. Those of local files may hold any JSON."""
    found = rows.data.features
    if found is None or CONTENT in found:
        found = dict.fromkeys(name for row in rows.good() for name in row)
        return Features({name: Json() for name in found if name != column})
    return Features({name: kind for name, kind in found.items() if name != column})
