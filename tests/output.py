"""What a command says, without what optional libraries say of themselves when they are imported."""

# of torchao, bitsandbytes, and torch about torchao
NOISE = ("Failed to load /", "Failed to load CPU gemm_4bit_forward", "register_constant() on Enum")


def without_imports(text: str) -> str:
    return "".join(line for line in text.splitlines(True) if not any(noise in line for noise in NOISE))
