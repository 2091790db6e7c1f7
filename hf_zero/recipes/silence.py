"""Silences warnings of other libraries that users cannot act on. Errors are printed."""

import logging
import warnings


LOGGERS = (
    # Optional kernels that most machines cannot load. Functions that need one raise when they are called.
    "torchao",
    "bitsandbytes.backends.cpu.ops",
    # Logged by each layer at each step.
    "bitsandbytes.autograd._functions",
    # torchao registers its enumerations in a deprecated way.
    "torch.utils._pytree",
    # Rows are tokenized whole and then truncated, which a task reports.
    "transformers.tokenization_utils_base",
)
WARNED = (  # beginnings of messages
    # The default of TrainingArguments on a machine without an accelerator.
    "'pin_memory' argument is set as true but no accelerator is found",
    # TRL uses the old names, as do the keys of a recipe.
    r"`(is_)?gradient_checkpointing(_enable|_disable)?` is deprecated",
)


def silence() -> None:
    """Call it in each process before importing the libraries."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for pattern in WARNED:
        warnings.filterwarnings("ignore", message=pattern)
