"""The tool `chat`: talks to a saved model in the terminal.

Several processes share the parameters. Rank 0 reads and prints; all of them hold the same conversation. `transformers
chat` talks to a server, and loads no adapter.
"""

import contextlib
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import transformers
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase, TextStreamer

from hf_zero.comm.ranks import transport_errors
from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes.data.formats import Message
from hf_zero.recipes.data.rows import BadRow
from hf_zero.recipes.generation import (
    GenerationArguments,
    TextGenerator,
    load_generator,
    on_ranks,
    prompt_of,
    ranks_of,
)
from hf_zero.recipes.parser import option
from hf_zero.recipes.silence import printing


POSITIONAL = (("folder", "a model or an adapter: a folder, or a hub id"),)

CLEAR = "/clear"
HINT = f"Ctrl-C stops an answer, {CLEAR} starts a new conversation, Ctrl-D exits."
PATIENCE = timedelta(days=7)  # for what is typed


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
    """Answers `--prompt`, or what is typed until Ctrl-D."""
    if arguments.prompt is not None and not arguments.prompt.strip():
        raise ConfigError("prompt: is empty; give a text")
    on_ranks(converse, folder, arguments)


def converse(folder: str, arguments: Arguments) -> None:
    """Answers prompts. All ranks call it."""
    with transport_errors("chat"):
        state = ranks_of(arguments)
        generator = load_generator(folder, arguments, state.device, is_sharded=state.num_processes > 1)
        transformers.set_seed(arguments.seed)
        conversation = Conversation(generator, arguments, state)
        with printing(state.is_main_process):
            if arguments.prompt is None:
                conversation.talk()
            else:
                try:
                    conversation.answer(arguments.prompt)
                except BadRow as error:
                    raise DataError(f"prompt: {error}") from error
        state.destroy_process_group()


class Conversation:
    """The messages so far. Without a chat template there are none: each text is continued by itself."""

    def __init__(self, generator: TextGenerator, arguments: Arguments, state: PartialState):
        self._generator, self._arguments, self._state = generator, arguments, state
        self._messages: list[Message] = []
        self._is_alone = state.num_processes == 1
        self._group = None if self._is_alone else dist.new_group(backend="gloo", timeout=PATIENCE)

    def talk(self) -> None:
        """Answers what is typed. Ctrl-C stops an answer; several processes, which would not stop at the same token,
        it ends."""
        is_in_terminal = self._state.is_main_process and sys.stdin.isatty()
        if is_in_terminal:
            with contextlib.suppress(ImportError):  # line editing and history
                import readline  # noqa: F401
            print(HINT)
        while True:
            try:
                text = self._of_first(_typed("> " if is_in_terminal else "") if self._state.is_main_process else None)
                if text is None:
                    return
                if text == CLEAR:
                    self._messages = []
                elif text:
                    self.answer(text)
            except BadRow as error:
                print(f"{error}; {CLEAR} starts a new conversation", file=sys.stderr)
            except KeyboardInterrupt:
                if not self._is_alone:
                    raise
                print(f"\n{HINT}", file=sys.stderr)

    def answer(self, text: str) -> None:
        """Prints the answer to a text. An interrupted answer stays in the conversation. Raises [`BadRow`] if the text
        cannot be answered."""
        prompt = prompt_of(text, self._generator, self._arguments)
        if isinstance(prompt, list) and self._messages:
            prompt = [*self._messages, prompt[-1]]
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
        self._messages = self._of_first(self._messages)

    def _of_first(self, value: Any) -> Any:
        """Returns rank 0's value on all ranks."""
        values = [value]
        if not self._is_alone:
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]


def _typed(prompt: str) -> str | None:
    """Returns the next line without spaces around it; `None` after Ctrl-D."""
    try:
        return input(prompt).strip()
    except EOFError:
        return None
