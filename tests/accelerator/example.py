"""A script of the usual shape for accelerate: two sentences, one label, BERT. Only the line that makes the accelerator
differs between DDP and ZeRO."""

import torch
from torch.utils.data import DataLoader

from tests.trainer.harness import reset_accelerate


MAX_BATCH_SIZE, EVAL_BATCH_SIZE = 4, 8
CONFIG = {"lr": 1e-2, "num_epochs": 4, "seed": 42, "batch_size": 8}
VOCAB, NUM_ROWS, NUM_EVAL_ROWS = 61, 40, 13


def bert(dropout: float = 0.0):
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCAB,
            hidden_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=52,
            max_position_embeddings=32,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


def rows(count: int, seed: int) -> list[dict]:
    """Pairs of ragged sentences, and whether the first begins with a small number: something to learn."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(5, 20, (), generator=generator))
        tokens = torch.randint(1, VOCAB, (length,), generator=generator).tolist()
        found.append({"input_ids": tokens, "labels": int(tokens[0] < VOCAB // 2)})
    return found


def collate(examples: list[dict]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in examples)
    padded = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in examples]
    tokens = torch.tensor(padded)
    labels = torch.tensor([row["labels"] for row in examples])
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": labels}


def train(accelerator, config: dict = CONFIG, dropout: float = 0.0) -> tuple[list, list, torch.nn.Module]:
    """Trains and evaluates: the losses of this rank, the accuracies, and the prepared model."""
    from transformers import get_linear_schedule_with_warmup, set_seed

    accumulation = config["batch_size"] // MAX_BATCH_SIZE
    set_seed(config["seed"])
    train_loader = DataLoader(
        rows(NUM_ROWS, 0), shuffle=True, collate_fn=collate, batch_size=MAX_BATCH_SIZE, drop_last=True
    )
    eval_loader = DataLoader(rows(NUM_EVAL_ROWS, 1), collate_fn=collate, batch_size=EVAL_BATCH_SIZE)
    model = bert(dropout).to(accelerator.device)
    # see the note on eps in tests/trainer/harness.py
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=config["lr"], eps=1e-4)
    scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=4, num_training_steps=len(train_loader) * config["num_epochs"] // accumulation
    )
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    losses, accuracies = [], []
    for _ in range(config["num_epochs"]):
        model.train()
        for step, batch in enumerate(train_loader):
            outputs = model(**batch)
            loss = outputs.loss
            losses.append(loss.item())
            accelerator.backward(loss / accumulation)
            if step % accumulation == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        seen, right = 0, 0
        for batch in eval_loader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
            seen, right = seen + len(references), right + int((predictions == references).sum())
        accuracies.append((right, seen))
    return losses, accuracies, model


def with_ddp(**settings):
    from accelerate import Accelerator

    reset_accelerate()
    return Accelerator(cpu=True, **settings)


def with_zero(stage: int = 3, **settings):
    from hf_zero import ZeroAccelerator

    reset_accelerate()
    return ZeroAccelerator(zero_stage=stage, cpu=True, **settings)
