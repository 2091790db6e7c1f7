"""The loss of models that leave its sum to us."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput
from transformers.trainer_pt_utils import LabelSmoother

from hf_zero.recipes.causal import TokenTrainer
from hf_zero.trainer import ZeroTrainingArguments
from tests.trainer.harness import reset_accelerate


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_labels_are_smoothed_as_transformers_does(tmp_path, smoothing):
    reset_accelerate()
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))
    model.accepts_loss_kwargs = False
    training = ZeroTrainingArguments(output_dir=str(tmp_path), label_smoothing_factor=smoothing, use_cpu=True)
    trainer = TokenTrainer(model=model, args=training)
    logits = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[-100, 3, 4, 5, 6], [-100, -100, 1, 2, -100]])
    outputs = CausalLMOutput(logits=logits)
    found = trainer.compute_loss_func(outputs, labels, num_items_in_batch=torch.tensor(9))
    wanted = LabelSmoother(smoothing)(outputs, labels, shift_labels=True, num_items_in_batch=torch.tensor(9))
    torch.testing.assert_close(found, wanted)
