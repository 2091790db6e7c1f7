"""Reading rows from the Hub or from local files, through `datasets`, at once or during training. Several data sets are
read one after the other, or sampled by fraction."""

import csv
import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, TextIO, cast, get_args

import datasets
from datasets import (
    Dataset,
    Features,
    IterableDataset,
    ReadInstruction,
    Value,
    concatenate_datasets,
    interleave_datasets,
    load_dataset,
    load_dataset_builder,
)

from hf_zero.config import choose
from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes.data.rows import CONTENT, EXTRA, PLACE, BadRow, Rows, code_hash, undecoded
from hf_zero.recipes.parser import option, refuse_less
from hf_zero.recipes.tasks import SourceArguments
from hf_zero.trainer.place import WholeStream


TABLES = {".csv": ",", ".tsv": "\t"}  # with what separates their columns
LINES = (".jsonl", ".ndjson", ".json", ".txt", *TABLES)  # kinds of files that are read here, line by line
FILES = (*LINES, ".parquet")
NO_ROWS = "no rows, expected one at least"
NUM_TRIED = 1000  # rows that may be bad before the first good one
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


def check_sources(arguments: SourceArguments, name_key: str = "dataset_name") -> None:
    """Refuses arguments that cannot work, by their values and the names of files. Nothing is read."""
    if arguments.dataset_name is None and arguments.train_file is None:
        raise ConfigError("data: none is given to train on; give --dataset_name or --train_file")
    for one, other in (("dataset_name", "train_file"), ("test_file", "dataset_test_split")):
        first, second = getattr(arguments, one), getattr(arguments, other)
        if first and second:
            raise ConfigError(f"data: {one} {first!r} and {other} {second!r} are both given; give one of them")
    if arguments.dataset_test_split and not arguments.dataset_name:
        raise ConfigError("dataset_test_split: a split of dataset_name, which is not set; for a file give test_file")
    train = arguments.train_file or arguments.dataset_name
    if arguments.dataset_config and Path(train).expanduser().is_file():
        raise ConfigError(f"dataset_config: {train} is a file, which has no configurations; leave it out")
    refuse_less(arguments, max_train_rows=1, max_test_rows=1, dataset_shuffle_buffer=1)
    for key in ("dataset_name", "train_file", "test_file"):
        if path := getattr(arguments, key):
            check_path(path, name_key if key == "dataset_name" else key)


def check_stream(arguments: SourceArguments, training: Mapping[str, Any]) -> None:
    """Refuses settings that a stream does not allow: its length is not known, and one process reads it."""
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


def is_local(name: str) -> bool:
    """Whether a data set is a file or folder of this machine, and no Hub id."""
    return Path(name).expanduser().exists()


def check_path(name: str, key: str) -> None:
    """Refuses a file that does not exist, or of a kind that is not read. A data set may be a Hub id."""
    path = Path(name).expanduser()
    may_be_id = key in ("dataset_name", "datasets") and not name.startswith((".", "/", "~"))
    if (not may_be_id or _kind(path) in FILES) and not path.exists():
        raise ConfigError(f"{name}: no such file; check {key}")
    if path.is_file() and _kind(path) not in FILES:
        raise ConfigError(f"{name}: a {path.suffix or 'nameless'} file, expected one of {', '.join(FILES)}")


def _kind(file: str | Path) -> str:
    """Returns the suffix of a file in lower case; of a compressed file of lines the one before `.gz`."""
    path = Path(str(file).lower())
    inner = path.with_suffix("").suffix
    return inner if path.suffix == ".gz" and inner in LINES else path.suffix


def load_rows(arguments: SourceArguments, split: str) -> Rows | None:
    """Reads the rows to train on (`split` "train"), or to evaluate on ("test"). Returns `None` if no test rows were
    given. Raises [`DataError`] if they cannot be read, or there are none.

    Rows that are not streamed lie in the cache of `datasets`. Call it in all processes, under
    `training.main_process_first()`: one of them reads, and the others find the rows there.
    """
    # the notes of a run say what was read, and our errors what `datasets` logs before it raises
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    is_train = split == "train"
    file = arguments.train_file if is_train else arguments.test_file
    name = file or arguments.dataset_name
    split_name = "train" if file else arguments.dataset_train_split if is_train else arguments.dataset_test_split
    if split_name is None:
        return None
    streams = arguments.dataset_streaming and is_train
    files = _line_files(name, arguments.dataset_config, split_name) if is_local(name) else []
    source = name if files or file else f"{name}, split {split_name}"
    with as_data_error(source):
        if files:
            rows = _read_lines(files, split_name, streams=streams)
        elif Path(name).expanduser().is_file():
            rows = load_dataset("parquet", data_files=name, split=split_name, streaming=streams)
        else:
            rows = load_dataset(name, arguments.dataset_config, split=split_name, streaming=streams)
        path = Path(name).expanduser()
        own = (path if path.is_dir() else path.parent,) if path.exists() else ()
        most = arguments.max_train_rows if is_train else arguments.max_test_rows
        if most is not None:
            rows = rows.take(most if streams else min(most, len(rows)))
        found = Rows(undecoded(rows), source, tuple(dict.fromkeys((*own, *(file.parent for file in files)))))
        bad = None
        for index, raw in zip(range(NUM_TRIED), found.data):  # all rows have the columns of the first good one
            try:
                return replace(found, example=found.read(raw))
            except BadRow as error:
                bad = bad or f"{found.where(index, raw)}: {error}; correct it"
        raise DataError(bad or f"{source}: {NO_ROWS}")


def _line_files(name: str, config: str | None, split: str) -> list[Path]:
    """Returns the files of a local split, found as `datasets` finds them in a folder. Returns none if `datasets` has a
    loader for them, such as for Parquet and folders of images."""
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
    return files if all(_kind(file) in LINES for file in files) else []


def _read_lines(files: list[Path], split: str, *, streams: bool) -> Dataset | IterableDataset:
    """Reads the lines of files, each with its place."""
    if streams and "[" in split:
        raise ConfigError(f"split {split!r} with dataset_streaming: streams have no slices; use max_train_rows")
    stats = [file.stat() for file in files]
    given = {
        "files": [str(file) for file in files],
        # `datasets` looks for rows in its cache by these arguments
        "version": f"{[(stat.st_size, stat.st_mtime_ns) for stat in stats]} {code_hash()}",
    }
    kind = IterableDataset if streams else Dataset
    features = Features({PLACE: Value("string"), CONTENT: Value("string")})
    rows = kind.from_generator(_rows_of_files, gen_kwargs=given, features=features)
    if "[" not in split:
        return rows
    ranges = ReadInstruction.from_spec(split).to_absolute({split.partition("[")[0]: len(rows)})
    return rows.select([index for each in ranges for index in range(each.from_, each.to)])


def _rows_of_files(files: list[str], version: str) -> Iterator[dict[str, str]]:
    """Yields the rows of files as JSON, each with its place."""
    for file in files:
        is_table, opened = _kind(file) in TABLES, gzip.open if file.lower().endswith(".gz") else open
        try:
            with opened(file, "rt", encoding="utf-8-sig", newline="" if is_table else None) as stream:
                for place, row in _table(file, stream) if is_table else _lines(file, stream):
                    yield {PLACE: f"{file}: {place}", CONTENT: row if isinstance(row, str) else json.dumps(row)}
        except (EOFError, OSError, zlib.error) as error:  # of a damaged archive
            raise DataError(f"{file}: cannot be read ({error}); copy it again") from error
        except UnicodeDecodeError as error:
            found = f"byte 0x{error.object[error.start]:02x} is not UTF-8"
            raise DataError(f"{file}: {found}, so it has another encoding; save it as UTF-8") from error


def _lines(file: str, stream: TextIO) -> Iterator[tuple[str, Any]]:
    """Yields the lines of JSON or text that are not empty, or the elements of a JSON array."""
    if _kind(file) == ".json" and stream.read(100).lstrip().startswith("["):
        stream.seek(0)
        yield from ((f"row {number}", row) for number, row in enumerate(json.load(stream), start=1))
        return
    stream.seek(0)
    is_text = _kind(file) == ".txt"
    for number, line in enumerate(stream, start=1):
        if line.strip():
            yield f"line {number}", {"text": line.rstrip("\n")} if is_text else line


def _table(file: str, stream: TextIO) -> Iterator[tuple[str, Any]]:
    """Yields the rows of a CSV or TSV file, in which all fields are texts."""
    csv.field_size_limit(2**31 - 1)  # of one text, which by default may have 128 KiB
    own, header = TABLES[_kind(file)], stream.readline()
    others = ",;\t|".replace(own, "")  # a name may hold one too, with a blank behind it
    if own not in header and (other := re.search(rf"[{others}](?=\S)", header)):
        found, expected = repr(other[0]), repr(own)
        raise DataError(f"{file}: {found} separates its columns, expected {expected}; save it with {expected}")
    stream.seek(0)
    reader = csv.DictReader(stream, restkey=EXTRA, delimiter=own, strict=True)
    try:
        yield from ((f"line {reader.line_num}", row) for row in reader)
    except csv.Error as error:
        raise DataError(f"{file}: line {reader.reader.line_num}: {error}; correct it") from error


@contextmanager
def as_data_error(source: str) -> Iterator[None]:
    """Turns the errors of `datasets` into one line, a [`DataError`] that names the source."""
    try:
        yield
    except (ConfigError, DataError):
        raise
    except Exception as error:  # those of Arrow, pandas, fsspec and the Hub's client, too
        cause = error.__cause__ or error
        if isinstance(cause, DataError):
            raise cause from error
        if "corresponds to no data" in str(cause):
            raise DataError(f"{source}: {NO_ROWS}") from error
        reason = " ".join(str(cause).split())[:300] or repr(cause)
        raise DataError(f"{source}: cannot be read ({type(cause).__name__}: {reason}); correct it") from error


class Stream(WholeStream):
    """A stream that begins again, in another order, when all rows have been read: `max_steps` ends the run, and a step
    may take the last rows and the first."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in count():
            self.set_epoch(number)
            row = None
            for row in super().__iter__():
                yield row
            if row is None:  # a pass without any row is the last
                return


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
    for name in (*ENTRY.values(), "train_file", "dataset_test_split"):
        if getattr(arguments, name) != getattr(SourceArguments, name):
            raise ConfigError(
                f"{name}: has no effect beside datasets; give path, name and split there, and test rows as test_file"
            )
    have_fractions = {"fraction" in entry for entry in entries}
    if len(have_fractions) > 1:
        raise ConfigError("datasets: some have a fraction, and some have none; give it to all or to none")
    if have_fractions == {True} and arguments.dataset_streaming and not interleaves:
        raise ConfigError(
            "datasets: how many rows the fraction of a stream (dataset_streaming) is, is not known; give "
            f"--dataset_mixing {INTERLEAVE}, or no fractions"
        )
    for source in arguments.each:
        check_sources(source, "datasets")


def load_each(arguments: MixtureArguments) -> list[Rows]:
    """Reads the training rows of each data set, as `load_rows` does."""
    found = [load_rows(source, "train") for source in arguments.each]
    for number, entry in enumerate(arguments.entries):
        if names := entry.get("columns"):
            rows = found[number]
            rows.require(names)
            found[number] = replace(rows, kept=tuple(names), example={name: rows.example[name] for name in names})
    return found


def mix(
    parts: Sequence[Dataset | IterableDataset], arguments: MixtureArguments, training: Any
) -> Dataset | IterableDataset:
    """Makes one data set of several with the same columns; a stream is then shuffled in a buffer. The order depends on
    the seed, and not on the number of processes. Raises [`DataError`] if columns differ."""
    features = [dict(part.features) for part in parts]
    if any(each != features[0] for each in features):
        kinds = "; ".join(f"{name} has {each}" for name, each in zip(arguments.names, features, strict=True))
        raise DataError(f"datasets: {kinds}; mix data sets of one kind")
    mixed, seed = parts[0], training.seed if training.data_seed is None else training.data_seed
    if len(parts) > 1:
        with as_data_error(" and ".join(arguments.names)):
            mixed = _joined([*parts], arguments, seed)
    if not isinstance(mixed, IterableDataset) or training.train_sampling_strategy == "sequential":
        return mixed
    return mixed.shuffle(seed=seed, buffer_size=arguments.dataset_shuffle_buffer)


def _joined(parts: list, arguments: MixtureArguments, seed: int) -> Dataset | IterableDataset:
    fractions = [entry.get("fraction", 0.0) for entry in arguments.entries]
    shares = [fraction / sum(fractions) for fraction in fractions] if any(fractions) else None
    if arguments.dataset_mixing == INTERLEAVE:
        strategy = arguments.dataset_stopping_strategy
        return interleave_datasets(parts, probabilities=shares, seed=seed, stopping_strategy=strategy)
    if shares:  # as in TRL: as many rows as possible without repeating one
        most = min(len(part) / share for part, share in zip(parts, shares, strict=True))
        parts = [part.select(range(round(share * most))) for part, share in zip(parts, shares, strict=True)]
    return concatenate_datasets(parts)
