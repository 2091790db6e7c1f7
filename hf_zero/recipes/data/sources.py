"""Where rows come from: the hub or local files, all through `datasets`, at once or while training goes on."""

import csv
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import datasets
from datasets import (
    Dataset,
    Features,
    IterableDataset,
    Value,
    concatenate_datasets,
    load_dataset,
    load_dataset_builder,
)
from datasets.arrow_writer import SchemaInferenceError
from torch.utils import data
from transformers import TrainingArguments

from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes.data.rows import (
    EXTRA,
    PLACE,
    BadRow,
    Form,
    RowRange,
    Rows,
    code_hash,
    quiet_datasets,
    undecoded,
)
from hf_zero.recipes.parser import check_exists, refuse_less
from hf_zero.recipes.tasks import SourceArguments


NO_ROWS = "no rows, expected one at least"
JSON_LINES = (".jsonl", ".ndjson")
READERS = {
    **dict.fromkeys(JSON_LINES, "text"),
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}
PARSED = ("json", "csv")  # kinds of files that are read here, and not by a loader of `datasets`
NUM_TRIED = 1000  # lines that may be bad before the first good one


def check_sources(arguments: SourceArguments) -> None:
    """Refuses what the arguments alone, and a look at the names of files, show to be wrong. Nothing is read."""
    if arguments.dataset_name is None and arguments.train_file is None:
        raise ConfigError("data: none is given to train on; give --dataset_name or --train_file")
    _refuse_both(arguments, "dataset_name", "train_file")
    _refuse_both(arguments, "test_file", "dataset_test_split")
    if arguments.dataset_test_split and not arguments.dataset_name:
        raise ConfigError("dataset_test_split: a split of dataset_name, which is not set; for a file give test_file")
    train = arguments.train_file or arguments.dataset_name
    if arguments.dataset_config and Path(train).expanduser().is_file():
        raise ConfigError(f"dataset_config: {train} is a file, which has no configurations; leave it out")
    refuse_less(arguments, max_train_rows=1, max_test_rows=1, dataset_shuffle_buffer=1)
    for key in ("dataset_name", "train_file", "test_file"):
        if path := getattr(arguments, key):
            check_path(path, key)


def _refuse_both(arguments: SourceArguments, one: str, other: str) -> None:
    given = {name: getattr(arguments, name) for name in (one, other)}
    if None not in given.values():
        both = " and ".join(f"{name} {value!r}" for name, value in given.items())
        raise ConfigError(f"data: {both} are both given; give one of them")


def check_stream(arguments: SourceArguments, training: Mapping[str, Any]) -> None:
    """Refuses a stream of unknown length without a number of steps, with several workers, of which some would have no
    rows, or in an order for which all rows have to be known."""
    if not arguments.dataset_streaming:
        return
    if training["max_steps"] <= 0:
        raise ConfigError("dataset_streaming: the number of rows is not known; set --max_steps")
    strategy = training["train_sampling_strategy"]
    if strategy not in ("random", "sequential"):
        raise ConfigError(
            f"train_sampling_strategy {strategy}: the lengths of a stream (dataset_streaming) are not known; give "
            "random or sequential"
        )
    if (workers := training["dataloader_num_workers"]) > 1:
        raise ConfigError(
            f"dataloader_num_workers {workers}: one worker reads a stream (dataset_streaming); set 0 or 1"
        )


def load_rows(arguments: SourceArguments, split: str) -> Rows | None:
    """Reads the rows that a run trains on (`split` "train"), or those that it is evaluated on ("test"); `None` where
    there are none to evaluate on. Raises [`DataError`] where they cannot be read, or there is no row.

    What is not a stream is kept as Arrow files in the cache of `datasets`, as always with it. Call it in all
    processes, under `training.main_process_first()`: one of them reads, the others find it there.
    """
    is_train = split == "train"
    file = arguments.train_file if is_train else arguments.test_file
    name = file or arguments.dataset_name
    split_name = "train" if file else arguments.dataset_train_split if is_train else arguments.dataset_test_split
    if split_name is None:
        return None
    streaming = arguments.dataset_streaming and is_train
    with quiet_datasets():
        files = _files_of(name, arguments.dataset_config, split_name) if is_local(name) else None
        if files is None:
            source = f"{name}, split {split_name}"
            with as_data_error(source):
                data = load_dataset(name, arguments.dataset_config, split=split_name, streaming=streaming)
            rows = Rows(data, source, (RowRange(source, "row", 0, None if streaming else len(data)),))
        elif streaming:
            rows = _stream_files(name, files, split_name)
        else:
            rows = _load_files(name, files, split_name)
        rows = replace(rows, data=undecoded(rows.data))
        return _with_example(rows.first(arguments.max_train_rows if is_train else arguments.max_test_rows))


def _with_example(rows: Rows) -> Rows:
    """Reads rows until one is good: its columns are those of all."""
    bad = None
    with as_data_error(rows.source):
        for index, raw in enumerate(rows.data):
            try:
                if (row := rows.read(raw)) is not None:
                    return replace(rows, example=row, raw_columns=list(raw))
            except BadRow as error:
                bad = bad or f"{rows.where(index, raw)}: {error}; correct it"
            if index + 1 == NUM_TRIED:
                break
    raise DataError(bad or f"{rows.source}: {NO_ROWS}")


def is_local(name: str) -> bool:
    """Whether a data set is a file or folder of this machine, and no hub id."""
    return Path(name).expanduser().exists()


def check_path(name: str, key: str) -> None:
    """Refuses a file that is not there, or of a kind that is not read. A data set may be a hub id."""
    path = Path(name).expanduser()
    is_path = (
        key not in ("dataset_name", "datasets") or path.suffix.lower() in READERS or name.startswith((".", "/", "~"))
    )
    if is_path:
        check_exists(name, key)
    if path.is_file() and path.suffix.lower() not in READERS:
        raise DataError(f"{name}: a {path.suffix or 'nameless'} file, expected one of {', '.join(READERS)}")


def _files_of(name: str, config: str | None, split: str) -> list[Path] | None:
    """Returns the files of a local split, by the names that `datasets` goes by in a folder; `None` where the folder
    holds something else, such as images, for which `datasets` has a loader."""
    path = Path(name).expanduser()
    if path.is_file():
        found = {"train": [path]}
    else:
        with as_data_error(name):
            data_files = load_dataset_builder(str(path), config).config.data_files or {}
        found = {str(key): [Path(file) for file in files] for key, files in data_files.items()}
    base = split.partition("[")[0]
    if found and base not in found:
        raise DataError(f"{name}: split {split!r}, expected one of {', '.join(found)}, or a slice such as train[:90%]")
    files = found.get(base, [])
    kinds = {file.suffix.lower() for file in files}
    return files if len(kinds) == 1 and kinds <= set(READERS) else None


def _load_files(name: str, files: list[Path], split: str) -> Rows:
    """Reads files of one kind. Bad rows are met when rows are used."""
    reader, form = _reader(files[0])
    tables = []
    for file in files:
        with as_data_error(str(file)):
            tables.append(_read(str(file), reader, streaming=False))
    parts = [RowRange(str(file), _unit(reader), 0, len(table)) for file, table in zip(files, tables, strict=True)]
    data = tables[0] if len(tables) == 1 else concatenate_datasets(tables)
    return Rows(data, name, tuple(parts), form).slice(split)


def _stream_files(name: str, files: list[Path], split: str) -> Rows:
    """Reads files of one kind while their rows are used."""
    if "[" in split:
        raise ConfigError(
            f"{name}: split {split!r} with dataset_streaming: streams have no slices; use max_train_rows"
        )
    reader, form = _reader(files[0])
    given = {"files": [str(file) for file in files], "reader": reader}
    data = IterableDataset.from_generator(_placed_rows, gen_kwargs=given)
    return Rows(data, name, tuple(RowRange(str(file), _unit(reader), 0, None) for file in files), form)


def _placed_rows(files: list[str], reader: str) -> Iterator[dict[str, Any]]:
    for file in files:
        data = undecoded(_read(file, reader, streaming=True))
        for number, row in enumerate(data, start=1):
            yield {**row, PLACE: f"{file}: {_unit(reader)} {number}"}


def _read(file: str, reader: str, *, streaming: bool) -> Any:
    """The raw rows of one file."""
    if reader not in PARSED:
        options = {"encoding": "utf-8-sig"} if reader == "text" else {}
        return load_dataset(reader, data_files=file, split="train", streaming=streaming, **options)
    stat = Path(file).stat()
    given = {"file": file, "reader": reader, "version": f"{stat.st_size} {stat.st_mtime_ns} {code_hash()}"}
    kind = IterableDataset if streaming else Dataset
    return kind.from_generator(_parsed, gen_kwargs=given, features=Features({"text": Value("string")}))


def _parsed(file: str, reader: str, version: str) -> Iterator[dict[str, str]]:
    """The rows of a table, or of a JSON array, each as JSON of its own: no type is guessed from other rows. The cache
    of `datasets` is asked for the file by its name and `version`."""
    rows = _array(file) if reader == "json" else _table(file, "\t" if file.lower().endswith(".tsv") else ",")
    for row in rows:
        yield {"text": json.dumps(row, ensure_ascii=False) if row else ""}


def _array(file: str) -> list[Any]:
    rows = json.loads(Path(file).read_text(encoding="utf-8-sig"))
    if not isinstance(rows, list):
        raise DataError(f"{file}: a JSON {type(rows).__name__}, expected an array of objects, or one object a line")
    return rows


def _table(file: str, separator: str) -> Iterator[dict[str, Any]]:
    """The rows of a CSV or TSV file, whose fields are texts, whatever they look like."""
    csv.field_size_limit(2**31 - 1)  # of one text, which by default may have 128 KiB
    with Path(file).open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, delimiter=separator, strict=True)
        try:
            header = next(reader, [])
            if len(header) == 1 and (other := next((each for each in ";\t,|" if each in header[0]), None)):
                raise DataError(
                    f"{file}: one column, {header[0]!r}, expected columns that {separator!r} separates, and not "
                    f"{other!r}; save it so"
                )
            for fields in reader:
                row = {**dict.fromkeys(header), **dict(zip(header, fields))} if fields else {}
                yield {**row, EXTRA: fields} if len(fields) > len(header) else row
        except csv.Error as error:
            raise DataError(f"{file}: line {reader.line_num}: {error}; correct it") from error


@contextmanager
def as_data_error(source: str) -> Iterator[None]:
    """Turns whatever `datasets` raises into one line of ours, a [`DataError`] that names the source."""
    try:
        yield
    except (ConfigError, DataError):
        raise
    except Exception as error:  # it raises what Arrow, pandas, fsspec and the hub's client raise
        cause = error.__cause__ or error
        if isinstance(cause, DataError):
            raise cause from error
        if isinstance(cause, SchemaInferenceError) or "corresponds to no data" in str(cause):
            raise DataError(f"{source}: {NO_ROWS}") from error
        reason = " ".join(str(cause).split())[:300] or repr(cause)
        remedy = "save it as UTF-8" if isinstance(cause, UnicodeDecodeError) else "correct it"
        raise DataError(f"{source}: cannot be read ({type(cause).__name__}: {reason}); {remedy}") from error


def _reader(file: Path) -> tuple[str, Form]:
    """What reads a file, and the form of its rows."""
    kind = file.suffix.lower()
    reader = READERS[kind]
    if kind in JSON_LINES or (kind == ".json" and _has_json_lines(file)):
        return "text", "json"
    return reader, "json" if reader in PARSED else "text" if reader == "text" else "columns"


def _unit(reader: str) -> str:
    return "line" if reader == "text" else "row"


def _has_json_lines(file: Path) -> bool:
    try:
        with file.open(encoding="utf-8-sig") as stream:
            return isinstance(json.loads(stream.readline()), dict)
    except (OSError, ValueError):
        return False


def shuffled(
    rows: datasets.IterableDataset, arguments: SourceArguments, training: TrainingArguments
) -> datasets.IterableDataset:
    """Rows and their files, shuffled in a buffer, the same in every process; "sequential" leaves the order."""
    if training.train_sampling_strategy == "sequential":
        return rows
    seed = training.seed if training.data_seed is None else training.data_seed
    return rows.shuffle(seed=seed, buffer_size=arguments.dataset_shuffle_buffer)


class Stream(data.IterableDataset):
    """The same rows in every process, of which accelerate gives each its batches, equally many.

    The files of a `datasets.IterableDataset` it would share out, and the process with the shortest would end first,
    while the others wait for it. When all rows have been read they are read again, in another order: `max_steps` ends
    the run, and a step may take the last rows and the first. `Trainer` would drop a step that the end of the rows cuts
    short, and never end where there are too few rows for one.
    """

    def __init__(self, rows: datasets.IterableDataset):
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in count():
            self._rows.set_epoch(number)
            row = None
            for row in self._rows:
                yield row
            if row is None:  # a pass without any row is the last
                return
