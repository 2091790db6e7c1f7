"""Silences messages of other libraries that users cannot act on, one entry per message. All other warnings, and all
errors, are printed."""

import logging
import re
import warnings
from functools import partial


# Beginnings of messages, by logger.
LOGGED = {
    # Optional kernels that most machines cannot load. Functions that need one raise when they are called.
    "torchao": "Failed to load .*_C",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    # Logged by each layer at each step.
    "bitsandbytes.autograd._functions": "MatMul8bitLt: inputs will be cast",
    # torchao registers its enumerations in a deprecated way.
    "torch.utils._pytree": "<enum .*> is an Enum subclass",
    # Rows are tokenized whole and then truncated, which a task reports.
    "transformers.tokenization_utils_base": "Token indices sequence length is longer",
}
WARNED = (
    # The default of TrainingArguments on a machine without an accelerator.
    "'pin_memory' argument is set as true but no accelerator is found",
    # TRL uses the old names, as do the keys of a recipe.
    r"`(is_)?gradient_checkpointing(_enable|_disable)?` is deprecated",
)


def _is_printed(pattern: str, record: logging.LogRecord) -> bool:
    """Returns whether to print a record: errors always, warnings unless they begin with the pattern."""
    return record.levelno > logging.WARNING or not re.match(pattern, record.getMessage(), re.DOTALL)


_FILTERS = {name: partial(_is_printed, pattern) for name, pattern in LOGGED.items()}


def silence() -> None:
    """Adds the filters. Call it in each process before importing the libraries."""
    for name, is_printed in _FILTERS.items():
        logging.getLogger(name).addFilter(is_printed)
    for pattern in WARNED:
        warnings.filterwarnings("ignore", message=pattern)
