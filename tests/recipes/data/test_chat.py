"""Chat templates: which one is used, and what it cannot write."""

import copy
import json
from unittest import mock

import pytest

from hf_zero.errors import ConfigError
from hf_zero.recipes.data.formats import FORMATS
from hf_zero.recipes.data.rows import BadRow
from hf_zero.recipes.data.templates import DEFAULT_TEMPLATE, render, set_chat_template
from hf_zero.recipes.models import load_tokenizer
from tests.recipes.data.conftest import chats


pytestmark = pytest.mark.quick


CHAT = chats()[1]["messages"]


@pytest.fixture
def with_template(tokenizer):
    def make(template: str | None):
        changed = copy.deepcopy(tokenizer)
        changed.chat_template = template
        return changed

    return make


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("one\n{% for m in messages %}{{ m['content'] }}", "line 2: .*endfor"),
        ("{{ messages[0]['content'] | shout }}", "line 1: No filter named 'shout'"),
        ("{{ message.speaker.name }}", "'message' is undefined"),
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate str"),
    ],
)
def test_a_chat_with_which_the_template_fails_is_a_bad_row(with_template, template, reason):
    with pytest.raises(BadRow, match=rf"the chat template fails \({reason}.*\)"):
        render(with_template(template), CHAT, None)


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


WITHOUT_TOOLS = """\
{%- for message in messages if message['role'] in ('user', 'assistant') %}
    {{- message['role'] + ': ' + message['content'].split('</think>')[-1].strip() + '\\n' }}
{%- endfor %}"""


def test_a_long_chat_is_rendered_three_times_at_most(with_template):
    """Its thoughts are left out of the text, so that contents are looked for."""
    tokenizer = with_template(WITHOUT_TOOLS)
    chat = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "<think>Hm.</think> So."}] * 20
    whole = type(tokenizer).apply_chat_template
    with mock.patch.object(type(tokenizer), "apply_chat_template", autospec=True, side_effect=whole) as renders:
        render(tokenizer, chat, None)
    assert renders.call_count <= 3


def test_older_processors_keep_the_chat_template_in_a_file_of_their_own(with_template, tmp_path):
    with_template(None).save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": WITHOUT_TOOLS}), encoding="utf-8")
    assert load_tokenizer(str(tmp_path)).chat_template == WITHOUT_TOOLS


def test_a_message_that_the_template_leaves_out_is_a_bad_row(with_template):
    tokenizer = with_template(WITHOUT_TOOLS)
    user, answer = CHAT[:2]
    said = {**answer, "content": "<think>Hm.</think> A cat."}
    assert render(tokenizer, [user, said, user], None).count("A cat.") == 1  # without what it thought
    for role in ("tool", "developer"):
        with pytest.raises(BadRow, match=f"the chat template leaves out message 2, of role '{role}'; give --chat_t"):
            render(tokenizer, [user, {"role": role, "content": "It is sunny"}, answer], None)
    with pytest.raises(BadRow, match="leaves out message 2, of role 'tool'"):  # whose content the answer has, too
        render(tokenizer, [user, {"role": "tool", "content": "3"}, {**answer, "content": "It is 3."}], None)
    calls = [{"type": "function", "function": {"name": "look", "arguments": {}}}]
    with pytest.raises(BadRow, match="it calls tools, which the chat template does not write"):
        render(tokenizer, [user, {**answer, "tool_calls": calls}], None)
    with pytest.raises(BadRow, match="it has tools, which the chat template does not write"):
        render(tokenizer, [user, answer], calls)
    writes = "{{ tools[0]['type'] }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    assert render(with_template(writes), [user, answer], calls).startswith("function")


def test_a_template_may_write_a_message_in_another_way(with_template):
    quoted = with_template("{% for m in messages %}{{ m['role'] }}: {{ m['content'] | tojson }}{% endfor %}")
    assert render(quoted, [{"role": "user", "content": 'Say "Hi"\n'}], None)


def test_a_chat_is_rendered_once_and_its_turns_of_the_assistant_are_labeled(with_template, monkeypatch):
    pytest.importorskip("trl")
    from hf_zero.recipes.sft import Encoder

    tokenizer, calls = with_template(DEFAULT_TEMPLATE), []
    render_once = tokenizer.apply_chat_template
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *a, **k: calls.append(a) or render_once(*a, **k))
    encoder = Encoder(FORMATS[0], tokenizer, assistant_only=True, completion_only=False, template=None)
    found = encoder({"messages": CHAT})
    assert len(calls) == 1
    counted = [label for label in found["labels"] if label != -100]
    assert tokenizer.decode(counted) == "".join(CHAT[number]["content"] + tokenizer.eos_token for number in (1, 3))
