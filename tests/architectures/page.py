"""docs/models.md: which architectures train as in plain DDP, and why the others do not; written by the tests."""

from collections.abc import Iterable
from pathlib import Path

from tests.architectures.compare import Outcome
from tests.architectures.walk import TASKS, Case


PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEADER = """# Architectures

Every model type of the mappings in transformers {version} (`modeling_auto.MODEL_FOR_..._MAPPING_NAMES`), with every head
in them. Each is built from a tiny configuration and trained for 3 steps on 2 ranks (gloo): at stages 1, 2 and 3, whose
losses, gradient norms and weights are equal bit for bit, and in plain DDP, which they equal to rounding. This page is
written by `make test-all` and never by hand; a test that runs compares its result with what stands here.

*own loss*: the head computes none; the tests took the mean squared distance of its outputs from fixed numbers, as a
`compute_loss_func` would.

**{num_passed} of {num_types} model types train**, with {num_heads} of {num_cases} heads. {rest}
"""
PASSED = "## What trains"
FAILED = "## What does not, and why"


def render(results: dict[Case, Outcome], version: str) -> str:
    """The page.

    Args:
        results (`dict[Case, Outcome]`): of every case.
        version (`str`): of transformers.
    """
    types = {case.model_type for case in results}
    passing = {case.model_type for case, outcome in results.items() if outcome.passed}
    counts = {
        "version": version,
        "num_passed": len(passing),
        "num_types": len(types),
        "num_heads": sum(outcome.passed for outcome in results.values()),
        "num_cases": len(results),
        "rest": "Of the others, the reason is that of plain torch: none fails in hf_zero alone.",
    }
    lines = [HEADER.format(**counts), PASSED, "", "| model type | heads |", "|---|---|"]
    for model_type in sorted(passing):
        heads = [head_of(case, outcome) for case, outcome in _of(results, model_type) if outcome.passed]
        lines.append(f"| {model_type} | {', '.join(heads)} |")
    lines += ["", FAILED, "", "| model type | head | reason |", "|---|---|---|"]
    for case, outcome in sorted(
        results.items(), key=lambda item: (item[0].model_type, list(TASKS).index(item[0].task))
    ):
        if not outcome.passed:
            lines.append(f"| {case.model_type} | {case.task} | {outcome.reason} |")
    return "\n".join([*lines, ""])


def _of(results: dict[Case, Outcome], model_type: str) -> Iterable[tuple[Case, Outcome]]:
    return ((case, outcome) for case, outcome in results.items() if case.model_type == model_type)


def head_of(case: Case, outcome: Outcome) -> str:
    return case.task if outcome.has_own_loss else f"{case.task} (own loss)"


def parse(page: str) -> dict[tuple[str, str], Outcome]:
    """What a page that `render` made says of each model type and head."""
    found: dict[tuple[str, str], Outcome] = {}
    section = ""
    for line in page.splitlines():
        if line.startswith("## "):
            section = line
        if not section or not line.startswith("| ") or line.startswith("| model type |"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if section == PASSED:
            for head in cells[1].split(", "):
                task = head.removesuffix(" (own loss)")
                found[cells[0], task] = Outcome(True, has_own_loss=task == head)
        else:
            found[cells[0], cells[1]] = Outcome(False, cells[2])
    return found
