"""Which tokens of a chat the assistant said."""

import copy
from pathlib import Path

import pytest

from hf_zero.errors import ConfigError
from hf_zero.recipes.data import BadRow
from hf_zero.recipes.data.chat import DEFAULT_TEMPLATE, chat_tokens, set_chat_template, template_notes
from tests.recipes.data.conftest import chats


pytestmark = pytest.mark.quick


CHAT = chats()[1]["messages"]
UNMARKED = DEFAULT_TEMPLATE.replace("{%- generation %}{{", "{{-").replace("{% endgeneration %}", "")
# As Qwen3's: only the last answer begins with what the model thought.
THINKING = UNMARKED.replace("assistant' %}", "assistant' %}{{- '<think>' if loop.last }}")


@pytest.fixture
def with_template(tokenizer):
    def make(template: str | None):
        changed = copy.deepcopy(tokenizer)
        changed.chat_template = template
        return changed

    return make


def said(tokenizer, messages) -> str:
    ids, counts = chat_tokens(tokenizer, messages, None, marked=True)
    return tokenizer.decode([token for token, count in zip(ids, counts, strict=True) if count])


def test_with_and_without_generation_marks_the_same_tokens_are_the_assistants(with_template):
    marked, unmarked = with_template(DEFAULT_TEMPLATE), with_template(UNMARKED)
    assert "generation" not in UNMARKED.replace("add_generation_prompt", "")
    for row in chats():
        found = chat_tokens(marked, row["messages"], None, marked=True)
        assert chat_tokens(unmarked, row["messages"], None, marked=True) == found
    answers = [message["content"] for message in CHAT if message["role"] == "assistant"]
    assert len(answers) == 2
    assert said(marked, CHAT) == "".join(f"{answer}<|endoftext|>" for answer in answers)


def test_without_marks_white_space_of_the_answer_itself_is_the_assistants(with_template):
    template = "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello \n"}]
    assert said(with_template(template), messages) == "Hello \n"


def test_a_template_that_renders_a_turn_otherwise_later_is_refused_in_one_line(with_template):
    tokenizer = with_template(THINKING)
    assert said(tokenizer, CHAT[:2]) == f"<think>{CHAT[1]['content']}<|endoftext|>"
    with pytest.raises(BadRow, match="renders message 2 otherwise alone .* give --chat_template_path default"):
        said(tokenizer, CHAT)


def test_what_the_template_refuses_is_a_bad_row(with_template):
    tokenizer = with_template("{{ raise_exception('roles must alternate') }}")
    for marked in (True, False):
        with pytest.raises(BadRow, match=r"the chat template refuses it \(roles must alternate\)"):
            chat_tokens(tokenizer, CHAT, None, marked=marked)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("one\n{% for m in messages %}{{ m['content'] }}", "line 2: .*endfor"),
        ("{{ messages[0]['content'] | shout }}", "line 1: No filter named 'shout'"),
        ("{{ message.speaker.name }}", "'message' is undefined"),
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate str"),
    ],
)
def test_a_broken_template_is_named_and_no_row_is_blamed(with_template, tmp_path, template, reason):
    path = str(tmp_path / "chat.jinja")
    Path(path).write_text(template, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"chat_template_path {path}: is broken .*{reason}.*; correct it"):
        template_notes(with_template(None), path, chat=CHAT, source="rows")
    with pytest.raises(ConfigError, match="the tokenizer's chat template: is broken"):
        template_notes(with_template(template), None, chat=CHAT, source="rows")


@pytest.mark.parametrize(
    ("template", "chat", "tools"),
    [
        ("{{ raise_exception('roles must alternate') }}", CHAT, None),
        ("{{ tools[0]['name'] }}", CHAT, [{"name": "search"}]),
        ("{{ messages[1]['content'] + '' }}", [], None),
        ("{{ messages[1]['content'] + '' }}", CHAT[:1], None),
    ],
)
def test_a_template_that_renders_some_chat_is_not_broken(with_template, template, chat, tools):
    assert template_notes(with_template(template), None, chat=chat, tools=tools, source="rows")


def test_tools_reach_the_template(with_template):
    tokenizer = with_template("{{ tools[0]['name'] }}{% generation %}{{ messages[0]['content'] }}{% endgeneration %}")
    ids, counts = chat_tokens(tokenizer, CHAT[:1], [{"name": "search "}], marked=True)
    assert tokenizer.decode(ids) == f"search {CHAT[0]['content']}"
    assert 0 < sum(counts) < len(counts)


@pytest.mark.parametrize("marked", [True, False])
def test_tools_that_the_default_template_would_leave_out_are_refused(with_template, marked):
    tokenizer = with_template(DEFAULT_TEMPLATE)
    calls = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [{"name": "search"}]}]
    for messages, tools in ((CHAT, [{"name": "search"}]), (calls, None)):
        with pytest.raises(BadRow, match="it has tools, which our default chat template does not write"):
            chat_tokens(tokenizer, messages, tools, marked=marked)


def test_the_template_is_the_file_or_the_tokenizers_or_the_default(with_template, tmp_path):
    tokenizer = with_template(None)
    assert set_chat_template(tokenizer, None).startswith("our default, as the tokenizer has none")
    assert tokenizer.chat_template == DEFAULT_TEMPLATE
    tokenizer = with_template("own")
    assert set_chat_template(tokenizer, "default").startswith("our default: ")
    assert tokenizer.chat_template == DEFAULT_TEMPLATE
    tokenizer = with_template("own")
    assert set_chat_template(tokenizer, None) == "the tokenizer's"
    (tmp_path / "chat.jinja").write_text("of the file", encoding="utf-8")
    assert set_chat_template(tokenizer, str(tmp_path / "chat.jinja")) == str(tmp_path / "chat.jinja")
    assert tokenizer.chat_template == "of the file"
    with pytest.raises(ConfigError, match="chat_template_path nowhere: cannot be read"):
        set_chat_template(tokenizer, "nowhere")
