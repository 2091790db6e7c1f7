"""What each key of accelerate's configuration file is here: one table, for `migrate` and for docs/fsdp.md.

The keys are those that `accelerate config` of accelerate 1.15 writes (commands/config/cluster.py).
"""

from typing import Any

from hf_zero.recipes.deepspeed_keys import RULES as DEEPSPEED_RULES
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


# In a file of accelerate's, the name of DeepSpeed's own file, whose keys then count.
DEEPSPEED_FILE = "deepspeed_config.deepspeed_config_file"
# The sections of which accelerate reads the one that `distributed_type` names.
ENGINE_SECTIONS = {"DEEPSPEED": "deepspeed_config", "FSDP": "fsdp_config", "MEGATRON_LM": "megatron_lm_config"}
# torch's numbers and, for FSDP 2, whether parameters are resharded, stand for strategies too.
STRATEGIES = {
    **dict.fromkeys(("full_shard", "1", "true"), "3"),
    **dict.fromkeys(("shard_grad_op", "2", "false"), "2"),
    **dict.fromkeys(("no_shard", "3"), "0"),
}
_BLOCKS = "the repeated blocks of the model are the units"
_OWN_RANGES = "each rank reads its own ranges of the weights"
_WHOLE = "every checkpoint holds the whole model, and no rank gathers it"


def _precision(value: Any, section: Section) -> Flags:
    if value not in ("bf16", "fp16", "no", False):
        raise NoCounterpart("--bf16 or --fp16")
    return {value: "True"} if value in ("bf16", "fp16") else {}


def _stage_of(value: Any, section: Section) -> Flags:
    """Without DeepSpeed and FSDP it is plain data parallelism; the stage of these stands in their sections."""
    kind = str(value).upper()
    if kind in ("DEEPSPEED", "FSDP"):
        return {}
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise NoCounterpart("data parallelism with ZeRO is all there is")
    return {"zero_stage": "0"}


def _offload_of_fsdp(value: Any, section: Section) -> Flags:
    """Parameters are offloaded where they are sharded; otherwise what is sharded is."""
    strategy = section.get("fsdp_reshard_after_forward", section.get("fsdp_sharding_strategy", True))
    stage = STRATEGIES.get(str(strategy).lower())
    return {"zero_offload": "params" if stage == "3" else "optimizer"} if value else {}


def _clipping(value: Any, section: Section) -> Flags:
    return {"max_grad_norm": str(value)} if str(value).lower() != "none" else {}


def _prefetch(value: Any, section: Section) -> Flags:
    return {"zero_prefetch_units": "0"} if value == "NO_PREFETCH" else {}


def _compile(value: Any, section: Section) -> Flags:
    return {"torch_compile": "True", "torch_compile_backend": str(value).lower()} if value != "NO" else {}


def _strategy(note: str) -> Flag:
    return one_of("zero_stage", STRATEGIES, "every data-parallel rank holds a range (no hybrid sharding)", note)


SECTIONS: Sections = {
    "compute_environment": Missing("a machine of one's own is all that is known", off=("LOCAL_MACHINE",)),
    "distributed_type": Flag("zero_stage", "0 for plain data parallelism; else its section says it", _stage_of),
    "mixed_precision": Flag("bf16 fp16", "gradients are summed in fp32", _precision),
    "use_cpu": switch("use_cpu"),
    "num_processes": Always("the launcher's: --num_processes of hf-zero, --nproc_per_node of torchrun"),
    **each(
        "num_machines machine_rank main_process_ip main_process_port rdzv_backend same_network main_training_function",
        Always("torchrun's: --nnodes, --nproc_per_node, --node_rank, --rdzv_endpoint"),
    ),
    "gpu_ids": Missing("CUDA_VISIBLE_DEVICES says it", off=("all",)),
    "debug": Missing("TORCH_DISTRIBUTED_DEBUG=DETAIL checks torch's own collectives"),
    "enable_cpu_affinity": Missing("numactl or taskset does it"),
    "downcast_bf16": Missing("for TPUs", off=("no",)),
    **each(
        "tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env command_file commands",
        Missing("TPUs are not supported"),
    ),
    "dynamo_config": {
        "dynamo_backend": Flag("torch_compile torch_compile_backend", "block by block", _compile),
        "dynamo_mode": Flag("torch_compile_mode"),
        "dynamo_use_dynamic": Missing("no flag of Trainer's"),
        "dynamo_use_fullgraph": Missing("no flag of Trainer's"),
        "dynamo_use_regional_compilation": Always("each block is compiled by itself"),
    },
    # DeepSpeed
    "deepspeed_config": {
        "deepspeed_config_file": Always("its keys are read too"),
        "zero_stage": Flag("zero_stage", "2 where accelerate's file has none; here the default is 3"),
        "gradient_accumulation_steps": DEEPSPEED_RULES["gradient_accumulation_steps"],
        "gradient_clipping": Flag("max_grad_norm", "where there is none, Trainer's own decides", _clipping),
        "offload_optimizer_device": offload("optimizer"),
        "offload_optimizer_nvme_path": swap_folder("offload_optimizer_device", "where the device is nvme"),
        "offload_param_device": offload("params", "masters, gradients and optimizer state go too"),
        "offload_param_nvme_path": swap_folder("offload_param_device", "where the device is nvme"),
        "zero3_init_flag": Always(_OWN_RANGES),
        "zero3_save_16bit_model": Always(_WHOLE),
        "deepspeed_moe_layer_cls_names": Always(_BLOCKS),
        **each(
            "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter",
            Always("torchrun is started on each host"),
        ),
    },
    # FSDP
    "fsdp_config": {
        "fsdp_version": Always("stages are the same for both"),
        "fsdp_sharding_strategy": _strategy("FULL_SHARD: 3, SHARD_GRAD_OP: 2, NO_SHARD: 0"),
        "fsdp_reshard_after_forward": _strategy("true or FULL_SHARD: 3, false or SHARD_GRAD_OP: 2, NO_SHARD: 0"),
        "fsdp_offload_params": Flag("zero_offload", "at stage 2 optimizer state and gradients", _offload_of_fsdp),
        "fsdp_activation_checkpointing": switch("gradient_checkpointing"),
        "fsdp_activation_checkpointing_offload": switch("zero_offload_activations"),
        "fsdp_backward_prefetch": Flag("zero_prefetch_units", "0 for NO_PREFETCH", _prefetch),
        "fsdp_forward_prefetch": Always("--zero_prefetch_units, 1 by default, holds for both"),
        "fsdp_auto_wrap_policy": Always(_BLOCKS),
        "fsdp_transformer_layer_cls_to_wrap": Always(_BLOCKS),
        "fsdp_min_num_params": Always(_BLOCKS),
        "fsdp_state_dict_type": Always(_WHOLE),
        "fsdp_use_orig_params": Always("parameters keep their identity"),
        "fsdp_cpu_ram_efficient_loading": Always(_OWN_RANGES),
        "fsdp_sync_module_states": Always(_OWN_RANGES),
    },
    # Other programs
    "fp8_config": Missing("fp8 is not built"),
    "megatron_lm_config": Missing("tensor and pipeline parallelism of Megatron-LM are not built"),
    "mpirun_config": Missing("torchrun starts the ranks"),
    "parallelism_config": Missing("load the model with tp_plan='auto': ZeRO works on its data-parallel ranks"),
}
RULES = flat(SECTIONS)

DEFAULTS = (
    Default("deepspeed_config.zero_stage", 2, "distributed_type", ("deepspeed",)),
    Default(
        "fsdp_config.fsdp_reshard_after_forward",
        "FULL_SHARD",
        "distributed_type",
        ("fsdp",),
        unless="fsdp_config.fsdp_sharding_strategy",
    ),
)
ACCELERATE = Dialect("accelerate 1.15", RULES, DEFAULTS, "--config_file of accelerate launch")


def is_accelerate(config: Section) -> bool:
    """Whether it is a file of accelerate's, and not one of DeepSpeed's."""
    return not config.keys().isdisjoint(("distributed_type", "compute_environment", "fsdp_config", "deepspeed_config"))
