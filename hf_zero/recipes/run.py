"""What a run does in every process, whatever its task: data, model, trainer, training, and what it leaves."""

import signal
from functools import partial

import transformers

from hf_zero.recipes.leaving import leave, write_configuration
from hf_zero.recipes.resuming import checkpoint_of, set_aside, told
from hf_zero.recipes.settings import AUTO, Settings
from hf_zero.recipes.tasks import TASKS
from hf_zero.recipes.watch import Watch
from hf_zero.trainer import ZeroTrainer


def run_task(settings: Settings) -> None:
    """All that a process of the run does.

    Args:
        settings ([`Settings`]): What to do; the rank comes from the environment.
    """
    train(settings).accelerator.end_training()


def train(settings: Settings) -> ZeroTrainer:
    """Trains, and leaves what a run leaves. All ranks call it.

    Args:
        settings ([`Settings`]): What to do.

    Returns:
        [`ZeroTrainer`]: That has trained; its process group is still there.
    """
    task = TASKS[settings.task].load()
    training = settings.training_arguments()
    say = partial(print, flush=True) if training.process_index == 0 else _say_nothing
    checkpoint = checkpoint_of(settings, training)
    if checkpoint is not None:
        say(told(checkpoint))
    data = task.load_data(settings.arguments, training)
    for note in data.notes:
        say(note)
    transformers.set_seed(training.seed)
    model = task.load_model(settings.arguments, training, data)
    trainer = task.make_trainer(model, settings.arguments, training, data)
    _stop_on_ctrl_c(trainer, settings)
    watch = Watch.attach(trainer)
    task.before(trainer, data, say)
    if checkpoint is None:
        moved = set_aside(trainer)
        if moved is not None:
            say(f"the checkpoints of a run before are in {moved} now")
    write_configuration(trainer, settings)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(_internal_call=True)  # what is pushed is pushed once, with report and card
    task.after(trainer, data, watch.memory, settings.arguments, say)
    leave(trainer, settings, data, watch, say)
    if training.push_to_hub:
        trainer.push_to_hub(commit_message=f"{settings.task}: end of training", revision=training.hub_revision)
    return trainer


def _stop_on_ctrl_c(trainer: ZeroTrainer, settings: Settings) -> None:
    """Ctrl-C saves, as other signals do in every trainer; in a notebook it would be a surprise."""
    trainer.stop_on_signal.signals += (signal.SIGINT,)
    again = "again" if settings.resume == AUTO else f"with --resume {AUTO}"
    trainer.stop_on_signal.remedy = f"to go on, run the same command {again}"


def _say_nothing(*_: object) -> None:
    pass
