"""Prints the table of mutants: `python -m tests.simulated [WORD ...]`, those whose line has one of the words."""

import sys

from tests.simulated.mutants import mutants
from tests.simulated.test_mutants import first_notice


for mutant in mutants():
    if not sys.argv[1:] or any(word in str(mutant) for word in sys.argv[1:]):
        where, what = first_notice(mutant)
        print(f"{'caught' if what else 'MISSED'} | {mutant} | {where} | {what[:160]}", flush=True)
