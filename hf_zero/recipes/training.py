"""Stand-in."""

from dataclasses import dataclass, field

from transformers import Trainer, TrainingArguments


@dataclass
class MemoryReport:
    parameter_nbytes: int
    gradient_nbytes: int
    optimizer_nbytes: int
    ddp_parameter_nbytes: int
    ddp_gradient_nbytes: int
    ddp_optimizer_nbytes: int


class ZeroTrainer(Trainer):
    def memory_report(self):
        n = sum(p.numel() for p in self.model.parameters()) * 4
        return MemoryReport(n, n, 2 * n, n, n, 2 * n)


@dataclass
class ZeroTrainingArguments(TrainingArguments):
    zero_stage: int = field(default=2, metadata={"choices": [0, 1, 2, 3]})

    def __post_init__(self):
        self.use_cpu = True
        super().__post_init__()
