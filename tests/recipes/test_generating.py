"""Models that answer: `chat` in the terminal, `generate` for files of prompts."""

import io
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from hf_zero.recipes.chat import HINT
from hf_zero.recipes.cli import main
from hf_zero.recipes.data.templates import DEFAULT_TEMPLATE
from tests.recipes.preferences import THINGS, write_rows
from tests.recipes.ranks import run_on_ranks


NUM_NEW = 6
TEXTS = [f"the {thing} is" for thing in THINGS] + ["the door is red and the old house is", "a lamp"]


@pytest.fixture(scope="session")
def tiny_chat(tiny_llama, tmp_path_factory):
    """The tiny Llama with a chat template, more positions, and weights so large that answers depend on all tokens."""
    folder = tmp_path_factory.mktemp("tiny_chat")
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, max_position_embeddings=256)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(20 if param.dim() > 1 else 1)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.chat_template = DEFAULT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adapter(tiny_llama, tmp_path_factory):
    """A LoRA adapter on the tiny Llama that changes what it says; its folder, and the model with it."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama), config)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn_like(param) * 0.5)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return folder, model.eval()


def expected(folder, prompt: str | list, model=None) -> str:
    """The greedy answer, as transformers gives it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if isinstance(prompt, list):
        inputs = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    model = model or AutoModelForCausalLM.from_pretrained(folder)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    tokens = model.generate(**inputs, max_new_tokens=NUM_NEW, do_sample=False)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.fixture
def chat(capsys, monkeypatch):
    """Runs `chat`, typing lines; gives the exit code, what was printed, and what of a fault was said."""

    def call(folder, *flags: str, typed: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        capsys.readouterr()
        code = main(["chat", str(folder), "--use_cpu=true", f"--max_new_tokens={NUM_NEW}", *flags])
        return code, *capsys.readouterr()

    return call


@pytest.mark.quick
def test_a_prompt_is_continued_where_there_is_no_chat_template(chat, tiny_llama):
    assert chat(tiny_llama, "--prompt=the door is") == (0, expected(tiny_llama, "the door is") + "\n", "")


def test_an_adapter_answers_on_its_base(chat, tiny_llama, adapter):
    folder, model = adapter
    code, said, _ = chat(folder, "--prompt=the door is")
    assert code == 0
    assert said == expected(tiny_llama, "the door is", model) + "\n" != expected(tiny_llama, "the door is") + "\n"


def test_a_conversation_has_a_system_prompt_and_remembers_until_it_is_cleared(chat, tiny_chat):
    code, said, _ = chat(tiny_chat, "--system=be old", typed="the door\n\nthe car\n/clear\nthe car\n")
    assert code == 0
    first = [turn("system", "be old"), turn("user", "the door")]
    answer = expected(tiny_chat, first)
    second = expected(tiny_chat, [*first, turn("assistant", answer), turn("user", "the car")])
    anew = expected(tiny_chat, [turn("system", "be old"), turn("user", "the car")])
    assert said == f"{answer}\n{second}\n{anew}\n" and len({answer, second, anew}) == 3


def test_texts_are_continued_as_they_are_if_asked(chat, tiny_chat):
    assert chat(tiny_chat, "--plain=true", typed="the door is\n")[1] == expected(tiny_chat, "the door is") + "\n"


def test_ctrl_c_stops_an_answer_and_not_the_program(chat, tiny_chat, monkeypatch):
    put, tokens = TextStreamer.put, []

    def interrupted(self, value) -> None:
        put(self, value)
        tokens.append(value)
        if len(tokens) == 4:  # the prompt, and three tokens
            raise KeyboardInterrupt

    monkeypatch.setattr(TextStreamer, "put", interrupted)
    code, said, faults = chat(tiny_chat, typed="the door\nthe car\n")
    assert (code, faults) == (0, f"\n{HINT}\n")
    whole = expected(tiny_chat, [turn("user", "the door")])
    cut, second, _ = said.split("\n")
    assert cut != whole and whole.startswith(cut)
    chats = [turn("user", "the door"), turn("assistant", cut), turn("user", "the car")]
    assert second == expected(tiny_chat, chats)


def test_ctrl_c_at_one_prompt_ends_the_program(chat, tiny_llama, monkeypatch):
    def interrupted(self, value) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TextStreamer, "put", interrupted)
    assert chat(tiny_llama, "--prompt=the door is") == (130, "\n", "hf-zero: interrupted\n")


def test_a_conversation_that_is_too_long_is_told_and_can_be_cleared(chat, tiny_chat):
    code, said, faults = chat(tiny_chat, typed=f"{'door ' * 300}\nthe car\n")
    assert code == 0 and "positions for prompt and answer; /clear starts a new conversation" in faults
    assert said == expected(tiny_chat, [turn("user", "the car")]) + "\n"


def test_what_is_drawn_depends_on_the_seed(chat, tiny_llama):
    flags = ("--prompt=the door is", "--temperature=2.0")
    first, again, other = (chat(tiny_llama, *flags, f"--seed={seed}")[1] for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt="], "prompt: is empty"),
        (["--system=x"], "system: needs a chat template"),
        (["--temperature=0"], "does not generate (`temperature` (=0.0) has to be a strictly positive float"),
        (["--max_new_tokens=0"], "max_new_tokens 0: expected 1 or more"),
        (["--do_sample=false", "--top_p=0.9"], "top_p: has no effect with --do_sample false; leave one of them out"),
        (["--dtype=float8"], "dtype: invalid choice: 'float8' (choose from "),
        (["--base_model_name_or_path=x"], "is no adapter; leave it out"),
        (["--max_tokens=3"], "unknown key '--max_tokens'; did you mean --max_new_tokens?"),
    ],
)
def test_a_key_that_cannot_work_is_refused_in_a_line(chat, tiny_llama, flags, message):
    code, said, faults = chat(tiny_llama, "--prompt=the", *flags)
    assert (code, said, faults.count("\n")) == (2, "", 1) and message in faults


@pytest.mark.quick
@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("nothing", "no such folder"),
        ("empty", "no config.json"),
        ("alone", "contains no tokenizer"),
        ("encoder", "holds a BertModel, which writes no text"),
    ],
)
def test_a_folder_that_is_no_language_model_is_refused_in_a_line(
    chat, tiny_llama, tiny_model, tmp_path, folder, message
):
    (tmp_path / "empty").mkdir()
    AutoModelForCausalLM.from_pretrained(tiny_llama).save_pretrained(tmp_path / "alone")
    code, said, faults = chat(tiny_model if folder == "encoder" else tmp_path / folder, "--prompt=the")
    assert code in (1, 2) and (said, faults.count("\n")) == ("", 1) and message in faults


@pytest.fixture
def generate(capsys, tmp_path):
    """Runs `generate`; gives the exit code, what was said, and the rows that were written."""

    def call(folder, prompts, *flags: str) -> tuple[int, str, list[dict]]:
        output = tmp_path / "answers" / "out.jsonl"
        code = main(command(folder, prompts, output, *flags))
        said = capsys.readouterr()
        lines = output.read_text(encoding="utf-8").splitlines() if output.is_file() else []
        return code, said.out + said.err, [json.loads(line) for line in lines]

    return call


def command(folder, prompts, output, *flags: str) -> list[str]:
    given = [f"--prompts={prompts}", f"--output={output}", f"--max_new_tokens={NUM_NEW}", *flags]
    return ["generate", str(folder), *given]


def test_lines_of_text_are_answered_in_their_order(generate, tiny_llama, tmp_path):
    (tmp_path / "lines.txt").write_text("\n\n".join(TEXTS), encoding="utf-8")
    code, said, rows = generate(tiny_llama, tmp_path / "lines.txt", "--batch_size=3")
    assert code == 0 and said.endswith(f"out.jsonl: {len(TEXTS)} answers\n")
    assert rows == [{"prompt": text, "completion": expected(tiny_llama, text)} for text in TEXTS]


def test_chats_are_answered_and_their_rows_kept(generate, tiny_chat, tmp_path):
    rows = [{"id": number, "prompt": [turn("user", text)]} for number, text in enumerate(TEXTS[:3])]
    code, said, found = generate(tiny_chat, write_rows(tmp_path / "rows.jsonl", rows), "--output_column=said")
    assert code == 0, said
    assert found == [{**row, "said": expected(tiny_chat, row["prompt"])} for row in rows]


@pytest.mark.parametrize("stage", [0, 3])
def test_two_processes_give_the_answers_of_one(tiny_llama, tiny_chat, adapter, tmp_path, stage):
    """Five batches for two ranks: one has none left, and keeps in step."""
    folder, model = adapter if stage == 3 else (tiny_chat, None)
    prompts = write_rows(tmp_path / "rows.jsonl", [{"prompt": text} for text in TEXTS])
    flags = ["--batch_size=2", f"--zero_stage={stage}", "--plain=true"]
    first, second = run_on_ranks(command(folder, prompts, tmp_path / "out.jsonl", *flags), tmp_path)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert second.out == ""
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    tokenizer = folder if model is None else tiny_llama
    assert rows == [{"prompt": text, "completion": expected(tokenizer, text, model)} for text in TEXTS]


GOOD = {"prompt": "the door is"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([GOOD, {"prompt": ""}], "line 2: nothing in column 'prompt'; correct it"),
        ([GOOD, {"prompt": [turn("user", "x")]}], "line 2: column 'prompt' holds a list, expected a text"),
        ([GOOD, {"prompt": "door " * 61}], "which leaves"),
        ([GOOD, {"prompt": "door " * 99}], "has 64 positions for prompt and answer"),
        ([GOOD, {**GOOD, "completion": "x"}], "has a column 'completion' already; name another with --output_column"),
        ([{"text": "the"}], "expected prompt; rename them"),
        ([{"prompt": [turn("user", "x")]}], "has no chat template, which prompts of messages need"),
        ([], "no rows, expected one at least"),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_written(generate, tiny_llama, tmp_path, rows, message):
    code, said, found = generate(tiny_llama, write_rows(tmp_path / "rows.jsonl", rows))
    assert code in (1, 2) and found == [] and said.count("\n") == 1 and message in said, said


def test_files_are_asked_for_and_none_is_overwritten(generate, tiny_llama, tmp_path, capsys):
    assert main(["generate", str(tiny_llama)]) == 2
    assert "prompts: not set" in capsys.readouterr().err
    prompts = write_rows(tmp_path / "rows.jsonl", [GOOD])
    code, said, rows = generate(tiny_llama, prompts)
    assert code == 0, said
    again = generate(tiny_llama, prompts)
    assert again[::2] == (2, rows) and "out.jsonl: exists; give another, or --overwrite" in again[1]
    assert generate(tiny_llama, prompts, "--overwrite=true")[0] == 0
    assert "no such file; check prompts" in generate(tiny_llama, tmp_path / "nowhere.jsonl")[1]
