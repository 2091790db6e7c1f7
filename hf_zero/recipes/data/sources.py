"""Where rows come from: the hub or local files, all through `datasets`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import datasets
from datasets import IterableDataset, load_dataset

from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes.common import SourceArguments
from hf_zero.recipes.data.local import NO_ROWS, as_data_error, check_path, files_of, is_local, load_files, stream_files
from hf_zero.recipes.data.rows import BadRow, RowRange, Rows, undecoded


NUM_TRIED = 1000  # lines that may be bad before the first good one


def check_sources(arguments: SourceArguments) -> None:
    """Refuses what the arguments alone, and a look at the names of files, show to be wrong. Nothing is read.

    Raises:
        ConfigError: not exactly one source of training rows, or keys that do not go together.
        DataError: a file that is not there or of an unknown kind.
    """
    if arguments.dataset_name is None and arguments.train_file is None:
        raise ConfigError("data: none is given to train on; give --dataset_name or --train_file")
    _refuse_both(arguments, "dataset_name", "train_file")
    _refuse_both(arguments, "test_file", "dataset_test_split")
    if arguments.dataset_test_split and not arguments.dataset_name:
        raise ConfigError("dataset_test_split: a split of dataset_name, which is not set; for a file give test_file")
    train = arguments.train_file or arguments.dataset_name
    if arguments.dataset_config and Path(train).expanduser().is_file():
        raise ConfigError(f"dataset_config: {train} is a file, which has no configurations; leave it out")
    for name in ("max_train_rows", "max_test_rows", "dataset_shuffle_buffer"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value}: expected 1 or more")
    for key in ("dataset_name", "train_file", "test_file"):
        if path := getattr(arguments, key):
            check_path(path, key)


def _refuse_both(arguments: SourceArguments, one: str, other: str) -> None:
    given = {name: getattr(arguments, name) for name in (one, other)}
    if None not in given.values():
        both = " and ".join(f"{name} {value!r}" for name, value in given.items())
        raise ConfigError(f"data: {both} are both given; give one of them")


def load_rows(arguments: SourceArguments, split: str) -> Rows | None:
    """Reads the rows that a run trains on, or those that it is evaluated on.

    What is not a stream is kept as Arrow files in the cache of `datasets`, as always with it. Call it in all
    processes, under `training.main_process_first()`: one of them reads, the others find it there.

    Args:
        arguments ([`SourceArguments`]): says where from.
        split (`str`): "train" or "test".

    Returns:
        [`Rows`], at least one; `None` where there is nothing to evaluate on.

    Raises:
        DataError: it cannot be read, or is empty.
    """
    is_train = split == "train"
    file = arguments.train_file if is_train else arguments.test_file
    name = file or arguments.dataset_name
    split_name = "train" if file else arguments.dataset_train_split if is_train else arguments.dataset_test_split
    if split_name is None:
        return None
    streaming = arguments.dataset_streaming and is_train
    with quiet_datasets():
        files = files_of(name, arguments.dataset_config, split_name) if is_local(name) else None
        if files is None:
            rows = _load_split(name, arguments.dataset_config, split_name, streaming)
        elif streaming:
            rows = stream_files(name, files, split_name)
        else:
            rows = load_files(name, files, split_name, arguments.skip_bad_rows)
        rows = replace(rows, data=undecoded(rows.data))
        return _with_example(rows.first(arguments.max_train_rows if is_train else arguments.max_test_rows))


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Keeps `datasets` from drawing bars, and from logging what it raises as well."""
    verbosity, has_bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if has_bars:
            datasets.enable_progress_bars()


def _load_split(name: str, config: str | None, split: str, streaming: bool) -> Rows:
    source = f"{name}, split {split}"
    with as_data_error(source):
        data = load_dataset(name, config, split=split, streaming=streaming)
    num_rows = None if isinstance(data, IterableDataset) else len(data)
    return Rows(data, source, (RowRange(source, "row", 0, num_rows),))


def _with_example(rows: Rows) -> Rows:
    """Reads rows until one is good: its columns are those of all."""
    bad = None
    with as_data_error(rows.source):
        for index, raw in enumerate(rows.data):
            try:
                row = rows.read(raw)
            except BadRow as error:
                bad = bad or f"{rows.where(index, raw)}: {error}; correct it"
                row = None
            if row is not None:
                return replace(rows, example=row, raw_columns=list(raw))
            if index + 1 == NUM_TRIED:
                break
    raise DataError(bad or f"{rows.source}: {NO_ROWS}")
