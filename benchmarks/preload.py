"""Imported once by the process that ranks are forked from, so that a fresh rank starts in milliseconds.

Nothing here may start a thread or touch a device: what is forked must be a process that has only imported.
"""

import torch
import torch.distributed.fsdp
import torch.distributed.optim
import torch.nn.parallel
import transformers.models.llama.modeling_llama  # noqa: F401


torch.set_num_threads(1)
