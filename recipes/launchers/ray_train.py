"""Starts a recipe on the machines of a Ray cluster, a worker for each GPU; with --use_cpu, for each rank on CPUs.

    python recipes/launchers/ray_train.py --num_workers 16 \\
        sft --config llama-3.1-8b-sft-stage3.yaml --output_dir /shared/run1

Ray starts the workers and tells each its rank; the recipe and its keys are those of the command line. The package is
installed on every machine, and what the recipe names (folders, files) is found on each of them.
"""

import argparse
import sys

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(settings: dict) -> None:
    """Runs a recipe as one of its ranks.

    Args:
        settings (`dict`): `argv`, the task and its keys.
    """
    from hf_zero.recipes.cli import main

    if code := main(settings["argv"]):
        raise RuntimeError(f"the recipe ended with exit code {code}; its message stands above")


def main() -> None:
    """Starts it, and returns when all workers have ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_workers", type=int, required=True, help="How many ranks.")
    parser.add_argument("--max_failures", type=int, default=0, help="How often a run that failed is started again.")
    own, argv = parser.parse_known_args()
    on_cpu = any(key.partition("=")[0] == "--use_cpu" for key in argv)
    TorchTrainer(
        train,
        train_loop_config={"argv": argv},
        scaling_config=ScalingConfig(num_workers=own.num_workers, use_gpu=not on_cpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=own.max_failures)),
    ).fit()


if __name__ == "__main__":
    sys.exit(main())
