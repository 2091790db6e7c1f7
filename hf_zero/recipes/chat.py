"""The tool `chat`: chats with a saved model or adapter in the terminal."""

import contextlib
import sys
from dataclasses import dataclass

import torch
import transformers
from transformers import PreTrainedTokenizerBase, TextStreamer

from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes.data.formats import Message
from hf_zero.recipes.data.rows import BadRow
from hf_zero.recipes.generation import GenerationArguments, TextGenerator, load_generator
from hf_zero.recipes.parser import option


POSITIONAL = (("folder", "a model or an adapter: a folder, or a hub id"),)

CLEAR = "/clear"
HINT = f"Ctrl-C stops an answer, {CLEAR} starts a new conversation, Ctrl-D exits."


@dataclass
class Arguments(GenerationArguments):
    """Keys of `chat`."""

    prompt: str | None = option(None, "Answer this prompt and exit.")


class PrintedAnswer(TextStreamer):
    """Prints an answer while it is generated, and keeps its text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        super().on_finalized_text(text, stream_end)


def run(folder: str, arguments: Arguments) -> None:
    """Answers `--prompt`, or the lines that are typed until Ctrl-D."""
    if arguments.prompt is not None and not arguments.prompt.strip():
        raise ConfigError("prompt: is empty; give a text")
    device = None if arguments.use_cpu else torch.accelerator.current_accelerator(check_available=True)
    generator = load_generator(folder, arguments, device or torch.device("cpu"))
    transformers.set_seed(arguments.seed)
    messages: list[Message] = []
    if arguments.prompt is not None:
        try:
            answer(arguments.prompt, generator, messages)
        except BadRow as error:
            raise DataError(f"prompt: {error}") from error
        return
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # line editing and history
            import readline  # noqa: F401
        print(HINT)
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
            if text == CLEAR:
                messages.clear()
            elif text:
                answer(text, generator, messages)
        except EOFError:
            return
        except BadRow as error:
            print(f"{error}; {CLEAR} starts a new conversation", file=sys.stderr)
        except KeyboardInterrupt:
            print(f"\n{HINT}", file=sys.stderr)


def answer(text: str, generator: TextGenerator, messages: list[Message]) -> None:
    """Prints the answer to a text, and appends both to the messages of the conversation, even if Ctrl-C stops the
    answer. Without a chat template there are no messages. Raises [`BadRow`] if the text cannot be answered."""
    prompt = generator.prompt_of(text)
    if isinstance(prompt, list) and messages:
        prompt = [*messages, prompt[-1]]
    tokens = generator.tokens(prompt)
    room, printed = generator.room(tokens), PrintedAnswer(generator.tokenizer)
    try:
        generator.generate([tokens], printed, max_new_tokens=room)
    except KeyboardInterrupt:
        printed.end()
        raise
    finally:
        if isinstance(prompt, list):
            messages[:] = [*prompt, {"role": "assistant", "content": printed.text}]
