"""Attention weights of every head of a checkpoint, and its logits with one head ablated."""

from pathlib import Path

import torch


def with_headwise(checkpoint: Path, ids: torch.Tensor):
    """The model keeps its own attention, such as SDPA."""
    from transformers import AutoModelForCausalLM

    import headwise as hw

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    trace = hw.trace(model, ids)
    weights = [trace.weights(layer) for layer in range(model.config.num_hidden_layers)]
    with torch.no_grad(), hw.ablate(model, ["L1H2"]):
        return weights, model(ids).logits


def with_transformer_lens(checkpoint: Path, ids: torch.Tensor):
    """The hook of z gets the output of the heads before the output projection."""
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(str(checkpoint))
    _, cache = bridge.run_with_cache(ids)
    layers = range(bridge.cfg.n_layers)
    weights = [cache[f"blocks.{layer}.attn.hook_pattern"][0] for layer in layers]

    def ablate(z, hook):
        z[:, :, 2] = 0
        return z

    hooks = [("blocks.1.attn.hook_z", ablate)]
    with torch.no_grad():
        return weights, bridge.run_with_hooks(ids, fwd_hooks=hooks)
