"""docs/models.md: which architectures do not train as in plain DDP. results.yaml, beside this file,
has every result."""

from functools import cache
from pathlib import Path

import yaml

from tests.architectures.compare import Outcome
from tests.architectures.walk import TASKS


PAGE = Path(__file__).parents[2] / "docs" / "models.md"
RESULTS = Path(__file__).with_name("results.yaml")
HEADER = """# Models

transformers {version} has {num_types} model types with a head that computes a loss. {num_passed} of them train with
hf_zero, with {num_heads} of {num_cases} heads: each is built from a tiny configuration and trained for 3 steps on 2
ranks (gloo). Losses, gradient norms and weights of stages 1, 2 and 3 are bit-identical, and equal to those of plain
DDP up to rounding. `make test-all` writes this page; `tests/architectures/results.yaml` lists every head and the
reason for each failure.
"""
UNTRAINED = """## Model types that do not train

These fail in the tests, with plain torch too. Most need a package that is not installed, or inputs that the tests do
not generate.
"""
REFUSED = """## Not at stage 3

hf_zero refuses stage 3 for these models; they train at stages 1 and 2:
"""
STAGE_3 = "hf_zero refuses stage 3"
COMMON = 20  # tasks with fewer heads are counted together
TRAINS, TRAINS_BY_OWN_LOSS = "trains", "trains (own loss)"

Results = dict[tuple[str, str], Outcome]  # by model type and task


def _ordered(results: Results) -> list[tuple[str, str]]:
    return sorted(results, key=lambda key: (key[0], list(TASKS).index(key[1])))


def summary(results: Results, version: str) -> str:
    """The page.

    Args:
        results: of every case.
        version (`str`): of transformers.
    """
    keys = _ordered(results)
    passing = [key for key in keys if results[key].passed]
    trained = dict.fromkeys(model_type for model_type, _ in passing)
    refused = [key for key in keys if not results[key].passed and results[key].reason.startswith(STAGE_3)]
    known = {*trained, *(model_type for model_type, _ in refused)}
    untrained = [model_type for model_type in dict.fromkeys(name for name, _ in keys) if model_type not in known]
    counts = {"num_passed": len(trained), "num_types": len({name for name, _ in keys})}
    counts |= {"num_heads": len(passing), "num_cases": len(keys)}
    tested = {task: [key for key in keys if key[1] == task] for task in TASKS}
    common = {task: of for task, of in tested.items() if len(of) >= COMMON}
    common["others"] = [key for task, of in tested.items() if task not in common for key in of]
    heads = [f"{task} {sum(results[key].passed for key in of)}/{len(of)}" for task, of in common.items()]
    lines = [HEADER.format(version=version, **counts), f"Heads that train, of those tested: {', '.join(heads)}."]
    lines += ["", UNTRAINED, ", ".join(untrained), "", REFUSED]
    lines += [f"- {model_type} ({task})" for model_type, task in refused]
    return "\n".join([*lines, ""])


@cache
def read() -> tuple[Results, str]:
    """The results of the last `make test-all`, and the version of transformers that they are of: others have other
    models and other messages."""
    kept = yaml.safe_load(RESULTS.read_text(encoding="utf-8"))
    found = {}
    for model_type, heads in kept["heads"].items():
        for task, result in heads.items():
            passed = result in (TRAINS, TRAINS_BY_OWN_LOSS)
            found[model_type, task] = Outcome(passed, "" if passed else result, result != TRAINS_BY_OWN_LOSS)
    return found, kept["transformers"]


def write(results: Results, version: str) -> None:
    """Writes the results, and the page."""
    heads: dict[str, dict[str, str]] = {}
    for model_type, task in _ordered(results):
        outcome = results[model_type, task]
        trains = TRAINS if outcome.has_own_loss else TRAINS_BY_OWN_LOSS
        heads.setdefault(model_type, {})[task] = trains if outcome.passed else outcome.reason
    kept = {"transformers": version, "heads": heads}
    text = yaml.safe_dump(kept, sort_keys=False, default_flow_style=None, width=10_000, allow_unicode=True)
    RESULTS.write_text(text, encoding="utf-8")
    read.cache_clear()
    PAGE.write_text(summary(results, version), encoding="utf-8")
