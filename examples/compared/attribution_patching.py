"""What each head adds to the difference of two logits between a clean and a corrupt text, estimated
by attribution patching.
"""

from pathlib import Path

import torch


def with_headwise(checkpoint: Path, pair: tuple[torch.Tensor, torch.Tensor], tokens: list[int]):
    """The result also has the estimates for queries, keys and values, and with several pairs
    intervals, chance levels and p-values.
    """
    from transformers import AutoModelForCausalLM

    import headwise as hw

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    metric = hw.head_analysis.TokenMetric("logit_difference", tuple(tokens))
    result = hw.head_analysis.attribute_heads(model, [pair], metric, exact=0)
    effects = torch.tensor([head.effects["output"].value for head in result.heads])
    return effects.view(model.config.num_hidden_layers, -1)


def with_transformer_lens(
    checkpoint: Path, pair: tuple[torch.Tensor, torch.Tensor], tokens: list[int]
):
    """Two runs and a backward pass, with hooks on the outputs of heads."""
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(str(checkpoint))
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(bridge.cfg.n_layers)]
    clean, corrupt = pair
    with torch.no_grad():
        _, other = bridge.run_with_cache(corrupt, names_filter=lambda name: name in names)
    outputs = []

    def keep(z, hook):
        z.retain_grad()
        outputs.append(z)
        return z

    logits = bridge.run_with_hooks(clean, fwd_hooks=[(name, keep) for name in names])[0, -1]
    (logits[tokens[0]] - logits[tokens[1]]).backward()
    effects = [
        (other[n] - z).mul(z.grad).sum((0, 1, 3)) for n, z in zip(names, outputs, strict=True)
    ]
    return torch.stack(effects).detach()
