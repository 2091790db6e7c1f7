"""Which recipes there are.

A task is a module with `Arguments`, `check(arguments)` and `run(arguments, training)`; it trains. A tool is a module
with `Arguments` and `run(folder, arguments)`; it does something with a folder that a run has left, in this process.
"""

import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Task:
    """One kind of fine-tune, or one tool.

    Args:
        summary (`str`): One line for `--help`.
        module (`str`): Where it lives; imported only when it is asked for, so that `--help` stays quick.
    """

    summary: str
    module: str

    def load(self) -> ModuleType:
        """Imports the module, and with it torch and transformers."""
        return importlib.import_module(self.module)


TASKS: dict[str, Task] = {
    "classify": Task("fine-tune an encoder to tell classes of text apart", "hf_zero.recipes.classify"),
}

TOOLS: dict[str, Task] = {
    "verify": Task("check that a model folder is whole, and loads", "hf_zero.recipes.verify"),
    "merge": Task("merge a PEFT adapter into its base model", "hf_zero.recipes.merge"),
    "push": Task("upload a model folder to the hub", "hf_zero.recipes.push"),
}
