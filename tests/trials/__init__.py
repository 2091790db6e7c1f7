"""Faults repeated by the hundred, counted, and not run with the tests: `python -m tests.trials`."""
