"""The tool `chat`: talks to the model of a folder in the terminal. Answers appear while they are generated.

Several processes share the parameters. All of them hold the same conversation and generate the same answers; the first
one reads and prints. After each token they compare what they have generated, since ranks that differ would end their
answers at different tokens, and then wait for each other.

transformers has `transformers chat`, which talks to a server, sends every text through a chat template, and knows no
adapter in a folder.
"""

import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase, TextStreamer

from hf_zero.comm.base import Comm
from hf_zero.comm.distributed import DistributedComm
from hf_zero.comm.ranks import CPU, transport_errors
from hf_zero.errors import CommError, ConfigError, DataError
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
from hf_zero.recipes.settings import launched_world_size
from hf_zero.recipes.silence import printing


POSITIONAL = (("folder", "a model or an adapter: a folder, or a hub id"),)

ANEW = "/clear"
HINT = f"Ctrl-C stops an answer, {ANEW} begins a new conversation, Ctrl-D ends."
PATIENCE = timedelta(days=7)  # for what is typed


@dataclass
class Arguments(GenerationArguments):
    """Keys of `chat`."""

    prompt: str | None = option(None, "Is answered, and the program ends.")


class PrintedAnswer(TextStreamer):
    """Prints an answer as it is generated, and keeps its text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        super().on_finalized_text(text, stream_end)


class Keyboard:
    """What is typed at the first rank, which all ranks take as one.

    Ranks that share a model stop at the same token, or they would wait for each other. So on Ctrl-C the first rank
    notes it, and tells the others after each token. Ctrl-C stops an answer, and not the program, where it `goes_on`;
    under a launcher such as torchrun, which kills its processes 30 seconds after Ctrl-C, it ends the program.
    """

    def __init__(self, comm: Comm, *, goes_on: bool):
        self._comm, self.goes_on = comm, goes_on
        self._is_typing = self._is_interrupted = False

    @contextlib.contextmanager
    def interrupts(self) -> Iterator[None]:
        """Inside, ranks that share a model leave Ctrl-C to the first one. A rank is interrupted at once when it is
        alone, or when Ctrl-C ends the program."""
        if self._comm.num_ranks == 1 or not self.goes_on:
            yield
            return
        before = signal.signal(signal.SIGINT, signal.SIG_IGN if self._comm.rank else self._note)
        try:
            self._comm.barrier()  # the first rank may end an answer now
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _note(self, number: int, frame: Any) -> None:
        if self._is_typing:
            raise KeyboardInterrupt
        self._is_interrupted = True

    def read(self) -> str | None:
        """Returns the next text that is typed, the same on all ranks; `None` after Ctrl-D."""
        return self._comm.broadcast_object(self._typed() if self._comm.rank == 0 else None)

    @property
    def is_in_terminal(self) -> bool:
        """Whether somebody types on this rank."""
        return self._comm.rank == 0 and sys.stdin.isatty()

    def _typed(self) -> str | None:
        prompt = "> " if self.is_in_terminal else ""
        while True:
            self._is_interrupted = False
            try:
                self._is_typing = True
                return input(prompt).strip()
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not self.goes_on:
                    raise
                self._is_typing = False
                print(f"\n{HINT}")
            finally:
                self._is_typing = False

    def stop_together(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        """A criterion for transformers' `generate`, which stops all ranks at the same token. Raises
        `KeyboardInterrupt` on all of them after Ctrl-C, and [`CommError`] when they have generated different
        tokens."""
        told = self._comm.all_gather_vector(torch.tensor([self._is_interrupted, int(input_ids[0, -1])]))
        is_interrupted, tokens = bool(told[0, 0]), told[:, 1].tolist()
        if len(set(tokens)) > 1:
            raise CommError(
                f"chat: the ranks generated different tokens ({tokens}), expected the same; their devices or "
                "libraries differ: use ranks that are alike, or one process"
            )
        if is_interrupted:
            raise KeyboardInterrupt
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Conversation:
    """What was said so far. Without a chat template nothing is kept: each text is continued by itself."""

    def __init__(self, generator: TextGenerator, arguments: Arguments, keyboard: Keyboard):
        self._generator, self._arguments, self._keyboard = generator, arguments, keyboard
        self._messages: list[Message] = []

    def clear(self) -> None:
        """Forgets what was said."""
        self._messages = []

    def answer(self, text: str) -> None:
        """Prints the answer to a text. What Ctrl-C cuts off is kept. Raises [`BadRow`] where it cannot be answered."""
        prompt = prompt_of(text, self._generator, self._arguments)
        if isinstance(prompt, list):
            prompt = [*self._messages, prompt[-1]] if self._messages else prompt
        tokens = self._generator.tokens(prompt)
        room, printed = self._generator.room(tokens), PrintedAnswer(self._generator.tokenizer)
        stops = [self._keyboard.stop_together]
        try:
            self._generator.generate([tokens], printed, max_new_tokens=room, stopping_criteria=stops)
        except KeyboardInterrupt:
            printed.end()
            raise
        finally:
            if isinstance(prompt, list):
                self._messages = [*prompt, {"role": "assistant", "content": printed.text}]


def run(folder: str, arguments: Arguments) -> None:
    """Answers `--prompt`, or what is typed until Ctrl-D."""
    if arguments.prompt is not None and not arguments.prompt.strip():
        raise ConfigError("prompt: is empty; give a text")
    # on ranks that hf_zero has started, Ctrl-C stops an answer too
    on_ranks(_converse, folder, arguments, interactive=partial(_converse, goes_on=True))


def _converse(folder: str, arguments: Arguments, *, goes_on: bool | None = None) -> None:
    """Answers what is asked. All ranks call it: the first one reads and prints. Without `goes_on` (see [`Keyboard`]),
    Ctrl-C stops an answer only where no launcher has started this process."""
    goes_on = launched_world_size(None) is None if goes_on is None else goes_on
    with transport_errors("chat"):
        state = ranks_of(arguments)
        generator = load_generator(folder, arguments, state.device, is_sharded=state.num_processes > 1)
        transformers.set_seed(arguments.seed)
        keyboard = Keyboard(_patient_comm(state), goes_on=goes_on)
        with keyboard.interrupts(), printing(state.is_main_process):
            conversation = Conversation(generator, arguments, keyboard)
            if arguments.prompt is None:
                _talk(conversation, keyboard)
            else:
                try:
                    conversation.answer(arguments.prompt)
                except BadRow as error:
                    raise DataError(f"prompt: {error}") from error
        state.destroy_process_group()


def _patient_comm(state: PartialState) -> Comm:
    """Connects all ranks for what is typed, for which they wait long."""
    if state.num_processes == 1:
        return Comm(CPU, PATIENCE.total_seconds())
    return DistributedComm(dist.new_group(backend="gloo", timeout=PATIENCE), CPU, PATIENCE.total_seconds())


def _talk(conversation: Conversation, keyboard: Keyboard) -> None:
    if keyboard.is_in_terminal:
        with contextlib.suppress(ImportError):  # with it, lines can be edited, and called up again
            import readline  # noqa: F401
        print(HINT)
    while True:
        try:
            text = keyboard.read()
            if text is None:
                return
            if text == ANEW:
                conversation.clear()
            elif text:
                _answer(conversation, text, keyboard)
        except KeyboardInterrupt:  # once more, while an answer stops
            if not keyboard.goes_on:
                raise
            print(f"\n{HINT}")


def _answer(conversation: Conversation, text: str, keyboard: Keyboard) -> None:
    try:
        conversation.answer(text)
    except BadRow as error:
        print(f"{error}; {ANEW} begins a new conversation", file=sys.stderr)
    except KeyboardInterrupt:
        if not keyboard.goes_on:
            raise
        print("(stopped)", file=sys.stderr)
