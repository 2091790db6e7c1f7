"""The steps of a run in each of its processes, the same for all tasks."""

import signal
from collections.abc import Callable
from functools import partial

import transformers

from hf_zero.comm.ranks import transport_errors
from hf_zero.recipes.artifacts import write_artifacts, write_configuration
from hf_zero.recipes.auto_length import with_same_length
from hf_zero.recipes.earlier_run import checkpoint_of, finished, resume_message, set_aside
from hf_zero.recipes.freezing import freeze_parameters
from hf_zero.recipes.lm_evaluation import evaluate_lm_tasks, load_lm_tasks
from hf_zero.recipes.measured import Watch
from hf_zero.recipes.parser import AUTO
from hf_zero.recipes.samples import Samples
from hf_zero.recipes.settings import Settings
from hf_zero.recipes.tasks import TASKS
from hf_zero.trainer import ZeroTrainer, ZeroTrainingArguments


def run_task(settings: Settings) -> None:
    """Runs a task in this process, unless the same run has ended before."""
    with transport_errors(settings.task):
        training = settings.training_arguments()
        settings = with_same_length(settings, training)
        has_ended = finished(settings, training)
        if has_ended is None:
            train(settings, training).accelerator.end_training()
        else:
            _sayer(training)(has_ended)
            training.distributed_state.destroy_process_group()


def train(settings: Settings, training: ZeroTrainingArguments) -> ZeroTrainer:
    """Trains, and writes the model, the report and the model card. All ranks call it. Returns the trainer; its process
    group is still there."""
    task, say = TASKS[settings.task].load(), _sayer(training)
    checkpoint = checkpoint_of(settings, training)
    if checkpoint is not None:
        say(resume_message(checkpoint, training))
    lm_tasks = load_lm_tasks(settings.arguments, training)
    data = task.load_data(settings.arguments, training)
    transformers.set_seed(training.seed)
    model = task.load_model(settings.arguments, training, data)
    data.notes += freeze_parameters(model, settings.arguments)
    trainer = task.make_trainer(model, settings.arguments, training, data)
    for note in data.notes:
        say(note)
    _stop_on_ctrl_c(trainer, settings)
    watch = Watch.attach(trainer)
    task.before(trainer, data, say)
    if checkpoint is None:
        moved = set_aside(trainer, settings)
        if moved is not None:
            say(f"what a run before has left is in {moved} now")
    write_configuration(trainer, settings)
    samples = Samples.of(trainer, data, getattr(settings.arguments, "samples", 0), say)
    samples.before(resumes=checkpoint is not None)
    trainer.leaves_model = True
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(_internal_call=True)  # what is pushed is pushed once, with report and card
    task.after(trainer, data, watch, settings.arguments, say)
    samples.after()
    if lm_tasks is not None:
        evaluate_lm_tasks(trainer, data, settings.arguments, lm_tasks, say)
    write_artifacts(trainer, settings, data, watch, samples.tables(), say)
    if training.push_to_hub:
        trainer.push_to_hub(commit_message=f"{settings.task}: end of training", revision=training.hub_revision)
    return trainer


def _stop_on_ctrl_c(trainer: ZeroTrainer, settings: Settings) -> None:
    """Makes Ctrl-C save a checkpoint, as other signals do for every trainer. In notebooks it would be unexpected."""
    trainer.stop_on_signal.signals += (signal.SIGINT,)
    again = "again" if settings.resume == AUTO else f"with --resume {AUTO}"
    again += " and without --overwrite_output_dir" if settings.overwrite_output_dir else ""
    trainer.stop_on_signal.remedy = f"to go on, run the same command {again}"


def _sayer(training: ZeroTrainingArguments) -> Callable[..., None]:
    return partial(print, flush=True) if training.process_index == 0 else lambda *_: None
