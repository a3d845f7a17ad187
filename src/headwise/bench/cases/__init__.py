"""Benchmark cases: each module lists its kinds of work in `KINDS`, with a generator that makes one
case at a time.

`decode_attention` times attention of one decode step over contiguous and paged KV caches.
`attention_layer` times whole layers, small calls and projections; `attention_cores` entmax and
mixed heads. `sparse_patterns`, `mixture_of_heads`, `head_statistics` and `ragged_batches` have one
kind each. `whole_models` times training steps of a GPT and decode steps of a Llama.
"""
