"""Chat templates: which one is used, and whether it writes a chat."""

from pathlib import Path

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from hf_zero.errors import ConfigError
from hf_zero.recipes.data.formats import Message
from hf_zero.recipes.data.rows import BadRow


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


# A template that cannot render this either is broken, whatever the rows are.
PLAIN_CHAT: list[Message] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def set_chat_template(tokenizer: PreTrainedTokenizerBase, path: str | None) -> str:
    """Gives the tokenizer the template that chats are rendered with, and returns in words which one it is: its own, or
    the file at `path`, or ours. It is saved with the model. Raises [`ConfigError`] where the file cannot be read, or
    none is given and ours does not fit."""
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
    """Gives the tokenizer its template if rows are chats, and says which one it is.

    Of the first row `chat` is empty where it cannot be read, and `None` where it is a text. Raises [`ConfigError`]
    where a template is given for texts, or is broken.
    """
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
    except (TemplateError, ValueError, TypeError, LookupError) as error:
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
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list | None, *, is_prompt: bool = False
) -> str:
    """Writes a chat as the model reads it, with what comes before an answer of the assistant where it `is_prompt`.
    Raises [`BadRow`] where the template refuses the messages, or would leave tools out."""
    if tokenizer.chat_template == DEFAULT_TEMPLATE and (tools or any(turn.get("tool_calls") for turn in messages)):
        raise BadRow("it has tools, which our default chat template does not write; give --chat_template_path a file")
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=is_prompt)
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise BadRow(f"the chat template refuses it ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
