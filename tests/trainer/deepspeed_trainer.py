"""One rank of a `Trainer` run under the real DeepSpeed: `torchrun ... deepspeed_trainer.py stage model folder`."""

import os
import sys
from pathlib import Path


os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).parents[2]))

# 24 rows in batches of four: step 3 lies in the middle of the epoch.
SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}


def deepspeed_config(stage: int) -> dict:
    automatic = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **dict.fromkeys((*automatic, "gradient_clipping"), "auto"),
    }


def build(name: str):
    """A Llama: "tied", or "lora" for its adapters."""
    from tests import models

    if name == "tied":
        return models.build("llama-tied")
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(models.build("llama"), config)


def main(stage: int, name: str, folder: str) -> None:
    from transformers import Trainer, TrainingArguments

    from tests.checkpoint.deepspeed_run import use_gloo_alone
    from tests.trainer.harness import SETTINGS, Rows, seed_everything

    use_gloo_alone()
    settings = {**SETTINGS, **SAVING, "output_dir": folder}
    args = TrainingArguments(use_cpu=True, deepspeed=deepspeed_config(stage), **settings)
    seed_everything()
    trainer = Trainer(model=build(name), args=args, train_dataset=Rows("llama-tied"))
    trainer.train()
    trainer.accelerator.wait_for_everyone()  # a rank that leaves early breaks the others' connections


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
