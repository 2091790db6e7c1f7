"""The values of `--optim` that hf_zero knows."""

# Those whose optimizers run on shards, see `hf_zero.optim.granularity`.
SUPPORTED_OPTIMS = frozenset(
    "adamw_torch adamw_torch_fused adamw_torch_npu_fused sgd adagrad rmsprop lion_32bit paged_lion_32bit "
    "paged_adamw_32bit rmsprop_bnb rmsprop_bnb_32bit adafactor schedule_free_adamw schedule_free_radam "
    "schedule_free_sgd adamw_torch_8bit adamw_torch_4bit adamw_bnb_8bit adamw_8bit paged_adamw_8bit lion_8bit "
    "paged_lion_8bit rmsprop_bnb_8bit ademamix ademamix_8bit".split()
)
