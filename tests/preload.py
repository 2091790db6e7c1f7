"""What Python's fork server imports for the ranks that are forked from it (`tests/distributed.py`).

Nothing here may start a thread or touch a device: what is forked must be a process that has only imported.
"""

import gc

import pytest  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.optim
import transformers.models.llama.modeling_llama
import transformers.trainer  # noqa: F401

import hf_zero.engine.direct
import hf_zero.trainer  # noqa: F401
import tests.distributed
import tests.trainer.harness  # noqa: F401


torch.set_num_threads(1)
gc.collect()
gc.freeze()
