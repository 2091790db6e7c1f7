"""Which recipes there are. A task is a module with `Arguments`, `check(arguments)` and `run(arguments, training)`."""

import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Task:
    """One kind of fine-tune.

    Args:
        summary (`str`): One line for `--help`.
        module (`str`): Where it lives; imported only when it is asked for, so that `--help` stays quick.
    """

    summary: str
    module: str

    def load(self) -> ModuleType:
        """Imports the module of the task, and with it torch and transformers."""
        return importlib.import_module(self.module)


TASKS: dict[str, Task] = {
    "classify": Task("fine-tune an encoder to tell classes of text apart", "hf_zero.recipes.classify"),
}
