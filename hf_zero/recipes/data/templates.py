"""Chat templates: the one of a run, and rendering chats, or refusing those that the template does not render whole."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from hf_zero.errors import ConfigError
from hf_zero.recipes.data.formats import Message
from hf_zero.recipes.data.rows import BadRow


DEFAULT = "default"  # the name of our own template, in place of a path
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
MARK = "zqz"  # what no chat template and hardly a text contains

TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, LookupError)


def set_chat_template(tokenizer: PreTrainedTokenizerBase, path: str | None) -> str:
    """Sets the template: the file at `path`, the tokenizer's own, or ours. Returns a description of it. Raises
    [`ConfigError`] if the file cannot be read, or ours does not fit."""
    if path not in (None, DEFAULT):
        tokenizer.chat_template = read_template(path)
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
        except TemplateSyntaxError as error:
            raise ConfigError(f"chat_template_path {path}: is broken (line {error.lineno}: {error})") from error
        except TEMPLATE_ERRORS:
            pass  # it refuses this chat, and may take those of the rows
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
    tokenizer.chat_template = DEFAULT_TEMPLATE
    reason = "" if path else ", as the tokenizer has none"
    return f"our default{reason}: <|im_start|>role, a new line, the content, {tokenizer.eos_token}"


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


def apply_template(tokenizer: PreTrainedTokenizerBase, messages: list[Message], **options: Any) -> Any:
    """Calls `apply_chat_template`. Raises [`BadRow`] if the template refuses the messages."""
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except TEMPLATE_ERRORS as error:
        line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
        raise BadRow(f"the chat template fails ({line}{' '.join(str(error).split())[:200]})") from error


def needs_blocks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template renders texts in blocks alone, as that of some models that read images."""

    def renders(content: str | list) -> bool:
        with suppress(BadRow):
            return MARK in apply_template(tokenizer, [{"role": "user", "content": content}], tokenize=False)
        return False

    return not renders(MARK) and renders([{"type": "text", "text": MARK}])


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list | None,
    *,
    is_prompt: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> str:
    """Renders a chat as the model reads it, followed by the beginning of an answer if it `is_prompt`. Raises
    [`BadRow`] if the template refuses the messages, or does not render one of them, or tools."""
    options = {"add_generation_prompt": is_prompt, **(settings or {})}
    text = apply_template(tokenizer, messages, tools=tools, tokenize=False, **options)
    check_rendered(tokenizer, messages, tools, text, options)
    return text


def check_rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list | None,
    text: str,
    options: Mapping[str, Any],
) -> None:
    """Raises [`BadRow`] if the rendered text does not depend on the tools, the calls, or the content of a message. A
    template may render a content in another way, such as without thoughts, but not without looking at it: unless all
    contents are in the text, in order, the chat is rendered again with a mark in each of them, and then with each
    unmarked one changed."""
    remedy = "give --chat_template_path a file that does, or leave them out"
    changed: list[tuple[str, list[Message], list | None]] = []  # what is lost if this renders the same
    if tools:
        changed.append((f"it has tools, which the chat template does not write; {remedy}", messages, None))
    if any(turn.get("tool_calls") for turn in messages):
        without = [{key: turn[key] for key in turn if key != "tool_calls"} for turn in messages]
        changed.append((f"it calls tools, which the chat template does not write; {remedy}", without, tools))

    def rendered(messages: list[Message], tools: list | None) -> str | None:
        try:
            return tokenizer.apply_chat_template(messages, tools=tools, **{**options, "tokenize": False})
        except TEMPLATE_ERRORS:
            return None

    texts = [_texts_of(turn["content"]) for turn in messages]
    if not _in_order(texts, text):
        marks = [f"{MARK}{number}{MARK}" for number in range(len(messages))]
        marked = [
            {**turn, "content": _longer(turn["content"], mark)} if own else turn
            for turn, own, mark in zip(messages, texts, marks)
        ]
        found = rendered(marked, tools) or ""
        for number, turn in enumerate(messages):
            if not texts[number] or marks[number] in found:
                continue
            longer = [*messages[:number], {**turn, "content": _longer(turn["content"], "x")}, *messages[number + 1 :]]
            problem = (
                f"the chat template leaves out message {number + 1}, of role {turn['role']!r}; give "
                "--chat_template_path a file that writes it, or drop the message"
            )
            changed.append((problem, longer, tools))
    if not changed:
        return
    whole = rendered(messages, tools)
    for problem, other, other_tools in changed:
        if rendered(other, other_tools) == whole:
            raise BadRow(problem)


def _texts_of(content: str | list | None) -> list[str]:
    """Returns the texts of a message that are not empty."""
    texts = [block.get("text") for block in content] if isinstance(content, list) else [content]
    return [text.strip() for text in texts if text and text.strip()]


def _in_order(texts: list[list[str]], rendered: str) -> bool:
    """Whether all texts are rendered one behind the other. A short one may also be a part of another."""
    end = 0
    for text in (text for each in texts for text in each):
        start = rendered.find(text, end)
        if start < 0:
            return False
        end = start + len(text)
    return True


def _longer(content: str | list, mark: str) -> str | list:
    if isinstance(content, str):
        return content + mark
    return [{**block, "text": block["text"] + mark} if "text" in block else block for block in content]
