"""Prints the table of mutants, or what a training shows.

python -m tests.simulated --all
python -m tests.simulated WORD ...              mutants whose line has one of the words
python -m tests.simulated --races [WORD ...]    trainings whose name has one of the words; see --seed, --ranks
"""

import argparse

from tests.distributed import run_ranks
from tests.simulated.mutants import mutants
from tests.simulated.table import first_notice, summary, survey
from tests.simulated.training import SCENARIOS, trains


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulated")
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--all", action="store_true", help="all mutants")
    parser.add_argument("--races", action="store_true", help="trainings of the package as it is")
    parser.add_argument("--seed", type=int, default=0, help="of the choices that an accelerator has")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    if not (arguments.words or arguments.all or arguments.races):
        parser.error("give --all, --races, or words")
    if arguments.races:
        for name in _with_words(SCENARIOS, arguments.words):
            reports = run_ranks(trains, arguments.ranks, name, arguments.seed)
            print(name, *(race for report in reports for race in report.races), sep="\n    ", flush=True)
        return
    ways, told = survey(), {}
    for mutant in _with_words(mutants(), arguments.words):
        where, what = told[str(mutant)] = first_notice(mutant, ways)
        print(f"{'caught' if what else 'MISSED'} | {mutant} | {where} | {what[:160]}", flush=True)
    print(summary(told))


def _with_words(subjects, words: list[str]) -> list:
    return [subject for subject in subjects if not words or any(word in str(subject) for word in words)]


if __name__ == "__main__":
    main()
