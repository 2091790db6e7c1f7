"""How many floating-point operations training takes, and how many a device could do."""

from torch import nn


# Dense bf16 (without sparsity) in TFLOP/s, from the vendors' data sheets. The first name that is part of the device's
# name counts, so longer names come before the shorter ones that they contain.
PEAK_TFLOPS = {
    "B200": 2250,
    "GH200": 989,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "H20": 148,
    "A100": 312,
    "A800": 312,
    "A40": 150,
    "A30": 165,
    "A10G": 70,
    "A10": 125,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX 4090": 165,
    "RTX A6000": 155,
    "RTX 3090": 71,
    "MI325X": 1307,
    "MI300X": 1307,
    "MI250X": 191.5,  # of each of its two dies, which are devices of their own
}
# What configurations call the number of experts.
NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 operations per second.

    Args:
        device_name (`str`): As the driver gives it, such as "NVIDIA H100 80GB HBM3".

    Returns:
        `float` or `None`: Of one device; `None` for one that is not in the table.
    """
    words = device_name.replace("-", " ").split()
    for name, teraflops in PEAK_TFLOPS.items():
        parts = name.split()
        if any(words[at : at + len(parts)] == parts for at in range(len(words))):
            return teraflops * 1e12
    return None


def training_flops(model: nn.Module, num_tokens: float, num_rows: float) -> float:
    """Operations that forward and backward need for some tokens, as a model's utilization is counted.

    6 for each parameter that a token is multiplied by, 2 of them for its weight gradient where it has one, and
    12 * layers * width of the heads * tokens in a row for attention (PaLM, arXiv:2204.02311, appendix B). What is
    computed twice because activations are not kept does not count. Of a mixture's experts those count that a token
    goes through. An input embedding is looked up, not multiplied by.

    Args:
        model (`nn.Module`): Whole or sharded: its parameters keep their shapes.
        num_tokens (`float`): In all.
        num_rows (`float`): Over how many rows they are divided.
    """
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    looked_up = _looked_up(model)
    share = _expert_share(config)
    per_token = 0.0
    for name, param in model.named_parameters():
        if param is not looked_up:
            numel = param.numel() * (2 if type(param).__name__ == "Params4bit" else 1)  # two of them in a byte
            used = numel * (share if ".experts." in f".{name}" else 1.0)
            per_token += used * (6 if param.requires_grad else 4)
    row_length = num_tokens / num_rows if num_rows else 0.0
    return num_tokens * (per_token + 12 * _attention_width(config) * row_length)


def _looked_up(model: nn.Module) -> nn.Parameter | None:
    """The input embedding, unless it is the output's too."""
    embedding = getattr(_of(model, "get_input_embeddings"), "weight", None)
    return None if embedding is getattr(_of(model, "get_output_embeddings"), "weight", None) else embedding


def _of(model: nn.Module, getter: str) -> nn.Module | None:
    try:
        return getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None  # images have none


def _expert_share(config: object) -> float:
    total = next((getattr(config, name) for name in NUM_EXPERTS if getattr(config, name, None)), None)
    used = getattr(config, "num_experts_per_tok", None)
    return used / total if total and used else 1.0


def _attention_width(config: object) -> int:
    """The heads' width, over all layers."""
    layers, heads = getattr(config, "num_hidden_layers", 0), getattr(config, "num_attention_heads", 0)
    if not isinstance(layers, int) or not isinstance(heads, int) or not heads:
        return 0
    head_dim = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    return layers * heads * head_dim
