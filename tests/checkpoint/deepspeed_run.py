"""One rank of a run under the real DeepSpeed: `torchrun ... deepspeed_run.py stage dtype folder`."""

import json
import os
import sys
from pathlib import Path


os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).parents[2]))


def use_gloo_alone() -> None:
    """Keeps DeepSpeed from an operator that it compiles on first use: a build that was killed leaves a lock, for which
    all later runs wait without end."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main(stage: int, dtype: str, folder: str) -> None:
    import deepspeed

    from tests.checkpoint.foreign_runs import NUM_STEPS, adamw, build, tokens_of

    use_gloo_alone()
    deepspeed.init_distributed("gloo")
    model = build()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == "bfloat16"},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
    losses = []
    for step in range(2 * NUM_STEPS):
        if step == NUM_STEPS:
            engine.save_checkpoint(folder)
        tokens = tokens_of(step)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if deepspeed.comm.get_rank() == 0:
        (Path(folder) / "losses.json").write_text(json.dumps(losses))
    deepspeed.comm.barrier()  # a rank that leaves early breaks the others' connections
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
