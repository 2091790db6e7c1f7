"""Registers the test device "toy" with torch, which calls `register` by itself when it is imported (see `launch.py`).

Its module has what torch asks of an out-of-tree backend, and little more: no `Stream`, no `Event`, no `mem_get_info`.
"""

import importlib.util
import os
import sys
import types
from collections import Counter
from typing import Any


# The path of the library, in the environment of processes that have the device.
VARIABLE = "HF_ZERO_TEST_DEVICE"
NAME = "toy"
NUM_DEVICES = 2  # as in `memory.h`

_library: Any = None


def register() -> None:
    """Registers the device in this process."""
    global _library
    if VARIABLE not in os.environ or _library is not None:
        return
    import torch

    torch.utils.rename_privateuse1_backend(NAME)
    spec = importlib.util.spec_from_file_location("toy_device", os.environ[VARIABLE])
    _library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_library)
    torch._register_device_module(NAME, _module(torch))
    torch.utils.generate_methods_for_privateuse1_backend()


def take_reports() -> list[str]:
    """Waits for the device, and returns what was found since the last call: races, memory that was freed or written
    too early."""
    import torch

    torch.accelerator.synchronize()
    return [f"{count} x {text}" for text, count in sorted(_library.take_reports().items())]


def take_launches() -> Counter[str]:
    """Returns how many kernels were launched since the last call, by operator."""
    return Counter(_library.take_launches())


def _module(torch) -> types.ModuleType:
    module: Any = types.ModuleType(f"torch.{NAME}")
    accelerator, generator = torch.accelerator, torch.default_generator
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = module.init = lambda: None
    module.device_count = lambda: NUM_DEVICES
    module.current_device = accelerator.current_device_index
    module.set_device = accelerator.set_device_index
    module.device = lambda device: accelerator.device_index(torch.device(device).index)
    module.synchronize = accelerator.synchronize
    module.empty_cache = accelerator.empty_cache
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16, torch.float32]
    # random numbers are those of the CPU
    module.get_rng_state = lambda device=None: generator.get_state()
    module.set_rng_state = lambda state, device=None: generator.set_state(state)
    module.get_rng_state_all = lambda: [generator.get_state()]
    module.set_rng_state_all = lambda states: generator.set_state(states[0])
    module.manual_seed = module.manual_seed_all = lambda seed: None
    sys.modules[module.__name__] = module
    return module
