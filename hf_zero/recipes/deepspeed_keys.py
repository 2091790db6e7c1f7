"""What each key of a DeepSpeed configuration is here: one table, for `migrate` and for docs/deepspeed.md.

The keys are those of DeepSpeed 0.19 (runtime/config.py, runtime/zero/config.py, runtime/precision_config.py).
"""

from hf_zero.recipes.migrate_rules import (
    Always,
    Default,
    Dialect,
    Flag,
    Missing,
    Rule,
    betas,
    decoupled,
    min_ratio,
    offload,
    one_of,
    prefetch,
    reporter,
    set_if_on,
    static_scale,
    swap_folder,
    switch,
    torch_autocast,
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

_SUM_DTYPE = one_of("zero_reduce_dtype", _DTYPES, "gradients are summed in fp32 or bf16")
_UNIT_SIZE = "counted in elements there, in whole blocks here"
_DISK = "set by itself: direct I/O in pieces, from threads of its own"
_PINNED = "host memory is page-locked wherever a device copies from it"
_DECAYED = "biases and norms do not decay here; DeepSpeed decays all parameters"
_ONE_BIT = Missing("of the 1-bit optimizers: gradients are exchanged as they are")
ONE_BIT_KEYS = (
    "freeze_step cuda_aware comm_backend_name var_freeze_step var_update_scaler local_step_scaler local_step_clipper"
).split()
_LAMB = Missing("of LAMB, which is not among the optimizers of --optim")
LAMB_KEYS = "max_coeff min_coeff coeff_beta factor_max factor_min factor_threshold eps_inside_sqrt".split()
_ONE_CYCLE = Missing("of OneCycle, which is not among the schedules of --lr_scheduler_type")
ONE_CYCLE_KEYS = (
    "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count "
    "cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate"
).split()
_RANGE_TEST = Missing("of LRRangeTest, which is not among the schedules of --lr_scheduler_type")
RANGE_TEST_KEYS = (
    "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase"
).split()

RULES: dict[str, Rule] = {
    # Batches
    "train_batch_size": Always(
        "the product of --per_device_train_batch_size, --gradient_accumulation_steps and the number of processes",
        beside=("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        otherwise="set --per_device_train_batch_size x processes x --gradient_accumulation_steps to this product",
    ),
    "train_micro_batch_size_per_gpu": Flag(("per_device_train_batch_size",)),
    "gradient_accumulation_steps": Flag(("gradient_accumulation_steps",)),
    "gradient_clipping": Flag(
        ("max_grad_norm",), "the exact norm over all ranks; 0, DeepSpeed's default, does not clip"
    ),
    "dataloader_drop_last": Flag(("dataloader_drop_last",), convert=switch("dataloader_drop_last")),
    # Precision
    "bf16.enabled": Flag(("bf16",), convert=switch("bf16")),
    "bfloat16.enabled": Flag(("bf16",), convert=switch("bf16")),
    "bf16.check_grad_overflow": Missing("gradients are not searched for overflow in bf16"),
    "bf16.immediate_grad_update": Always("gradients are reduced as soon as a block's backward has ended"),
    "bf16.bf16_master_weights_and_grads": Missing("load the model in bf16 and leave --bf16 out: pure bf16"),
    "bf16.bf16_optimizer_states": Missing("load the model in bf16 and leave --bf16 out: pure bf16"),
    "fp16.enabled": Flag(("fp16",), convert=switch("fp16")),
    "fp16.auto_cast": Always("inputs are cast by Trainer"),
    "fp16.loss_scale": Flag(("fp16",), "0, dynamic, needs nothing; a fixed one is not built", static_scale),
    "fp16.initial_scale_power": Missing("the loss scale starts where torch's GradScaler does, at 2**16", off=(16,)),
    "fp16.loss_scale_window": Missing(
        "the loss scale grows after 2000 good steps, as torch's GradScaler does", off=(2000,)
    ),
    "fp16.hysteresis": Missing("the loss scale is halved at each overflow", off=(1,)),
    "fp16.consecutive_hysteresis": Missing("the loss scale is halved at each overflow"),
    "fp16.min_loss_scale": Missing("the loss scale has no lower bound"),
    "fp16.fused_mode": Always("the optimizer of --optim says whether it is fused"),
    "fp16.fp16_master_weights_and_grads": Missing("masters are fp32"),
    "torch_autocast.enabled": Flag(
        ("zero_autocast", "bf16", "fp16"), "one of the two, by its dtype", convert=torch_autocast
    ),
    "torch_autocast.dtype": Always("comes with torch_autocast.enabled"),
    "torch_autocast.lower_precision_safe_modules": Missing("torch's own autocast decides, operation by operation"),
    "communication_data_type": Flag(("zero_reduce_dtype",), convert=_SUM_DTYPE),
    "data_types.grad_accum_dtype": Flag(
        ("zero_reduce_dtype",), "gradients are accumulated in the dtype in which they are summed", _SUM_DTYPE
    ),
    "seq_parallel_comm_data_type": Missing("sequence parallelism is not built"),
    "amp": Missing("NVIDIA Apex is not used; --bf16 or --fp16"),
    # ZeRO
    "zero_optimization.stage": Flag(("zero_stage",), "0 where DeepSpeed's file has none; here the default is 3"),
    "zero_optimization.overlap_comm": Always("communication always overlaps computation"),
    "zero_optimization.contiguous_gradients": Always("gradients are written into one flat buffer per block"),
    "zero_optimization.reduce_scatter": Always("always so from stage 1 on"),
    "zero_optimization.use_multi_rank_bucket_allreduce": Always("each rank receives its own range only"),
    "zero_optimization.allgather_partitions": Always("always so"),
    "zero_optimization.reduce_bucket_size": Always(
        "a block's gradients are reduced together; pieces are sized by bandwidth (--zero_bucket_mb auto)"
    ),
    "zero_optimization.allgather_bucket_size": Always(
        "a block's parameters are gathered together; pieces are sized by bandwidth (--zero_bucket_mb auto)"
    ),
    "zero_optimization.round_robin_gradients": Always("every rank owns an equal range of every block"),
    "zero_optimization.sub_group_size": Always("the optimizer works block by block"),
    "zero_optimization.ignore_unused_parameters": Always("parameters without a gradient are expected"),
    "zero_optimization.load_from_fp32_weights": Always("masters are saved and loaded in full precision"),
    "zero_optimization.elastic_checkpoint": Always("a checkpoint resumes at any number of ranks and any stage"),
    "zero_optimization.legacy_stage1": Always("stage 1 has one implementation"),
    "zero_optimization.grad_hooks": Always("always so"),
    "zero_optimization.compute_grad_norm": Always("the norm is computed where it is needed"),
    "zero_optimization.parameter_alignment": Always("parameters begin at multiples of 16 elements"),
    "zero_optimization.pipeline_loading_checkpoint": Always("each rank reads its own ranges"),
    "zero_optimization.override_module_apply": Always("weights are initialized before the model is sharded"),
    "zero_optimization.memory_efficient_linear": Always(
        "the weight gradient of a Linear is written where it is reduced"
    ),
    "zero_optimization.log_trace_cache_warnings": Always("the order of the blocks is fixed, nothing is traced"),
    "zero_optimization.enable_sanity_checks": Always("phases are always checked"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": Always("momentum rests where --zero_offload puts it"),
    "zero_optimization.zenflow": Missing("selective updates are not built; --zero_delayed_update is the nearest"),
    # Stage 3
    "zero_optimization.stage3_prefetch_bucket_size": Flag(
        ("zero_prefetch_units",), f"{_UNIT_SIZE}; 0 is 0, anything else the default of one block", prefetch
    ),
    "zero_optimization.stage3_max_live_parameters": Always(
        f"{_UNIT_SIZE}: two blocks are whole at once, and --zero_keep_gathered more"
    ),
    "zero_optimization.stage3_max_reuse_distance": Always(
        f"{_UNIT_SIZE}: --zero_keep_gathered keeps blocks from forward to backward"
    ),
    "zero_optimization.stage3_param_persistence_threshold": Always("small parameters are gathered with their block"),
    "zero_optimization.stage3_model_persistence_threshold": Always("small parameters are gathered with their block"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": Always(
        "every checkpoint holds the whole model, and no rank gathers it"
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": Always(
        "every checkpoint holds the whole model, and no rank gathers it"
    ),
    "zero_optimization.stage3_module_granularity_threshold": Always("what is gathered together is a whole block"),
    "zero_optimization.leaf_module": Always("what is gathered together is a whole block, experts included"),
    "zero_optimization.stage3_partition_stream_chunk_size": Always("each rank reads its own ranges of the weights"),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": Always("parameters are gathered in place"),
    "zero_optimization.stage3_allgather_sequential": Always("blocks are gathered one after the other"),
    "zero_optimization.zero_hpz_partition_size": Missing(
        "no second copy per host (ZeRO++); below stage 3 nothing is gathered", off=(1,)
    ),
    "zero_optimization.zero_quantized_weights": Missing("values are exchanged as they are (no ZeRO++)"),
    "zero_optimization.zero_quantized_nontrainable_weights": Missing(
        "load the frozen base in 4 or 8 bits (bitsandbytes): it is sharded and exchanged so"
    ),
    "zero_optimization.zero_quantized_gradients": Missing("no quantized sums; --zero_reduce_dtype bf16 halves them"),
    "zero_optimization.zeropp_loco_param": Missing("values are exchanged as they are (no ZeRO++)"),
    "zero_optimization.mics_shard_size": Missing("every data-parallel rank holds a range (no MiCS)", off=(-1,)),
    "zero_optimization.mics_hierarchical_params_gather": Missing("every data-parallel rank holds a range (no MiCS)"),
    # Offload
    "zero_optimization.cpu_offload": Flag(("zero_offload",), convert=set_if_on("zero_offload", "optimizer")),
    "zero_optimization.cpu_offload_param": Flag(
        ("zero_offload",), "optimizer state too", set_if_on("zero_offload", "params")
    ),
    "zero_optimization.cpu_offload_use_pin_memory": Always(_PINNED),
    "zero_optimization.offload_optimizer.device": Flag(("zero_offload",), convert=offload("optimizer")),
    "zero_optimization.offload_optimizer.nvme_path": Flag(
        ("zero_offload_dir",), "where the device is nvme; gradients stay in memory", swap_folder("device")
    ),
    "zero_optimization.offload_optimizer.ratio": Flag(("zero_offload_fraction",), "in whole blocks"),
    "zero_optimization.offload_optimizer.pin_memory": Always(_PINNED),
    "zero_optimization.offload_optimizer.buffer_count": Always(_DISK),
    "zero_optimization.offload_optimizer.fast_init": Always(_DISK),
    "zero_optimization.offload_optimizer.pipeline_read": Always(_DISK),
    "zero_optimization.offload_optimizer.pipeline_write": Always(_DISK),
    "zero_optimization.offload_optimizer.super_offload": Missing("written for Grace Hopper; not built"),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": Always("torch's threads: OMP_NUM_THREADS"),
    "zero_optimization.offload_param.device": Flag(
        ("zero_offload",), "masters, gradients and optimizer state go too", offload("params")
    ),
    "zero_optimization.offload_param.nvme_path": Flag(
        ("zero_offload_dir",), "where the device is nvme; one folder for parameters and state", swap_folder("device")
    ),
    "zero_optimization.offload_param.pin_memory": Always(_PINNED),
    "zero_optimization.offload_param.buffer_count": Always(_DISK),
    "zero_optimization.offload_param.buffer_size": Always(_DISK),
    "zero_optimization.offload_param.max_in_cpu": Always(_DISK),
    "aio": Always(_DISK),
    "zero_allow_untested_optimizer": Always("an optimizer that cannot run on shards is refused by name"),
    "zero_force_ds_cpu_optimizer": Always("torch's own optimizer updates on the CPU"),
    # Optimizer and schedule
    "optimizer.type": Flag(
        ("optim",),
        ", ".join(f"{theirs}: {ours}" for theirs, ours in OPTIMIZERS.items()),
        one_of("optim", OPTIMIZERS, "not among the optimizers of --optim; see `Optimizers` of docs/training.md"),
    ),
    "optimizer.params.lr": Flag(("learning_rate",)),
    "optimizer.params.betas": Flag(("adam_beta1", "adam_beta2"), convert=betas),
    "optimizer.params.eps": Flag(("adam_epsilon",)),
    "optimizer.params.weight_decay": Flag(("weight_decay",), _DECAYED, unlike=_DECAYED),
    "optimizer.params.adam_w_mode": Flag(("optim",), "true is what AdamW does", decoupled),
    "optimizer.params.torch_adam": Always("it is torch's"),
    "optimizer.params.bias_correction": Always("AdamW corrects the bias"),
    "optimizer.params.momentum": Missing("--optim sgd has none; --optim_args momentum=... where transformers has it"),
    "optimizer.params.amsgrad": Missing("not among the arguments of --optim"),
    "optimizer.params.max_grad_norm": Always("DeepSpeed refuses it; gradients are clipped by gradient_clipping"),
    **{f"optimizer.params.{name}": _ONE_BIT for name in ONE_BIT_KEYS},
    **{f"optimizer.params.{name}": _LAMB for name in LAMB_KEYS},
    "optimizer.legacy_fusion": Missing("no such mode"),
    "scheduler.type": Flag(
        ("lr_scheduler_type",),
        "WarmupLR: constant_with_warmup, WarmupDecayLR: linear, WarmupCosineLR: cosine_with_min_lr",
        one_of(
            "lr_scheduler_type",
            SCHEDULERS,
            "not among the schedules of --lr_scheduler_type; give Trainer an object of that class (optimizers=...)",
        ),
    ),
    "scheduler.params.warmup_num_steps": Flag(("warmup_steps",), "1000 where DeepSpeed's file has none"),
    "scheduler.params.warmup_max_lr": Flag(("learning_rate",), "it wins over the optimizer's, there and here"),
    "scheduler.params.warmup_min_lr": Missing("warmup starts at 0"),
    "scheduler.params.warmup_min_ratio": Missing("warmup starts at 0"),
    "scheduler.params.warmup_type": Missing(
        "warmup is linear here, and slower at first; DeepSpeed's is logarithmic unless its file says linear",
        off=("linear",),
    ),
    "scheduler.params.total_num_steps": Always("the run's own steps: --max_steps, or --num_train_epochs"),
    "scheduler.params.cos_min_ratio": Flag(
        ("lr_scheduler_kwargs",), "0.0001 where DeepSpeed's file has none", min_ratio
    ),
    "scheduler.params.last_batch_iteration": Always("a checkpoint says where the schedule is"),
    **{f"scheduler.params.{name}": _ONE_CYCLE for name in ONE_CYCLE_KEYS},
    **{f"scheduler.params.{name}": _RANGE_TEST for name in RANGE_TEST_KEYS},
    # Activations
    "activation_checkpointing.partition_activations": Missing(
        "for tensor-parallel models: --gradient_checkpointing --zero_partition_activations, refused for others"
    ),
    "activation_checkpointing.cpu_checkpointing": Flag(
        ("gradient_checkpointing", "zero_offload_activations"),
        convert=switch("gradient_checkpointing", "zero_offload_activations"),
    ),
    "activation_checkpointing.contiguous_memory_optimization": Always("inputs are kept in one arena"),
    "activation_checkpointing.number_checkpoints": Always("--gradient_checkpointing takes every block"),
    "activation_checkpointing.synchronize_checkpoint_boundary": Missing("for debugging; not built"),
    "activation_checkpointing.profile": Missing("use torch.profiler"),
    # Checkpoints, logs, the rest
    "checkpoint.tag_validation": Always("all ranks agree before a checkpoint gets its name"),
    "checkpoint.load_universal": Always("a checkpoint resumes at any number of ranks and any stage"),
    "checkpoint.use_node_local_storage": Always("hosts that share no disk are found out by looking"),
    "checkpoint.parallel_write": Always("all ranks write their own ranges of the same files"),
    "checkpoint.writer": Missing("--zero_async_save writes in the background"),
    "steps_per_print": Always("DeepSpeed's own lines; Trainer's log goes by --logging_steps, there and here"),
    "wall_clock_breakdown": Missing("use torch.profiler"),
    "memory_breakdown": Missing("what each rank holds is printed when training starts"),
    "dump_state": Missing("the resolved settings are printed by --dry_run"),
    "flops_profiler": Missing("use torch.profiler"),
    "comms_logger": Missing("use torch.profiler"),
    "tensorboard": Flag(("report_to",), "folder and name: --run_name", reporter("tensorboard"), is_added=True),
    "wandb": Flag(("report_to",), "project: --project", reporter("wandb"), is_added=True),
    "comet": Flag(("report_to",), "", reporter("comet_ml"), is_added=True),
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
    "data_efficiency": Missing("curriculum and data sampling are the data set's"),
    "curriculum_learning": Missing("curriculum and data sampling are the data set's"),
    "progressive_layer_drop": Missing("not built"),
    "eigenvalue": Missing("not built"),
    "quantize_training": Missing("not built"),
    "compression_training": Missing("not built"),
    "sparse_attention": Missing("attention is the model's: --attn_implementation where the task has it"),
    "hybrid_engine": Missing("generation is transformers' own"),
    "elasticity": Missing("a run resumes on any number of ranks; batch sizes are yours to set"),
    "autotuning": Missing("`plan` recommends the least sharding that fits"),
    "nebula": Missing("--zero_async_save writes in the background"),
    "use_data_before_expert_parallelism": Missing("experts are sharded as all parameters are"),
    "graph_harvesting": Missing("not built"),
    "weight_quantization": Missing("not built"),
}


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
