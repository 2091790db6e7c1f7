"""An exponential moving average of the weights, at every stage. Copy this file into your project."""

from contextlib import contextmanager

import torch
import torch.distributed as dist

import hf_zero


class WeightAverage:
    """An exponential moving average of the trained weights of a sharded model."""

    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.average = self.copy()

    def shards(self):
        trained = {name for name, param in self.model.named_parameters() if param.requires_grad}
        return [shard for shard in hf_zero.ShardedModel(self.model).named_shards() if shard.name in trained]

    def copy(self):
        return {(shard.name, shard.start): shard.tensor.clone() for shard in self.shards()}

    def update(self):  # on all ranks, after each optimizer.step(); communicates nothing
        for shard in self.shards():
            self.average[shard.name, shard.start].lerp_(shard.tensor, 1 - self.decay)

    @contextmanager
    def applied(self):  # on all ranks; evaluate, or call hf_zero.save_pretrained, inside
        own = self.copy()
        self.write(self.average)
        try:
            yield
        finally:
            self.write(own)

    def write(self, shards):  # one whole parameter at a time; load_state_dict writes masters without rounding
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                whole = torch.zeros(param.shape, device=param.device)
                for (owner, start), values in shards.items():
                    if owner == name:
                        whole.view(-1)[start : start + values.numel()] = values
                if dist.is_initialized():
                    dist.all_reduce(whole)
                with hf_zero.gathered(param, writeback=True):
                    self.model.load_state_dict({name: whole}, strict=False)
