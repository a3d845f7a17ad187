"""Small models in float64 and texts, for importance scores and pruning."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import headwise as hw
from headwise.models import Transformer, model_spec as bp
from headwise.observe.head_analysis.annotated_examples import Example
from support.tiny_configs import model_config

WORDS = 13
GPT2 = model_config("gpt2", n_embd=12, n_head=3, n_layer=2, vocab_size=WORDS, n_positions=32)
BERT = model_config(
    "bert",
    hidden_size=12,
    num_attention_heads=3,
    num_hidden_layers=2,
    intermediate_size=20,
    vocab_size=WORDS,
    max_position_embeddings=32,
    architectures=["BertForMaskedLM"],
)
LLAMA = model_config(
    "llama",
    hidden_size=12,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=4,
    num_hidden_layers=2,
    intermediate_size=20,
    vocab_size=WORDS,
)


def with_uneven_attention(net: nn.Module, by: float = 3.0) -> Any:
    """The model in double precision with scaled matrices, so that attention is uneven."""
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim > 1:
                parameter.mul_(by)
    return net.eval().double()


def build_model(config: dict[str, Any], seed: int = 0) -> Transformer:
    """A model of ours from a config."""
    return with_uneven_attention(hw.build(hw.families.read_model_spec(config), seed=seed))


def translator(seed: int = 0, placement: str = "pre") -> Transformer:
    """An encoder-decoder."""
    own = bp.BlockSpec(
        hw.design(model=12, heads=3, bias="qkvo"),
        feed=bp.FeedForwardSpec(20, bias="ud"),
        placement=placement,
    )
    both = bp.BlockSpec(
        hw.design(model=12, heads=3, pattern="causal"),
        cross=hw.design(model=12, heads=2, bias="v"),
        feed=bp.FeedForwardSpec(20, "relu"),
        placement=placement,
    )
    norm = bp.NormSpec() if placement == "pre" else None
    stacks = (
        bp.StackSpec.from_blocks(
            "encoder", 12, [own] * 2, embedding=bp.EmbeddingSpec(WORDS), norm=norm
        ),
        bp.StackSpec.from_blocks(
            "decoder", 12, [both] * 2, embedding=bp.EmbeddingSpec(WORDS), norm=norm
        ),
    )
    described = bp.ModelSpec(
        "small", "encoder-decoder", stacks, (bp.OutputHeadSpec("tokens", WORDS),)
    )
    return with_uneven_attention(hw.build(described, seed=seed))


def random_ids(number: int, count: int = 7, words: int = WORDS) -> torch.Tensor:
    """A random text by number."""
    return torch.randint(0, words, (1, count), generator=torch.Generator().manual_seed(number))


def make_examples(net: nn.Module, count: int = 5) -> list[Example]:
    """Texts of several lengths, with a source for an encoder-decoder."""
    two = isinstance(net, Transformer) and net.spec.kind == "encoder-decoder"
    name = "x" if isinstance(net, Transformer) else "input_ids"
    texts = [
        {name: random_ids(n, 5 + n % 3)} | ({"source": random_ids(100 + n, 6)} if two else {})
        for n in range(count)
    ]
    return [Example(text, {}) for text in texts]


def with_random_biases(net: Transformer) -> Transformer:
    """The model with random values added to biases and norms."""
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() == 1:
                parameter += (
                    torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype) * 0.3
                )
    return net


def model_output(net: Transformer, number: int = 0) -> torch.Tensor:
    """The output of a model for one of its examples."""
    with torch.no_grad():
        return net(**make_examples(net)[number].inputs)


T5 = model_config(
    "t5",
    d_model=12,
    d_kv=5,
    num_heads=3,
    num_layers=2,
    d_ff=20,
    vocab_size=WORDS,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
)


def classifier(at: str) -> Transformer:
    """An encoder with one label per text."""
    block = bp.BlockSpec(hw.design(model=12, heads=3, bias="o"), feed=bp.FeedForwardSpec(20))
    stack = bp.StackSpec.from_blocks(
        "encoder", 12, [block] * 2, embedding=bp.EmbeddingSpec(WORDS), norm=bp.NormSpec()
    )
    return with_uneven_attention(
        hw.build(
            bp.ModelSpec("small", "encoder", (stack,), (bp.OutputHeadSpec("labels", 5, at=at),)),
            seed=0,
        )
    )


def model_without_head() -> Transformer:
    """A model that returns its hidden states."""
    net = build_model(BERT)
    built = hw.build(bp.ModelSpec("small", "encoder", net.spec.stacks), seed=1)
    return with_uneven_attention(built)
