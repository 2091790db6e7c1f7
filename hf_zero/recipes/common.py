"""Arguments that all tasks share, under the names that TRL and transformers gave them."""

from dataclasses import dataclass, field


@dataclass
class SourceArguments:
    """Which model is trained on which data."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A folder, package:<name>/<folder inside an installed package>, or a hub id."}
    )
    model_revision: str | None = field(default=None, metadata={"help": "A branch, tag or commit of the hub id."})
    dataset_name: str | None = field(
        default=None, metadata={"help": "A hub id, or a local file or folder of JSONL, JSON, CSV, Parquet or text."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Which configuration of the hub's data set."})
    dataset_train_split: str = field(default="train", metadata={"help": "Trained on."})
    dataset_test_split: str | None = field(
        default=None, metadata={"help": "Evaluated on; without it, and without test_file, nothing is."}
    )
    dataset_streaming: bool = field(
        default=False, metadata={"help": "Rows are read while training goes on; needs --max_steps."}
    )
    dataset_shuffle_buffer: int = field(
        default=1000,
        metadata={
            "help": "Of so many rows of a stream, which each rank holds in memory, the next one is drawn at random; "
            "--train_sampling_strategy sequential reads them in order."
        },
    )
    train_file: str | None = field(default=None, metadata={"help": "A local file, in place of dataset_name."})
    test_file: str | None = field(default=None, metadata={"help": "A local file to evaluate on."})
    max_train_rows: int | None = field(default=None, metadata={"help": "Train on the first so many rows only."})
    max_test_rows: int | None = field(default=None, metadata={"help": "Test on the first so many rows only."})
    skip_bad_rows: bool = field(
        default=False, metadata={"help": "Leaves out malformed rows and counts them, instead of refusing the run."}
    )


@dataclass
class CommonArguments(SourceArguments):
    """Likewise, for a task whose training arguments have no `max_length` of their own: a key has one source."""

    max_length: int = field(default=1024, metadata={"help": "Longer rows are cut to so many tokens."})
