"""docs/models.md: which architectures train as in plain DDP, and why the others do not; written by the tests."""

from pathlib import Path

from tests.architectures.compare import Outcome
from tests.architectures.walk import TASKS


PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEADER = """# Architectures

Every model type of the mappings in transformers {version} (`modeling_auto.MODEL_FOR_..._MAPPING_NAMES`), with every
head in them. Each is built from a tiny configuration and trained for 3 steps on 2 ranks (gloo): at stages 1, 2 and 3,
whose losses, gradient norms and weights are equal bit for bit, and in plain DDP, which they equal to rounding. This
page is written by `make test-all` and never by hand; every test compares its result with what stands here.

**{num_passed} of {num_types} model types train**, with {num_heads} of {num_cases} heads. *own loss*: the head computes
none, and the tests took one of their own of its outputs, as `compute_loss_func` of `Trainer` would.
"""
PASSED = "## What trains"
FAILED = "## What does not, and why"
EXPLAINED = """Where hf_zero refuses stage 3, the model trains at the others. All else fails without hf_zero, too: the
reason is what plain torch, in one process, says of the tiny model, or of the inputs that the tests make for it from
its signature.
"""
OWN = " (own loss)"

Results = dict[tuple[str, str], Outcome]  # by model type and task


def render(results: Results, version: str) -> str:
    """The page.

    Args:
        results: of every case.
        version (`str`): of transformers.
    """
    ordered = sorted(results, key=lambda key: (key[0], list(TASKS).index(key[1])))
    passing = [key for key in ordered if results[key].passed]
    counts = {
        "num_passed": len({model_type for model_type, _ in passing}),
        "num_types": len({model_type for model_type, _ in results}),
        "num_heads": len(passing),
        "num_cases": len(results),
    }
    heads: dict[str, list[str]] = {}
    for model_type, task in passing:
        heads.setdefault(model_type, []).append(task if results[model_type, task].has_own_loss else task + OWN)
    lines = [HEADER.format(version=version, **counts), PASSED, "", "| model type | heads |", "|---|---|"]
    lines += [f"| {model_type} | {', '.join(tasks)} |" for model_type, tasks in heads.items()]
    lines += ["", FAILED, "", EXPLAINED, "| model type | head | reason |", "|---|---|---|"]
    lines += [f"| {key[0]} | {key[1]} | {results[key].reason} |" for key in ordered if not results[key].passed]
    return "\n".join([*lines, ""])


def parse(page: str) -> Results:
    """What a page that `render` made says of each model type and head."""
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
    """What the page says now."""
    return parse(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}


def is_of(version: str) -> bool:
    """Whether the page was written for this version of transformers: others have other models and other messages."""
    return f" transformers {version} " in PAGE.read_text(encoding="utf-8")
