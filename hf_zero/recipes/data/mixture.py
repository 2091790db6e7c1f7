"""Several data sets that are trained on together: one behind the other, or drawn from by weight."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets

from hf_zero.config import choose
from hf_zero.errors import ConfigError
from hf_zero.recipes.data.rows import Rows, plural
from hf_zero.recipes.data.sources import as_data_error, check_path, check_sources, is_local, load_rows, shuffled
from hf_zero.recipes.parser import option
from hf_zero.recipes.tasks import SourceArguments


CONCATENATE, INTERLEAVE, FIRST_EXHAUSTED = "concatenate", "interleave", "first_exhausted"
Stopping = Literal["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"]  # of `datasets`
# Keys of one data set, as TRL calls them, and those that a single one has for them.
ENTRY = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
KINDS: dict[str, Any] = {"path": str, "name": str, "split": str, "columns": list, "fraction": (int, float)}


@dataclass
class MixtureArguments(SourceArguments):
    """Keys for several data sets, under the names of TRL and of `datasets`."""

    datasets: list[str] | None = option(
        None,
        "Several data sets instead of dataset_name: paths, Hub ids, or mappings (JSON on the command line) with "
        "path and optionally name, split, columns and fraction.",
    )
    dataset_mixing: Literal["concatenate", "interleave"] = option(
        CONCATENATE,
        "concatenate: append the data sets, with fraction the first rows of each; interleave: alternate, or "
        "sample by fraction.",
    )
    dataset_stopping_strategy: Stopping = option(
        FIRST_EXHAUSTED, f"When to stop interleaving: {', '.join(get_args(Stopping))}."
    )

    def __post_init__(self):
        self.datasets: Any = self.datasets and [_entry(each) for each in self.datasets]

    @property
    def entries(self) -> list[dict[str, Any]]:
        """What `datasets` are, as YAML has them; none where there is but one data set."""
        return cast("list[dict[str, Any]]", self.datasets or [])


def _entry(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """One of `datasets`, as YAML has it: on the command line a path, or JSON."""
    try:
        read = json.loads(given) if isinstance(given, str) and given.lstrip().startswith("{") else given
    except ValueError as error:
        raise ConfigError(f"datasets {given!r}: not JSON ({error}); give a path, or a mapping") from error
    entry = {"path": read} if isinstance(read, str) else {**read}
    if "path" not in entry:
        raise ConfigError(f"datasets {given!r}: no path; give a hub id, or a local file or folder, as path")
    for key, value in entry.items():
        kind = choose(f"datasets, a key of {entry['path']}", key, KINDS)
        if not isinstance(value, kind) or isinstance(value, bool) or key == "fraction" and not 0 < value < math.inf:
            expected = {"columns": "a list of names", "fraction": "a number above 0"}.get(key, "a text")
            raise ConfigError(f"datasets: {key} of {entry['path']} is {value!r}, expected {expected}")
    return entry


@dataclass(frozen=True)
class Mixture:
    """How the data sets of a run become one. The order depends on the seed, and not on the number of processes."""

    arguments: MixtureArguments
    training: Any

    @property
    def names(self) -> list[str]:
        """What the data sets are called, without folders."""
        paths = [str(each.dataset_name or each.train_file) for each in each_source(self.arguments)]
        return [Path(path).name if is_local(path) else path for path in paths] if len(paths) > 1 else paths

    @property
    def shares(self) -> list[float] | None:
        """The fractions, of which the sum is 1."""
        fractions = [entry.get("fraction", 0.0) for entry in self.arguments.entries]
        return [fraction / sum(fractions) for fraction in fractions] if any(fractions) else None

    def mix(self, parts: Sequence[Dataset | IterableDataset]) -> Dataset | IterableDataset:
        """Makes one data set of several with the same columns. Rows of streams are then shuffled, in a buffer."""
        if len(parts) == 1:
            mixed = parts[0]
        else:
            with as_data_error(" and ".join(self.names)):
                mixed = self._mixed([*parts])
        return shuffled(mixed, self.arguments, self.training) if isinstance(mixed, IterableDataset) else mixed

    def _mixed(self, parts: list) -> Dataset | IterableDataset:
        shares, training = self.shares, self.training
        if self.arguments.dataset_mixing == INTERLEAVE:
            return interleave_datasets(
                parts,
                probabilities=shares,
                seed=training.seed if training.data_seed is None else training.data_seed,
                stopping_strategy=self.arguments.dataset_stopping_strategy,
            )
        if shares:  # as for TRL: as many rows as can be without taking one twice
            most = min(len(part) / share for part, share in zip(parts, shares, strict=True))
            parts = [part.select(range(round(share * most))) for part, share in zip(parts, shares, strict=True)]
        return concatenate_datasets(parts)

    def note(self, parts: Sequence[Dataset | IterableDataset]) -> str:
        """Says how many rows of each data set are in the mixture."""
        how = f"{self.arguments.dataset_mixing}d"
        if isinstance(parts[0], IterableDataset):
            return f"train: {', '.join(self.names)} {how}"
        numbers = [Dataset.from_dict({"part": [number] * len(part)}) for number, part in enumerate(parts)]
        counts = np.bincount(self.mix(numbers).with_format("numpy")["part"][:], minlength=len(parts))
        told = [
            f"{count:,} from {plural(len(part), 'row')} of {name}"
            for count, part, name in zip(counts, parts, self.names, strict=True)
        ]
        return f"train: {plural(int(counts.sum()), 'row')}, {how}: {', '.join(told)}"


def each_source(arguments: MixtureArguments) -> list[MixtureArguments]:
    """The arguments for each of the data sets alone."""
    changes: list[dict[str, Any]] = [
        {ENTRY[key]: entry[key] for key in ENTRY if key in entry} for entry in arguments.entries
    ]
    return [replace(arguments, datasets=None, **change) for change in changes] or [arguments]


def check_mixture(arguments: MixtureArguments) -> None:
    """Refuses data sets that the arguments alone, and a look at the names of files, show to be wrong."""
    interleaves, entries = arguments.dataset_mixing == INTERLEAVE, arguments.entries
    if arguments.dataset_stopping_strategy != FIRST_EXHAUSTED and not interleaves:
        raise ConfigError(f"dataset_stopping_strategy: of dataset_mixing {INTERLEAVE}; give both or none")
    if not entries:
        if interleaves:
            raise ConfigError(f"dataset_mixing {INTERLEAVE}: several data sets are; give them as datasets")
        check_sources(arguments)
        return
    for name in (*ENTRY.values(), "train_file"):
        if getattr(arguments, name) != getattr(SourceArguments, name):
            raise ConfigError(f"{name}: has no effect beside datasets; give path, name and split there")
    if arguments.dataset_test_split:
        raise ConfigError("dataset_test_split: a split of dataset_name, which is not set; for a file give test_file")
    have_fractions = {"fraction" in entry for entry in entries}
    if len(have_fractions) > 1:
        raise ConfigError("datasets: some have a fraction, and some have none; give it to all or to none")
    if have_fractions == {True} and arguments.dataset_streaming and not interleaves:
        raise ConfigError(
            "datasets: how many rows the fraction of a stream (dataset_streaming) is, is not known; give "
            f"--dataset_mixing {INTERLEAVE}, or no fractions"
        )
    for source in each_source(arguments):
        check_path(str(source.dataset_name), "datasets")
        check_sources(source)


def load_each(arguments: MixtureArguments) -> list[Rows]:
    """Reads the rows that a run trains on, each data set for itself, as `load_rows` does."""
    found = [load_rows(source, "train") for source in each_source(arguments)]
    columns = [entry.get("columns") for entry in arguments.entries] or [None]
    return [rows.only(names) if names else rows for rows, names in zip(found, columns, strict=True)]
