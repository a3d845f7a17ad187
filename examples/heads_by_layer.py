"""Layers that differ: few wide heads in early layers and many narrow ones in late layers
(2606.27449), and layers that read the keys and values of earlier ones: every second layer
(2405.12981), and all of the second half after windows in the first (2405.05254).
"""

from collections.abc import Mapping, Sequence

import headwise as hw
from headwise import model_spec as ms

WIDTH, TOKENS = 64, 37


def layer(heads: int = 4, pattern: str = "causal", **edges: int) -> ms.BlockSpec:
    """A layer with rotary heads, and what it reads of an earlier one."""
    spec = hw.design(model=WIDTH, heads=heads, pattern=pattern, modifiers=(hw.parts.Rotary(),))
    return ms.BlockSpec(spec, feed=ms.FeedForwardSpec(4 * WIDTH, "gelu"), **edges)


def language_model(name: str, layers: Sequence[ms.BlockSpec]) -> ms.ModelSpec:
    """A decoder of these layers."""
    embedding = ms.EmbeddingSpec(TOKENS)
    stack = ms.StackSpec.from_blocks("decoder", WIDTH, layers, embedding=embedding)
    return ms.ModelSpec(
        name, "decoder", (stack,), (ms.OutputHeadSpec("tokens", TOKENS, table="decoder"),)
    )


reader = layer(kv_layers_back=1)
models: Mapping[str, ms.ModelSpec] = {
    "equal": language_model("equal", [layer()] * 4),
    "growing": language_model("growing", [layer(heads) for heads in (2, 4, 8, 16)]),
    "pairs": language_model("pairs", [layer(), reader] * 2),
    "yoco": language_model("yoco", [layer(pattern="window(16)"), layer(), reader, reader]),
}
print(hw.cost(models, hw.Workload(context=128)))
