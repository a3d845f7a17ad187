import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import headwise as hw

config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=8,
)
model = AutoModelForCausalLM.from_config(config).eval()  # or .from_pretrained("path/to/your/model")
pruned = hw.prune(model, 0.5, ["one text", "another one", "a third text"], tokenizer="bytes")
pruned.save_pretrained("smaller")
smaller, ids = (
    AutoModelForCausalLM.from_pretrained("smaller"),
    torch.tensor([[72, 101, 97, 100, 115]]),
)
with torch.no_grad(), hw.ablate(model, pruned.plan.removed_heads):
    torch.testing.assert_close(smaller(ids).logits, model(ids).logits)
