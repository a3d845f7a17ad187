"""A Llama with half of the heads of each layer, written so that plain transformers loads it."""

from pathlib import Path


def with_headwise(plain: Path, smaller: Path):
    """The heads with the largest estimated change of the loss of two texts are kept."""
    from transformers import AutoModelForCausalLM

    import headwise as hw

    model = AutoModelForCausalLM.from_pretrained(plain)
    texts = ["The first of two texts.", "Another one."]
    hw.prune(model, 0.5, texts).save_pretrained(smaller)


def with_torch_pruning(plain: Path, smaller: Path):
    """The heads with the largest weights are kept; the config is changed by hand."""
    import torch
    import torch_pruning as tp
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain)
    config = model.config
    config.use_cache = False
    num_heads = {}
    for layer in model.model.layers:
        attention = layer.self_attn
        num_heads[attention.q_proj] = config.num_attention_heads
        num_heads[attention.k_proj] = config.num_key_value_heads
        num_heads[attention.v_proj] = config.num_key_value_heads
    pruner = tp.pruner.BasePruner(
        model,
        example_inputs=torch.arange(1, 9)[None],
        importance=tp.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=0,
        pruning_ratio_dict=dict.fromkeys(num_heads, 0.5),
        num_heads=num_heads,
        prune_num_heads=True,
        prune_head_dims=False,
        head_pruning_ratio=0.5,
        output_transform=lambda outputs: outputs.logits,
    )
    pruner.step()
    config.num_attention_heads //= 2
    config.num_key_value_heads //= 2
    config.use_cache = True
    model.save_pretrained(smaller)
