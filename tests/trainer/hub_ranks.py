"""One rank of runs that push while they train. `python -m tests.trainer.hub_ranks FOLDER:TOKEN:STRATEGY...`"""

import logging
import sys

import torch

import hf_zero
from tests import models
from tests.trainer.harness import Rows, make


def push_while_training(folder: str, token: str, strategy: str) -> str:
    """Trains four steps, saving every second one; pushes at the end as scripts do. Returns the repository's name."""
    torch.manual_seed(0)
    trainer = make(
        3,
        f"{folder}/{strategy}",
        models.build("llama"),
        Rows("llama"),
        parts={"eval_dataset": Rows("llama", 4, seed=1)},
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        push_to_hub=True,
        hub_model_id=f"alice/{strategy}",
        hub_strategy=strategy,
        hub_always_push=True,
        hub_token=token,
        ddp_timeout=60,
    )
    trainer.train()
    trainer.push_to_hub()
    return trainer.hub_model_id


def main(*runs: str) -> None:
    """Says one line of each run."""
    logging.basicConfig(level=logging.WARNING)
    for run in runs:
        try:
            print(f"pushed {push_while_training(*run.split(':'))}", flush=True)
        except hf_zero.errors.HfZeroError as error:
            print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
