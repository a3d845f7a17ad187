"""Few wide heads in early layers and many narrow ones in late layers (2606.27449), beside equal
heads in all layers: as many weights, FLOPs and cached numbers.
"""

import headwise as hw
from headwise import model_spec as ms

WIDTH, TOKENS = 64, 37


def language_model(name: str, heads_of_layer: list[int]) -> ms.ModelSpec:
    """A decoder whose layers have these numbers of heads."""
    blocks = [
        ms.BlockSpec(
            hw.design(model=WIDTH, heads=heads, pattern="causal", modifiers=(hw.parts.Rotary(),)),
            feed=ms.FeedForwardSpec(4 * WIDTH, "gelu"),
        )
        for heads in heads_of_layer
    ]
    embedding = ms.EmbeddingSpec(TOKENS)
    stack = ms.StackSpec.from_blocks("decoder", WIDTH, blocks, embedding=embedding)
    return ms.ModelSpec(
        name, "decoder", (stack,), (ms.OutputHeadSpec("tokens", TOKENS, table="decoder"),)
    )


models = [language_model("equal", [4, 4, 4, 4]), language_model("growing", [2, 4, 8, 16])]
print(hw.cost({model.name: model for model in models}, hw.Workload(context=128)))
