"""The tool `chat`: talks to the model of a folder in the terminal. Answers appear while they are generated.

transformers has `transformers chat`, which talks to a server, sends every text through a chat template, and knows no
adapter in a folder.
"""

import contextlib
import sys
from dataclasses import dataclass, field

import transformers
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase, TextStreamer

from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes.data.formats import Message
from hf_zero.recipes.data.rows import BadRow
from hf_zero.recipes.generation import GenerationArguments, TextGenerator, load_generator, prompt_of


POSITIONAL = ("folder", "a model or an adapter: a folder, or a hub id")

ANEW = "/clear"
HINT = f"Ctrl-C stops an answer, {ANEW} begins a new conversation, Ctrl-D ends."


@dataclass
class Arguments(GenerationArguments):
    """Keys of `chat`."""

    prompt: str | None = field(default=None, metadata={"help": "Is answered, and the program ends."})


class PrintedAnswer(TextStreamer):
    """Prints an answer as it is generated, and keeps its text."""

    text: str

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        super().on_finalized_text(text, stream_end)


class Conversation:
    """What was said so far. Without a chat template nothing is kept: each text is continued by itself.

    Args:
        generator ([`TextGenerator`]): answers.
        arguments ([`Arguments`]): as parsed.
    """

    def __init__(self, generator: TextGenerator, arguments: Arguments):
        self._generator, self._arguments = generator, arguments
        self._messages: list[Message] = []

    def clear(self) -> None:
        """Forgets what was said."""
        self._messages = []

    def answer(self, text: str) -> None:
        """Prints the answer to a text. What Ctrl-C cuts off is kept as it is.

        Raises:
            BadRow: the chat template refuses the conversation, or it is longer than the model takes.
        """
        prompt = prompt_of(text, self._generator, self._arguments)
        if isinstance(prompt, list):
            prompt = [*self._messages, prompt[-1]] if self._messages else prompt
        tokens = self._generator.tokens(prompt)
        room, printed = self._generator.room(tokens), PrintedAnswer(self._generator.tokenizer)
        try:
            self._generator.generate([tokens], printed, max_new_tokens=room)
        except KeyboardInterrupt:
            printed.end()
            raise
        finally:
            if isinstance(prompt, list):
                self._messages = [*prompt, {"role": "assistant", "content": printed.text}]


def run(folder: str, arguments: Arguments) -> None:
    """Answers `--prompt`, or what is typed until Ctrl-D.

    Args:
        folder (`str`): a model or an adapter, or a hub id.
        arguments ([`Arguments`]): as parsed.

    Raises:
        ConfigError: it is not there, or is no language model; a key does not fit.
        CheckpointError: it does not load.
        DataError: `--prompt` cannot be answered.
    """
    if arguments.prompt is not None and not arguments.prompt.strip():
        raise ConfigError("prompt: is empty; give a text")
    generator = load_generator(folder, arguments, PartialState(cpu=arguments.use_cpu).device)
    transformers.set_seed(arguments.seed)
    conversation = Conversation(generator, arguments)
    if arguments.prompt is None:
        _talk(conversation)
        return
    try:
        conversation.answer(arguments.prompt)
    except BadRow as error:
        raise DataError(f"prompt: {error}") from error


def _talk(conversation: Conversation) -> None:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):  # with it, lines can be edited, and called up again
            import readline  # noqa: F401
        print(HINT)
    while True:
        try:
            text = input("> " if is_terminal else "").strip()
            if text == ANEW:
                conversation.clear()
            elif text:
                _answer(conversation, text)
        except EOFError:
            return
        except KeyboardInterrupt:  # at the prompt, or once more while an answer stops
            print(f"\n{HINT}")


def _answer(conversation: Conversation, text: str) -> None:
    try:
        conversation.answer(text)
    except BadRow as error:
        print(f"{error}; {ANEW} begins a new conversation", file=sys.stderr)
    except KeyboardInterrupt:
        print("(stopped)", file=sys.stderr)
