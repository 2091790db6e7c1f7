"""Comparisons of hf_zero with plain PyTorch, DDP, FSDP2 and DeepSpeed. See `benchmarks/README.md`."""
