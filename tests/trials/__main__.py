"""`python -m tests.trials`: how many trials of each kind, and where; prints the table of docs/reliability.md."""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path


NUMBERS = {"kills": 200, "signals": 40, "launchers": 20}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.trials", description=__doc__)
    for kind, number in NUMBERS.items():
        parser.add_argument(f"--{kind}", type=int, help=f"how many; {number} where no kind is named")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="kept if given; a temporary folder otherwise")
    return parser


def main() -> int:
    """Runs what is asked for. The exit code is 1 if anything was lost, hung, incomplete or unnoticed."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    from tests.trials.kills import kills
    from tests.trials.runs import unbroken
    from tests.trials.signals import launchers, signals
    from tests.trials.table import table

    kinds = {"kills": kills, "signals": signals, "launchers": launchers}
    asked = make_parser().parse_args()
    chosen = {kind: getattr(asked, kind) for kind in kinds if getattr(asked, kind)} or NUMBERS
    root = asked.folder or Path(tempfile.mkdtemp(prefix="hf_zero_trials_"))
    counts = {}
    try:
        whole = unbroken(root)
        for kind, number in chosen.items():
            began = time.monotonic()
            counts |= kinds[kind](root / kind, whole, number, random.Random(asked.seed))
            print(f"{kind}: {time.monotonic() - began:.0f} s", flush=True)
    finally:
        print(table(counts), flush=True)
        if asked.folder is None:
            shutil.rmtree(root, ignore_errors=True)
    return 0 if all(count.is_clean for count in counts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
