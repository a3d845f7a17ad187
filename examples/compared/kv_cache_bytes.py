"""Bytes of the KV cache of a config.json at a context length, in bfloat16."""


def with_headwise(config: dict, context: int) -> int:
    import headwise as hw

    [estimate] = hw.cost(config, hw.Workload(context=context, dtype="bf16"))
    return estimate.cache_bytes


def with_hf_mem(config: dict, context: int) -> int:
    """The command reads huggingface.co alone, so this calls the function behind it."""
    from hf_mem.safetensors.kv_cache import compute_safetensors_kv_cache_size

    return compute_safetensors_kv_cache_size(config, "BF16", context)
