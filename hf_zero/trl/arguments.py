"""The training arguments: those of a TRL config and those of ZeRO."""

from dataclasses import dataclass

from hf_zero.errors import ConfigError
from hf_zero.trainer.arguments import ZeroArgumentsMixin


@dataclass
class ZeroTrlArgumentsMixin(ZeroArgumentsMixin):
    """Adds the settings of `hf_zero.ZeroArgumentsMixin` to a configuration of TRL, before it among the bases."""

    def _take_launchers_precision(self) -> None:
        super()._take_launchers_precision()
        if self.bf16 is None:
            self.bf16: bool = not self.fp16  # TRL's default, which it sets after what depends on it was checked

    def _refuse_unsupported(self) -> None:
        super()._refuse_unsupported()
        if getattr(self, "use_vllm", False):
            raise ConfigError(
                "use_vllm: vLLM would have to be sent the sharded weights, which hf_zero does not do; leave it out: "
                "transformers then generates, with the weights gathered"
            )
        for name in ("use_transformers_continuous_batching", "use_transformers_paged"):
            if getattr(self, name, False):
                raise ConfigError(
                    f"{name}: generates in a thread of its own, of which the engine knows nothing; leave it out"
                )
