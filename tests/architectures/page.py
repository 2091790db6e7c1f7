"""docs/models.md: which architectures do not train as in plain DDP. results.md, beside this file, has every result."""

from pathlib import Path

from tests.architectures.compare import Outcome
from tests.architectures.walk import TASKS


PAGE = Path(__file__).parents[2] / "docs" / "models.md"
RESULTS = Path(__file__).with_name("results.md")
HEADER = """# Models

transformers {version} has {num_types} model types with a head that computes a loss. {num_passed} of them train with
hf_zero, with {num_heads} of {num_cases} heads: each is built from a tiny configuration and trained for 3 steps on 2
ranks (gloo). Losses, gradient norms and weights of stages 1, 2 and 3 are bit-identical, and equal to those of plain
DDP up to rounding. `make test-all` writes this page; `tests/architectures/results.md` lists every head and the reason
for each failure.
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
RESULTS_HEADER = "# Results of the tests in this folder, with transformers {version} . Written by `make test-all`.\n"
PASSED = "## What trains"
FAILED = "## What does not, and why"
OWN = " (own loss)"

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


def render(results: Results, version: str) -> str:
    """The results, for `parse`."""
    ordered = _ordered(results)
    heads: dict[str, list[str]] = {}
    for model_type, task in ordered:
        if results[model_type, task].passed:
            heads.setdefault(model_type, []).append(task if results[model_type, task].has_own_loss else task + OWN)
    lines = [RESULTS_HEADER.format(version=version), PASSED, "", "| model type | heads |", "|---|---|"]
    lines += [f"| {model_type} | {', '.join(tasks)} |" for model_type, tasks in heads.items()]
    lines += ["", FAILED, "", "| model type | head | reason |", "|---|---|---|"]
    lines += [f"| {key[0]} | {key[1]} | {results[key].reason} |" for key in ordered if not results[key].passed]
    return "\n".join([*lines, ""])


def parse(page: str) -> Results:
    """Reads what `render` wrote."""
    found: Results = {}
    section = ""
    for line in page.splitlines():
        if line.startswith("## "):
            section = line
        if not section or not line.startswith("| ") or line.startswith("| model type |"):
            continue
        model_type, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if section == PASSED:
            for head in cells[0].split(", "):
                found[model_type, head.removesuffix(OWN)] = Outcome(True, has_own_loss=not head.endswith(OWN))
        else:
            found[model_type, cells[0]] = Outcome(False, cells[1])
    return found


def written() -> Results:
    """The results of the last `make test-all`."""
    return parse(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def write(results: Results, version: str) -> None:
    """Writes the results, and the page."""
    RESULTS.write_text(render(results, version), encoding="utf-8")
    PAGE.write_text(summary(results, version), encoding="utf-8")


def is_of(version: str) -> bool:
    """Whether the results are of this version of transformers: others have other models and other messages."""
    return f" transformers {version} " in RESULTS.read_text(encoding="utf-8")
