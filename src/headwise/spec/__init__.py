"""What an attention layer is, without saying how it runs; nothing here imports torch.

`heads` says how many heads there are, how wide, and which key-value head each query head uses; `attention_spec` is
the six choices and the list of modifiers; `serialization` writes a spec as TOML or JSON and reads it back.
"""
