"""The induction score of every head, over random tokens that are repeated once: the mean weight of
each repeated token on the token after its first occurrence.
"""

from pathlib import Path

import torch


def with_headwise(checkpoint: Path, repeated: torch.Tensor):
    """The model keeps its own attention, such as SDPA."""
    from transformers import AutoModelForCausalLM

    import headwise as hw

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    trace = hw.trace(model, repeated)
    weights = [torch.as_tensor(trace.weights(n)) for n in range(model.config.num_hidden_layers)]
    period = repeated.shape[1] // 2
    return torch.stack(weights).diagonal(1 - period, -2, -1)[..., 1:].mean(-1)


def with_transformer_lens(checkpoint: Path, repeated: torch.Tensor):
    """The hook of the pattern has the weights; the model runs with eager attention."""
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(str(checkpoint))
    with torch.no_grad():
        _, cache = bridge.run_with_cache(repeated)
    layers = range(bridge.cfg.n_layers)
    weights = [cache[f"blocks.{layer}.attn.hook_pattern"][0] for layer in layers]
    period = repeated.shape[1] // 2
    return torch.stack(weights).diagonal(1 - period, -2, -1)[..., 1:].mean(-1)
