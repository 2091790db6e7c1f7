"""Tries what `places.json` says of the package's waits, or what a training shows.

python -m tests.simulated --all                 every place, in the training that noticed it before
python -m tests.simulated WORD ...              places whose name has one of the words
python -m tests.simulated --renew [WORD ...]    places that the table does not have, or those; writes the table
python -m tests.simulated --races [WORD ...]    trainings whose name has one of the words; see --seed, --ranks
"""

import argparse
import time

from tests.distributed import run_ranks
from tests.generated import write_part
from tests.simulated.mutants import mutants
from tests.simulated.table import PAGE, WAYS, equivalents, first_notice, keep, known, page_part, summary
from tests.simulated.training import SCENARIOS, trains


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulated")
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--all", action="store_true", help="all places")
    parser.add_argument("--renew", action="store_true", help="write the table anew where it lacks a place")
    parser.add_argument("--races", action="store_true", help="trainings of the package as it is")
    parser.add_argument("--seed", type=int, default=0, help="of the choices that an accelerator has")
    parser.add_argument("--ranks", type=int, help="of such a training, if not as many as it is for")
    return parser


def main() -> None:
    parser = make_parser()
    arguments = parser.parse_args()
    if not (arguments.words or arguments.all or arguments.renew or arguments.races):
        parser.error("give --all, --renew, --races, or words")
    if arguments.races:
        for name in _with_words(SCENARIOS, arguments.words):
            reports = run_ranks(trains, arguments.ranks or SCENARIOS[name].num_ranks, name, arguments.seed)
            print(name, *(race for report in reports for race in report.races), sep="\n    ", flush=True)
        return
    table, chosen = known(), _with_words(mutants(), arguments.words)
    if arguments.renew and not arguments.words:
        chosen = [mutant for mutant in chosen if str(mutant) not in table]
    _try(chosen, table, renews=arguments.renew)


def _try(chosen: list, table: dict[str, dict], renews: bool) -> None:
    """Tries some mutants, and prints a line for each."""
    findings, reasons = {}, equivalents()
    for mutant in chosen:
        start = time.perf_counter()
        finding = first_notice(mutant, WAYS)
        seconds = f"{time.perf_counter() - start:.0f} s"
        if finding is None or not finding.counts:
            verdict = "EQUIVALENT" if str(mutant) in reasons else "NOT NOTICED"
            told = (finding and f"{finding.how}: {finding.what}") or reasons.get(str(mutant), "")
            print(verdict, f"{mutant} ({mutant.file}:{mutant.line})", told, seconds, sep=" | ", flush=True)
        else:
            print(finding.how, mutant, finding.way, finding.what[:160], seconds, sep=" | ", flush=True)
        if str(mutant) not in reasons:
            findings[str(mutant)] = finding
        if renews and finding is not None and finding.counts:
            table[str(mutant)] = {"training": finding.way.name, "ranks": finding.way.num_ranks, "how": finding.how}
            keep(table)
    if renews:
        keep(table)
        write_part(PAGE, "places", page_part())
    print(summary(findings))


def _with_words(subjects, words: list[str]) -> list:
    return [subject for subject in subjects if not words or any(word in str(subject) for word in words)]


if __name__ == "__main__":
    main()
