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
texts = ["one text", "another one", "a third text"]
converted = hw.convert(model, hw.surgery.Pool(2, align="both"), texts, tokenizer="bytes")
print(converted)  # what pooling loses, with and without alignment
converted.save_pretrained("gqa")
assert AutoModelForCausalLM.from_pretrained("gqa").config.num_key_value_heads == 2
