"""Several data sets that are trained on together: one after the other, or sampled by fraction."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets

from hf_zero.config import choose
from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes.data.rows import Rows
from hf_zero.recipes.data.sources import as_data_error, check_path, check_sources, is_local, load_rows, shuffled
from hf_zero.recipes.parser import option
from hf_zero.recipes.tasks import SourceArguments


INTERLEAVE, FIRST_EXHAUSTED = "interleave", "first_exhausted"
Stopping = Literal["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"]  # of `datasets`
# Keys of one data set, as in TRL, and the keys of a run with a single one.
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
        "concatenate",
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
        """The data sets as YAML has them; none if there is a single one."""
        return cast("list[dict[str, Any]]", self.datasets or [])

    @property
    def each(self) -> list["MixtureArguments"]:
        """The arguments for each of the data sets alone."""
        changes = [{ENTRY[key]: entry[key] for key in ENTRY if key in entry} for entry in self.entries]
        return [replace(self, datasets=None, **change) for change in changes] or [self]

    @property
    def names(self) -> list[str]:
        """The names of the data sets, without folders if there are several."""
        paths = [str(each.dataset_name or each.train_file) for each in self.each]
        return [Path(path).name if is_local(path) else path for path in paths] if len(paths) > 1 else paths


def _entry(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """Returns one of `datasets` as YAML has it. On the command line it is a path, or JSON."""
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


def check_mixture(arguments: MixtureArguments) -> None:
    """Refuses data sets that cannot work, by the arguments and the names of files."""
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
    for source in arguments.each:
        check_path(str(source.dataset_name), "datasets")
        check_sources(source)


def load_each(arguments: MixtureArguments) -> list[Rows]:
    """Reads the training rows of each data set, as `load_rows` does."""
    found = [load_rows(source, "train") for source in arguments.each]
    columns = [entry.get("columns") for entry in arguments.entries] or [None]
    return [rows.only(names) if names else rows for rows, names in zip(found, columns, strict=True)]


def mix(
    parts: Sequence[Dataset | IterableDataset], arguments: MixtureArguments, training: Any
) -> Dataset | IterableDataset:
    """Makes one data set of several with the same columns; a stream is then shuffled in a buffer. The order depends on
    the seed, and not on the number of processes. Raises [`DataError`] if columns differ."""
    features = [dict(part.features) for part in parts]
    if any(each != features[0] for each in features):
        kinds = "; ".join(f"{name} has {each}" for name, each in zip(arguments.names, features, strict=True))
        raise DataError(f"datasets: {kinds}; mix data sets of one kind")
    mixed = parts[0]
    if len(parts) > 1:
        with as_data_error(" and ".join(arguments.names)):
            mixed = _mixed([*parts], arguments, training)
    return shuffled(mixed, arguments, training) if isinstance(mixed, IterableDataset) else mixed


def _mixed(parts: list, arguments: MixtureArguments, training: Any) -> Dataset | IterableDataset:
    fractions = [entry.get("fraction", 0.0) for entry in arguments.entries]
    shares = [fraction / sum(fractions) for fraction in fractions] if any(fractions) else None
    if arguments.dataset_mixing == INTERLEAVE:
        return interleave_datasets(
            parts,
            probabilities=shares,
            seed=training.seed if training.data_seed is None else training.data_seed,
            stopping_strategy=arguments.dataset_stopping_strategy,
        )
    if shares:  # as in TRL: as many rows as possible without repeating one
        most = min(len(part) / share for part, share in zip(parts, shares, strict=True))
        parts = [part.select(range(round(share * most))) for part, share in zip(parts, shares, strict=True)]
    return concatenate_datasets(parts)
