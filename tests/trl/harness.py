"""One way to make TRL's trainers: as they are, under DDP, and with ZeRO at any stage; with tiny models and data."""

import random
from importlib import import_module

import torch
from torch import nn

import hf_zero
import hf_zero.trl
from tests import models
from tests.trainer.harness import PLAIN, SETTINGS, Run, record, reset_accelerate, seed_everything


KINDS = (1, 2, 3, PLAIN)
# bf16 off: it is TRL's default, and rounds; dropout is off in all models of the tests.
OWN_SETTINGS = {**SETTINGS, "max_steps": 3, "bf16": False, "report_to": [], "dataset_num_proc": None}
WORDS = [f"w{number}" for number in range(models.VOCAB - 6)]
CHAT = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}[A] {% generation %}{{ message['content'] }} "
    "[EOS] {% endgeneration %}{% else %}[U] {{ message['content'] }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[A] {% endif %}"
)


def tokenizer():
    """Words w0, w1, ... and as many tokens as the models of `tests.models` have."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    vocabulary = ["[PAD]", "[BOS]", "[EOS]", "[UNK]", "[A]", "[U]", *WORDS]
    words = Tokenizer(kinds.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    made = PreTrainedTokenizerFast(tokenizer_object=words, additional_special_tokens=["[A]", "[U]"], **special)
    made.chat_template = CHAT
    return made


def save_models(folder) -> None:
    """Writes what trainers load by name: `policy` and `teacher`, causal models, and `reward`, a classifier with one
    label."""
    from transformers import LlamaForSequenceClassification

    policy = models.build("llama")
    policy.save_pretrained(f"{folder}/policy")
    models.build("llama", seed=5).save_pretrained(f"{folder}/teacher")
    policy.config.num_labels = 1
    torch.manual_seed(1)
    LlamaForSequenceClassification(policy.config).save_pretrained(f"{folder}/reward")
    for name in ("policy", "reward"):
        tokenizer().save_pretrained(f"{folder}/{name}")


def policy(folder) -> nn.Module:
    """The model of `save_models`, loaded: TRL reads its reference from the same folder."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(f"{folder}/policy", dtype=torch.float32)


def texts(count: int, shortest: int, longest: int, seed: int) -> list[str]:
    """Lines of words, of unlike lengths."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(shortest, longest))) for _ in range(count)]


def data(kind: str, count: int = 24, seed: int = 0):
    """A data set in one of TRL's formats."""
    import datasets

    datasets.disable_progress_bars()
    prompts, good, bad = (
        texts(count, low, high, seed + extra) for low, high, extra in ((2, 5, 0), (3, 8, 1), (2, 9, 2))
    )
    opened = [f"{prompt} " for prompt in prompts]  # the completion is put right behind it
    columns = {
        "text": {"text": good},
        "completion": {"prompt": opened, "completion": good},
        "chat": {"messages": [_chat(*pair) for pair in zip(prompts, good)]},
        "preference": {"prompt": opened, "chosen": good, "rejected": bad},
        "unpaired": {"prompt": opened, "completion": good, "label": [index % 3 > 0 for index in range(count)]},
        "prompt": {"prompt": prompts},
    }
    return datasets.Dataset.from_dict(columns[kind])


def _chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def make(kind, name: str, folder, model, train, *, parts: dict | None = None, **settings):
    """A trainer on this rank.

    Args:
        kind: `PLAIN` or a stage.
        name (`str`): such as "SFT".
        folder: where the models are and output goes.
        model: a model, or a name.
        train: the data to train on.
        parts (`dict`): for the trainer, beyond model, arguments and data.
        settings: beyond or instead of `OWN_SETTINGS`.
    """
    from transformers import PrinterCallback

    reset_accelerate()
    settings = {**OWN_SETTINGS, "output_dir": f"{folder}/out", **settings}
    if name in ("SFT", "DPO", "KTO", "Reward"):
        settings.setdefault("max_length", 24)
    else:
        settings.pop("dataset_num_proc")
    if kind == PLAIN:
        settings = {key: value for key, value in settings.items() if not key.startswith("zero_")}
        settings.setdefault("ddp_find_unused_parameters", False)
        of_trl = import_module("trl")
        args = getattr(of_trl, f"{name}Config")(use_cpu=True, **settings)
        cls = getattr(of_trl, f"{name}Trainer")
    else:
        args = getattr(hf_zero.trl, f"Zero{name}Config")(zero_stage=kind, **settings)
        cls = getattr(hf_zero.trl, f"Zero{name}Trainer")
    parts = {"processing_class": tokenizer(), **(parts or {})}
    trainer = cls(model=model, args=args, train_dataset=train, **parts)
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(kind, name: str, folder, model, data, **kwargs) -> Run:
    """Makes a trainer, trains, and returns what it left behind."""
    seed_everything()
    trainer = make(kind, name, folder, model, data, **kwargs)
    trainer.train()
    return record(trainer)
