"""A script of the usual shape for accelerate: two sentences, one label, BERT. Only the line that makes the accelerator
differs between DDP and ZeRO."""

import torch
from torch.utils.data import DataLoader

from tests.trainer.harness import reset_accelerate


VOCAB, NUM_ROWS, NUM_EVAL_ROWS = 61, 40, 13
STEPS = 5  # of an epoch on two ranks


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


class Counter:
    """An object that the script registers: the number of its steps."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def train(accelerator, folder=None, *, dropout=0.0, save_at=None, go_on_at=None, num_steps=2 * STEPS):
    """Trains, or goes on where a checkpoint was saved, and evaluates.

    Returns:
        The losses of this rank by step, the numbers of right answers and of rows, the last rates, and the model.
    """
    from transformers import get_linear_schedule_with_warmup, set_seed

    set_seed(42)
    loader = DataLoader(rows(NUM_ROWS, 0), shuffle=True, collate_fn=collate, batch_size=4)
    eval_loader = DataLoader(rows(NUM_EVAL_ROWS, 1), collate_fn=collate, batch_size=8)
    model = bert(dropout).to(accelerator.device)
    # see the note on eps in tests/trainer/harness.py
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-2, eps=1e-4)
    schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=8 * STEPS)
    model, optimizer, loader, eval_loader, schedule = accelerator.prepare(
        model, optimizer, loader, eval_loader, schedule
    )
    counter, losses = Counter(), {}
    accelerator.register_for_checkpointing(counter)
    if go_on_at is not None:
        accelerator.load_state(folder)
        assert counter.count == go_on_at
    model.train()
    while counter.count < num_steps:
        epoch, done = divmod(counter.count, len(loader))
        loader.set_epoch(epoch)
        for batch in accelerator.skip_first_batches(loader, done) if done else loader:
            if counter.count == num_steps:
                break
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses[counter.count] = loss.item()
            counter.count += 1
            if counter.count == save_at:
                accelerator.save_state(folder)
    model.eval()
    seen, right = 0, 0
    for batch in eval_loader:
        with torch.no_grad():
            outputs = model(**batch)
        predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
        seen, right = seen + len(references), right + int((predictions == references).sum())
    return losses, (right, seen), schedule.get_last_lr(), model


def with_ddp(**settings):
    from accelerate import Accelerator

    reset_accelerate()
    return Accelerator(cpu=True, **settings)


def with_zero(stage: int = 3, **settings):
    from hf_zero import ZeroAccelerator

    reset_accelerate()
    return ZeroAccelerator(zero_stage=stage, cpu=True, **settings)
