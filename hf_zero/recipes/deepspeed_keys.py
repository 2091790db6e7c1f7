"""What each key of a DeepSpeed configuration is here: one table, for `migrate` and for docs/deepspeed.md.

The keys are those of DeepSpeed 0.19 (runtime/config.py, runtime/zero/config.py, runtime/precision_config.py).
"""

import json
from typing import Any

from hf_zero.recipes.migrate_rules import (
    Always,
    Default,
    Dialect,
    Flag,
    Flags,
    Missing,
    NoCounterpart,
    Section,
    Sections,
    each,
    flat,
    offload,
    one_of,
    swap_folder,
    switch,
)


_DTYPES = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16", "bfp16": "bf16"}
OPTIMIZERS = {
    "adam": "adamw_torch_fused",
    "adamw": "adamw_torch_fused",
    "lion": "lion_32bit",
    "adagrad": "adagrad",
    "rmsprop": "rmsprop",
    "sgd": "sgd",
}
SCHEDULERS = {"warmuplr": "constant_with_warmup", "warmupdecaylr": "linear", "warmupcosinelr": "cosine_with_min_lr"}

_SUMMED = "gradients are summed in fp32 or bf16"
_UNIT_SIZE = "counted in elements there, in whole blocks here"
_OPTIMIZERS = "not among the optimizers of --optim; see `Optimizers` of docs/training.md"
_SCHEDULES = "not among the schedules of --lr_scheduler_type; give Trainer an object of that class (optimizers=...)"
_LOGARITHMIC = "warmup is linear here, and slower at first; DeepSpeed's is logarithmic unless its file says linear"
_DISK = "set by itself: direct I/O in pieces, from threads of its own"
_PINNED = "host memory is page-locked wherever a device copies from it"
_DECAYED = "biases and norms do not decay here; DeepSpeed decays all parameters"
_ONE_BIT = Missing("of the 1-bit optimizers: gradients are exchanged as they are")
ONE_BIT_KEYS = (
    "freeze_step cuda_aware comm_backend_name var_freeze_step var_update_scaler local_step_scaler local_step_clipper"
)
_LAMB = Missing("of LAMB, which is not among the optimizers of --optim")
LAMB_KEYS = "max_coeff min_coeff coeff_beta factor_max factor_min factor_threshold eps_inside_sqrt"
_ONE_CYCLE = Missing("of OneCycle, which is not among the schedules of --lr_scheduler_type")
ONE_CYCLE_KEYS = (
    "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count "
    "cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate"
)
_RANGE_TEST = Missing("of LRRangeTest, which is not among the schedules of --lr_scheduler_type")
RANGE_TEST_KEYS = "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase"


def _offload_if_on(what: str, note: str = "") -> Flag:
    return Flag("zero_offload", note, lambda value, section: {"zero_offload": what} if value else {})


def _reporter(name: str, note: str = "") -> Flag:
    """Where Trainer reports to, if the section is enabled."""

    def convert(value: Any, section: Section) -> Flags:
        return {"report_to": name} if isinstance(value, dict) and value.get("enabled") else {}

    return Flag("report_to", note, convert, is_added=True)


def _prefetch(value: Any, section: Section) -> Flags:
    """Elements cannot be counted in blocks; none can."""
    return {"zero_prefetch_units": "0"} if value == 0 else {}


def _betas(value: Any, section: Section) -> Flags:
    return {"adam_beta1": str(value[0]), "adam_beta2": str(value[1])}


def _decoupled(value: Any, section: Section) -> Flags:
    if not value:
        raise NoCounterpart(
            "weight decay is decoupled in --optim adamw_torch_fused; set --weight_decay 0, or go on so"
        )
    return {}


def _min_ratio(value: Any, section: Section) -> Flags:
    """Where a cosine ends, as a part of the learning rate."""
    return {"lr_scheduler_kwargs": json.dumps({"min_lr_rate": value})}


def _static_scale(value: Any, section: Section) -> Flags:
    """The value 0 stands for a dynamic scale."""
    if value:
        raise NoCounterpart("the loss scale is always dynamic, and agreed by all ranks")
    return {}


def _torch_autocast(value: Any, section: Section) -> Flags:
    """Autocast in the section's dtype."""
    if not value:
        return {}
    dtype = str(section.get("dtype", "bfloat16")).removeprefix("torch.")
    return {"fp16" if dtype in ("float16", "half", "fp16") else "bf16": "True", "zero_autocast": "True"}


SECTIONS: Sections = {
    # Batches
    "train_batch_size": Always(
        "the product of --per_device_train_batch_size, --gradient_accumulation_steps and the number of processes",
        beside=("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        otherwise="set --per_device_train_batch_size x processes x --gradient_accumulation_steps to this product",
    ),
    "train_micro_batch_size_per_gpu": Flag("per_device_train_batch_size"),
    "gradient_accumulation_steps": Flag("gradient_accumulation_steps"),
    "gradient_clipping": Flag("max_grad_norm", "the exact norm over all ranks; 0, DeepSpeed's default, does not clip"),
    "dataloader_drop_last": switch("dataloader_drop_last"),
    # Precision
    "bf16": {
        "enabled": switch("bf16"),
        "check_grad_overflow": Missing("gradients are not searched for overflow in bf16"),
        "immediate_grad_update": Always("gradients are reduced as soon as a block's backward has ended"),
        **each(
            "bf16_master_weights_and_grads bf16_optimizer_states",
            Missing("load the model in bf16 and leave --bf16 out: pure bf16"),
        ),
    },
    "bfloat16": {"enabled": switch("bf16")},
    "fp16": {
        "enabled": switch("fp16"),
        "auto_cast": Always("inputs are cast by Trainer"),
        "loss_scale": Flag("fp16", "0, dynamic, needs nothing; a fixed one is not built", _static_scale),
        "initial_scale_power": Missing("the loss scale starts where torch's GradScaler does, at 2**16", off=(16,)),
        "loss_scale_window": Missing(
            "the loss scale grows after 2000 good steps, as torch's GradScaler does", off=(2000,)
        ),
        "hysteresis": Missing("the loss scale is halved at each overflow", off=(1,)),
        "consecutive_hysteresis": Missing("the loss scale is halved at each overflow"),
        "min_loss_scale": Missing("the loss scale has no lower bound"),
        "fused_mode": Always("the optimizer of --optim says whether it is fused"),
        "fp16_master_weights_and_grads": Missing("masters are fp32"),
    },
    "torch_autocast": {
        "enabled": Flag("zero_autocast bf16 fp16", "one of the two, by its dtype", _torch_autocast),
        "dtype": Always("comes with torch_autocast.enabled"),
        "lower_precision_safe_modules": Missing("torch's own autocast decides, operation by operation"),
    },
    "communication_data_type": one_of("zero_reduce_dtype", _DTYPES, _SUMMED),
    "data_types": {
        "grad_accum_dtype": one_of(
            "zero_reduce_dtype",
            _DTYPES,
            _SUMMED,
            "gradients are accumulated in the dtype in which they are summed",
        ),
    },
    "seq_parallel_comm_data_type": Missing("sequence parallelism is not built"),
    "amp": Missing("NVIDIA Apex is not used; --bf16 or --fp16"),
    # ZeRO
    "zero_optimization": {
        "stage": Flag("zero_stage", "0 where DeepSpeed's file has none; here the default is 3"),
        "overlap_comm": Always("communication always overlaps computation"),
        "contiguous_gradients": Always("gradients are written into one flat buffer per block"),
        "reduce_scatter": Always("always so from stage 1 on"),
        "use_multi_rank_bucket_allreduce": Always("each rank receives its own range only"),
        "allgather_partitions": Always("always so"),
        "reduce_bucket_size": Always(
            "a block's gradients are reduced together; in pieces of constant size (--zero_bucket_mb)"
        ),
        "allgather_bucket_size": Always(
            "a block's parameters are gathered together; in pieces of constant size (--zero_bucket_mb)"
        ),
        "round_robin_gradients": Always("every rank owns an equal range of every block"),
        "sub_group_size": Always("the optimizer works block by block"),
        "ignore_unused_parameters": Always("parameters without a gradient are expected"),
        "load_from_fp32_weights": Always("masters are saved and loaded in full precision"),
        "elastic_checkpoint": Always("a checkpoint resumes at any number of ranks and any stage"),
        "legacy_stage1": Always("stage 1 has one implementation"),
        "grad_hooks": Always("always so"),
        "compute_grad_norm": Always("the norm is computed where it is needed"),
        "parameter_alignment": Always("parameters begin at multiples of 16 elements"),
        "pipeline_loading_checkpoint": Always("each rank reads its own ranges"),
        "override_module_apply": Always("weights are initialized before the model is sharded"),
        "memory_efficient_linear": Always("the weight gradient of a Linear is written where it is reduced"),
        "log_trace_cache_warnings": Always("the order of the blocks is fixed, nothing is traced"),
        "enable_sanity_checks": Always("phases are always checked"),
        "save_muon_momentum_buffer_in_memory": Always("momentum rests where --zero_offload puts it"),
        "zenflow": Missing("selective updates are not built; --zero_delayed_update is the nearest"),
        # Stage 3
        "stage3_prefetch_bucket_size": Flag(
            "zero_prefetch_units", f"{_UNIT_SIZE}; 0 is 0, anything else the default of one block", _prefetch
        ),
        "stage3_max_live_parameters": Always(
            f"{_UNIT_SIZE}: two blocks are whole at once, and --zero_keep_gathered more"
        ),
        "stage3_max_reuse_distance": Always(
            f"{_UNIT_SIZE}: --zero_keep_gathered keeps blocks from forward to backward"
        ),
        **each(
            "stage3_param_persistence_threshold stage3_model_persistence_threshold",
            Always("small parameters are gathered with their block"),
        ),
        "stage3_gather_16bit_weights_on_model_save": Always(
            "every checkpoint holds the whole model, and no rank gathers it"
        ),
        "stage3_gather_fp16_weights_on_model_save": Always(
            "every checkpoint holds the whole model, and no rank gathers it"
        ),
        "stage3_module_granularity_threshold": Always("what is gathered together is a whole block"),
        "leaf_module": Always("what is gathered together is a whole block, experts included"),
        "stage3_partition_stream_chunk_size": Always("each rank reads its own ranges of the weights"),
        "stage3_use_all_reduce_for_fetch_params": Always("parameters are gathered in place"),
        "stage3_allgather_sequential": Always("blocks are gathered one after the other"),
        "zero_hpz_partition_size": Missing(
            "no second copy per host (ZeRO++); below stage 3 nothing is gathered", off=(1,)
        ),
        "zero_quantized_weights": Missing("values are exchanged as they are (no ZeRO++)"),
        "zero_quantized_nontrainable_weights": Missing(
            "load the frozen base in 4 or 8 bits (bitsandbytes): it is sharded and exchanged so"
        ),
        "zero_quantized_gradients": Missing("no quantized sums; --zero_reduce_dtype bf16 halves them"),
        "zeropp_loco_param": Missing("values are exchanged as they are (no ZeRO++)"),
        "mics_shard_size": Missing("every data-parallel rank holds a range (no MiCS)", off=(-1,)),
        "mics_hierarchical_params_gather": Missing("every data-parallel rank holds a range (no MiCS)"),
        # Offload
        "cpu_offload": _offload_if_on("optimizer"),
        "cpu_offload_param": _offload_if_on("params", "optimizer state too"),
        "cpu_offload_use_pin_memory": Always(_PINNED),
        "offload_optimizer": {
            "device": offload("optimizer"),
            "nvme_path": swap_folder("device", "where the device is nvme; gradients stay in memory"),
            "ratio": Flag("zero_offload_fraction", "in whole blocks"),
            "pin_memory": Always(_PINNED),
            **each("buffer_count fast_init pipeline_read pipeline_write", Always(_DISK)),
            "super_offload": Missing("written for Grace Hopper; not built"),
            "cpuadam_cores_perc": Always("torch's threads: OMP_NUM_THREADS"),
        },
        "offload_param": {
            "device": offload("params", "masters, gradients and optimizer state go too"),
            "nvme_path": swap_folder("device", "where the device is nvme; one folder for parameters and state"),
            "pin_memory": Always(_PINNED),
            **each("buffer_count buffer_size max_in_cpu", Always(_DISK)),
        },
    },
    "aio": Always(_DISK),
    "zero_allow_untested_optimizer": Always("an optimizer that cannot run on shards is refused by name"),
    "zero_force_ds_cpu_optimizer": Always("torch's own optimizer updates on the CPU"),
    # Optimizer and schedule
    "optimizer": {
        "type": one_of(
            "optim", OPTIMIZERS, _OPTIMIZERS, ", ".join(f"{theirs}: {ours}" for theirs, ours in OPTIMIZERS.items())
        ),
        "params": {
            "lr": Flag("learning_rate"),
            "betas": Flag("adam_beta1 adam_beta2", "", _betas),
            "eps": Flag("adam_epsilon"),
            "weight_decay": Flag("weight_decay", _DECAYED, unlike=_DECAYED),
            "adam_w_mode": Flag("optim", "true is what AdamW does", _decoupled),
            "torch_adam": Always("it is torch's"),
            "bias_correction": Always("AdamW corrects the bias"),
            "momentum": Missing("--optim sgd has none; --optim_args momentum=... where transformers has it"),
            "amsgrad": Missing("not among the arguments of --optim"),
            "max_grad_norm": Always("DeepSpeed refuses it; gradients are clipped by gradient_clipping"),
            **each(ONE_BIT_KEYS, _ONE_BIT),
            **each(LAMB_KEYS, _LAMB),
        },
        "legacy_fusion": Missing("no such mode"),
    },
    "scheduler": {
        "type": one_of(
            "lr_scheduler_type",
            SCHEDULERS,
            _SCHEDULES,
            "WarmupLR: constant_with_warmup, WarmupDecayLR: linear, WarmupCosineLR: cosine_with_min_lr",
        ),
        "params": {
            "warmup_num_steps": Flag("warmup_steps", "1000 where DeepSpeed's file has none"),
            "warmup_max_lr": Flag("learning_rate", "it wins over the optimizer's, there and here"),
            **each("warmup_min_lr warmup_min_ratio", Missing("warmup starts at 0")),
            "warmup_type": Missing(
                _LOGARITHMIC,
                off=("linear",),
            ),
            "total_num_steps": Always("the run's own steps: --max_steps, or --num_train_epochs"),
            "cos_min_ratio": Flag("lr_scheduler_kwargs", "0.0001 where DeepSpeed's file has none", _min_ratio),
            "last_batch_iteration": Always("a checkpoint says where the schedule is"),
            **each(ONE_CYCLE_KEYS, _ONE_CYCLE),
            **each(RANGE_TEST_KEYS, _RANGE_TEST),
        },
    },
    # Activations
    "activation_checkpointing": {
        "partition_activations": Missing(
            "for tensor-parallel models: --gradient_checkpointing --zero_partition_activations, refused for others"
        ),
        "cpu_checkpointing": switch("gradient_checkpointing zero_offload_activations"),
        "contiguous_memory_optimization": Always("inputs are kept in one arena"),
        "number_checkpoints": Always("--gradient_checkpointing takes every block"),
        "synchronize_checkpoint_boundary": Missing("for debugging; not built"),
        "profile": Missing("use torch.profiler"),
    },
    # Checkpoints, logs, the rest
    "checkpoint": {
        "tag_validation": Always("all ranks agree before a checkpoint gets its name"),
        "load_universal": Always("a checkpoint resumes at any number of ranks and any stage"),
        "use_node_local_storage": Always("hosts that share no disk are found out by looking"),
        "parallel_write": Always("all ranks write their own ranges of the same files"),
        "writer": Missing("--zero_async_save writes in the background"),
    },
    "steps_per_print": Always("DeepSpeed's own lines; Trainer's log goes by --logging_steps, there and here"),
    "wall_clock_breakdown": Missing("use torch.profiler"),
    "memory_breakdown": Missing("what each rank holds is printed when training starts"),
    "dump_state": Missing("the resolved settings are printed by --dry_run"),
    **each("flops_profiler comms_logger", Missing("use torch.profiler")),
    "tensorboard": _reporter("tensorboard", "folder and name: --run_name"),
    "wandb": _reporter("wandb", "project: --project"),
    "comet": _reporter("comet_ml"),
    "csv_monitor": Missing("the log is in trainer_state.json"),
    "prescale_gradients": Missing("gradients are averaged over the ranks in one way"),
    "gradient_predivide_factor": Missing("gradients are averaged over the ranks in one way", off=(1, 1.0)),
    "sparse_gradients": Missing("gradients are dense"),
    "disable_allgather": Missing("for debugging; not built"),
    "disable_python_gc": Missing("gc.disable() in the script does it"),
    "compile": Missing("--torch_compile compiles each block with torch.compile; DeepCompile is not built"),
    "tensor_parallel": Missing("load the model with tp_plan='auto': ZeRO works on its data-parallel ranks"),
    "pipeline": Missing("pipeline parallelism is not built"),
    "sequence_parallel_size": Missing("sequence parallelism is not built", off=(1,)),
    **each("data_efficiency curriculum_learning", Missing("curriculum and data sampling are the data set's")),
    **each("progressive_layer_drop eigenvalue quantize_training compression_training", Missing("not built")),
    "sparse_attention": Missing("attention is the model's: --attn_implementation where the task has it"),
    "hybrid_engine": Missing("generation is transformers' own"),
    "elasticity": Missing("a run resumes on any number of ranks; batch sizes are yours to set"),
    "autotuning": Missing("`plan` recommends the least sharding that fits"),
    "nebula": Missing("--zero_async_save writes in the background"),
    "use_data_before_expert_parallelism": Missing("experts are sharded as all parameters are"),
    **each("graph_harvesting weight_quantization", Missing("not built")),
}
RULES = flat(SECTIONS)

_WARM = tuple(SCHEDULERS)
# Where no optimizer or scheduler is in the file, Trainer makes its own by its flags, under DeepSpeed too.
DEFAULTS = (
    Default("zero_optimization.stage", 0),
    Default("gradient_clipping", 0),
    Default("fp16.loss_scale_window", 1000, "fp16.enabled", ("true",)),
    Default("fp16.hysteresis", 2, "fp16.enabled", ("true",)),
    Default("optimizer.params.lr", 0.01, "optimizer.type", ("adagrad", "rmsprop")),
    Default("optimizer.params.lr", 0.001, "optimizer.type"),
    Default("optimizer.params.betas", (0.9, 0.99), "optimizer.type", ("lion",)),
    Default("optimizer.params.weight_decay", 0.01, "optimizer.params.torch_adam", ("true",)),
    Default("scheduler.params.warmup_num_steps", 1000, "scheduler.type", _WARM),
    Default("scheduler.params.warmup_max_lr", 0.001, "scheduler.type", ("warmupdecaylr",)),
    Default("scheduler.params.warmup_type", "log", "scheduler.type", _WARM),
    Default("scheduler.params.cos_min_ratio", 0.0001, "scheduler.type", ("warmupcosinelr",)),
)
DEEPSPEED = Dialect("DeepSpeed 0.19", RULES, DEFAULTS, "--deepspeed")
