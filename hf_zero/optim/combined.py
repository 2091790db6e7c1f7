"""Several optimizers as one, and a common pair: Muon for the hidden matrices, AdamW for the rest."""

from collections import defaultdict

import torch
from torch import nn

from hf_zero.engine.partition import vocabulary_module
from hf_zero.errors import ConfigError


class CombinedOptimizer(torch.optim.Optimizer):
    """Steps several optimizers together, each of which has parameters of its own. It works without sharding too.

    Raises:
        `ConfigError`: when two of them have the same parameter.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer):
        params = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        if len({id(p) for p in params}) < len(params):
            raise ConfigError("CombinedOptimizer: a parameter is in two optimizers; give each its own")
        super().__init__(params, {})
        self.optimizers = [
            inner for optimizer in optimizers for inner in getattr(optimizer, "optimizers", [optimizer])
        ]
        self.state: defaultdict[torch.Tensor, dict] = defaultdict(dict)
        for optimizer in optimizers:
            self.state.update(optimizer.state)
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.share()

    def share(self) -> None:
        """Makes the optimizers use the groups and the state of this one."""
        groups = iter(self.param_groups)
        for optimizer in self.optimizers:
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]
            optimizer.state = self.state

    @torch.no_grad()
    def step(self, closure=None):
        """Steps each optimizer once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def add_param_group(self, param_group: dict) -> None:
        """Refuses a group after the optimizer is built, since its optimizer would be unknown."""
        if hasattr(self, "optimizers"):
            raise ConfigError("add_param_group: add the group to one of the optimizers before they are combined")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        self.share()

    def train(self) -> None:
        """Switches the optimizers that know it (schedule-free ones) to training."""
        self._call("train")

    def eval(self) -> None:
        """Switches the optimizers that know it to evaluation."""
        self._call("eval")

    def _call(self, name: str) -> None:
        for optimizer in self.optimizers:
            if callable(getattr(optimizer, name, None)):
                getattr(optimizer, name)()


class MuonWithAdamW:
    """Makes Muon for the hidden matrices of a model and AdamW for embeddings, head, vectors and the rest.

    `ZeroTrainer(..., optimizer_cls_and_kwargs=(MuonWithAdamW, {"lr": 1e-3}))`, or `MuonWithAdamW()(model, lr=1e-3)`.
    """

    def __call__(
        self,
        model: nn.Module,
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        muon: dict | None = None,
        adamw: dict | None = None,
    ) -> CombinedOptimizer:
        """Builds both on the model's trainable parameters.

        Args:
            model (`nn.Module`): the model, whose `get_output_embeddings`, where it has that, names the head.
            lr (`float`): of both. Muon's updates are made as large as AdamW's (Moonlight, arXiv 2502.16982, 2.2).
            weight_decay (`float`): of both, vectors excepted.
            muon (`dict`, *optional*): further or other settings of `torch.optim.Muon`.
            adamw (`dict`, *optional*): further or other settings of `torch.optim.AdamW`.
        """
        outer = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        head = vocabulary_module(model, "get_output_embeddings")
        outer.add(id(getattr(head, "weight", None)))
        params = [p for p in model.parameters() if p.requires_grad]
        hidden = [p for p in params if p.dim() == 2 and id(p) not in outer]
        rest = [p for p in params if p.dim() != 2 or id(p) in outer]
        groups = [
            {"params": [p for p in rest if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
        ]
        settings = {"lr": lr, "weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw", **(muon or {})}
        groups = [group for group in groups if group["params"]]
        optimizers = [torch.optim.Muon(hidden, **settings)] if hidden else []
        optimizers += [torch.optim.AdamW(groups, **{"lr": lr, **(adamw or {})})] if groups else []
        return CombinedOptimizer(*optimizers)
