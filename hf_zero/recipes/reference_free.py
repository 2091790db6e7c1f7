"""The tasks that learn preferences without a reference model: `orpo` and `simpo`. TRL's trainers of them are
experimental, so they have a module of their own."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from hf_zero.errors import ConfigError
from hf_zero.recipes.data.preferences import ANSWERS, PREFERENCES
from hf_zero.recipes.data.rows import IGNORED, Data, cut_notes, quiet_datasets
from hf_zero.recipes.trl_task import TrlArguments, TrlTask
from hf_zero.recipes.trl_tasks import LONG_PROMPT, PREFERRED, left_out
from hf_zero.trl import ZeroCPOTrainer, ZeroORPOTrainer


# Keys of TRL's that these tasks cannot take, and what to do instead.
REFUSED = {
    "generate_during_eval": "writes to trackers alone; give --samples, which shows answers before and after training",
    "is_encoder_decoder": "has no effect, as the model says it; leave it out",
    "max_completion_length": "has no effect on these models; give max_length, of prompt and answer",
}


def _check_keys(arguments: TrlArguments, training: Mapping[str, Any]) -> None:
    for key, why in REFUSED.items():
        if training[key]:
            raise ConfigError(f"{key}: {why}")
    if arguments.dataset_streaming:
        raise ConfigError("dataset_streaming: TRL's trainer tokenizes all rows before it begins; leave it out")


def _leave_out_prompts(trainer: Any) -> None:
    """Leaves out rows of whose answers TRL has cut all: their loss is no number."""
    with trainer.args.main_process_first(), quiet_datasets():
        for name in ("train_dataset", "eval_dataset"):
            rows = getattr(trainer, name)
            if rows is not None:
                labels = [f"{answer}_labels" for answer in ANSWERS]
                setattr(trainer, name, rows.filter(_has_answers, input_columns=labels))


def _has_answers(*labels: list[int]) -> bool:
    return all(each[-1] != IGNORED for each in labels)


def _cut_answers(trainer: Any, data: Data) -> list[str]:
    """How many preferences do not fit into `max_length`, and how many are cut. What was cut is tokenized again."""
    max_length, rows = trainer.max_length, trainer.train_dataset
    columns = [f"{answer}_input_ids" for answer in ANSWERS]
    with quiet_datasets(), patch.object(trainer, "max_length", sys.maxsize):
        full = rows.filter(lambda *ids: max(map(len, ids)) == max_length, input_columns=columns, keep_in_memory=True)
        whole = [trainer.tokenize_row(row) for row in full]
    lost = [sum(max(len(row[name]) - max_length, 0) for name in columns) for row in whole]
    return [*left_out(LONG_PROMPT, trainer, data), *cut_notes(lost, max_length)]


ORPO = TrlTask(
    ZeroORPOTrainer,
    (PREFERENCES,),
    PREFERRED,
    check_more=_check_keys,
    leave_out=_leave_out_prompts,
    lost=_cut_answers,
)
SIMPO = replace(ORPO, trainer=ZeroCPOTrainer, defaults={"loss_type": "simpo", "cpo_alpha": 0.0})
