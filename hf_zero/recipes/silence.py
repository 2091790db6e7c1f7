"""Silences messages of other libraries at start that users of a recipe cannot act on.

One entry for each message. All other warnings, and all errors, are printed as ever.
"""

import contextlib
import logging
import os
import re
import warnings
from collections.abc import Iterator
from functools import partial


# Logger -> what its message begins with.
LOGGED = {
    # Each library looks for kernels that most machines cannot load. What needs one says so when it is called.
    "torchao": "Failed to load .*_C",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    # Of each layer at each step.
    "bitsandbytes.autograd._functions": "MatMul8bitLt: inputs will be cast",
    # torchao registers its own enumerations as torch no longer wants it.
    "torch.utils._pytree": "<enum .*> is an Enum subclass",
    # Rows are tokenized whole, and then cut; how many and by how much is said.
    "transformers.tokenization_utils_base": "Token indices sequence length is longer",
}
WARNED = (
    # The default of TrainingArguments, on a machine without an accelerator.
    "'pin_memory' argument is set as true but no accelerator is found",
    # TRL goes by the old names, and so do the keys of a recipe, which other transformers have to know.
    r"`(is_)?gradient_checkpointing(_enable|_disable)?` is deprecated",
)


def _is_printed(pattern: str, record: logging.LogRecord) -> bool:
    """Whether a record is printed: errors always are, warnings unless they begin with a pattern."""
    return record.levelno > logging.WARNING or not re.match(pattern, record.getMessage(), re.DOTALL)


_FILTERS = {name: partial(_is_printed, pattern) for name, pattern in LOGGED.items()}


@contextlib.contextmanager
def printing(is_first: bool) -> Iterator[None]:
    """Lets the first rank alone print, output or errors, where the others do the same."""
    if is_first:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def silence() -> None:
    """Adds the filters. Each process of a recipe calls it before it imports the libraries."""
    for name, is_printed in _FILTERS.items():
        logging.getLogger(name).addFilter(is_printed)
    for pattern in WARNED:
        warnings.filterwarnings("ignore", message=pattern)
