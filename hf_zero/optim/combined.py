"""Combines several optimizers into one, and provides a common pair: Muon for hidden matrices, AdamW for the rest."""

from collections import defaultdict

import torch
from torch import nn

from hf_zero.engine.partition import vocabulary_module
from hf_zero.errors import ConfigError


class CombinedOptimizer(torch.optim.Optimizer):
    """Steps several optimizers together, each with its own parameters. It also works without sharding.

    Raises:
        `ConfigError`: if two of them have the same parameter.
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
        """Makes the inner optimizers use the groups and the state of this one."""
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
        """Raises [`ConfigError`] once the optimizer is built, because the group could not be assigned to an inner
        optimizer."""
        if hasattr(self, "optimizers"):
            raise ConfigError("add_param_group: add the group to one of the optimizers before they are combined")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        self.share()

    def train(self) -> None:
        """Switches inner optimizers with this method (schedule-free ones) to training mode."""
        self._call("train")

    def eval(self) -> None:
        """Switches inner optimizers with this method to evaluation mode."""
        self._call("eval")

    def _call(self, name: str) -> None:
        for optimizer in self.optimizers:
            if callable(getattr(optimizer, name, None)):
                getattr(optimizer, name)()


class MuonWithAdamW:
    """Creates Muon for the hidden matrices of a model and AdamW for embeddings, head, vectors and the rest.

    Use `ZeroTrainer(..., optimizer_cls_and_kwargs=(MuonWithAdamW, {"lr": 1e-3}))`, or `MuonWithAdamW()(model,
    lr=1e-3)`.
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
        """Builds both optimizers on the trainable parameters of the model.

        Args:
            model (`nn.Module`): the model. Its `get_output_embeddings`, if defined, identifies the head.
            lr (`float`): learning rate of both. Muon's updates are scaled to the size of AdamW's (Moonlight, arXiv
                2502.16982, section 2.2).
            weight_decay (`float`): weight decay of both; vectors are not decayed.
            muon (`dict`, *optional*): further arguments of `torch.optim.Muon`, which take precedence.
            adamw (`dict`, *optional*): further arguments of `torch.optim.AdamW`, which take precedence.
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
