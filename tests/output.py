"""What a command says, without what optional libraries say of themselves when they are imported, and its log."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


# of torchao, bitsandbytes, and torch about torchao
NOISE = ("Failed to load /", "Failed to load CPU gemm_4bit_forward", "register_constant() on Enum")


def without_imports(text: str) -> str:
    return "".join(line for line in text.splitlines(True) if not any(noise in line for noise in NOISE))


@contextmanager
def logged(name: str = "hf_zero", level: int = logging.NOTSET) -> Iterator[list[str]]:
    """Yields a list of the messages of a logger, also in ranks, which `caplog` does not reach."""
    messages: list[str] = []
    handler, logger = logging.Handler(level), logging.getLogger(name)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
