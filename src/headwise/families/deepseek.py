"""DeepSeek-V2 and V3: latent attention, and experts behind the first layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ..blueprint import Block, Dense, Embedding, Experts, Head, Model, Nearly, Norm, Stack
from ..parts.latent import Latent
from ..presets import design
from ..spec import AttentionSpec
from .attention import Rope, scaled
from .config import Config
from .registry import decoder, family, tied


class Usual(NamedTuple):
    """The sizes of a config that does not say its own."""

    tokens: int
    model: int
    hidden: int
    layers: int
    heads: int
    length: int
    dense: int
    experts: int
    active: int
    expert: int
    shared: int


V2 = Usual(102400, 4096, 11008, 32, 32, 2048, dense=0, experts=64, active=6, expert=1407, shared=2)
V3 = Usual(129280, 7168, 18432, 61, 128, 4096, dense=3, experts=256, active=8, expert=2048, shared=1)


@family("deepseek_v2", "DeepseekV2")
def deepseek_v2(config: Config, task: str) -> Model:
    """Experts chosen by softmax (2405.04434)."""
    routing = {"scores": "softmax", "scale": config.number("routed_scaling_factor", default=1.0)}
    return _deepseek(config, task, V2, "interleaved", routing)


@family("deepseek_v3", "DeepseekV3")
def deepseek_v3(config: Config, task: str) -> Model:
    """Experts chosen by sigmoids with a bias that balances them (2412.19437)."""
    scale = config.number("routed_scaling_factor", default=2.5)
    routing = {"scores": "sigmoid", "bias": "constant", "scale": scale}
    pairs = "interleaved" if config.flag("rope_interleave", True) else "half"
    if config.size("num_nextn_predict_layers", "num_mtp_layers", default=0, least=0):
        config.note("num_nextn_predict_layers: what predicts further tokens is left out, as transformers does")
    return _deepseek(config, task, V3, pairs, routing)


def _deepseek(config: Config, task: str, usual: Usual, pairs: str, routing: dict[str, Any]) -> Model:
    model = config.size("hidden_size", default=usual.model)
    layers = config.layers("num_hidden_layers", default=usual.layers)
    dense = config.size("first_k_dense_replace", default=usual.dense, least=0)
    config.refuse("moe_layer_freq", 1, "leaves out layers that transformers puts in")
    attention = _latent(config, model, usual, pairs)

    norm = Norm("rms", config.number("rms_norm_eps", default=1e-6))
    act = config.activation("hidden_act", "silu")
    bias = "ugd" if config.name == "deepseek_v2" and config.flag("mlp_bias", False) else ""
    first = Dense(config.size("intermediate_size", default=usual.hidden), act, "gated", bias)
    each = Dense(config.size("moe_intermediate_size", default=usual.expert), act, "gated")
    count = config.size("n_routed_experts", "num_experts", "num_local_experts", default=usual.experts)
    active = config.size("num_experts_per_tok", default=usual.active, most=count)
    shared = config.size("n_shared_experts", default=usual.shared, least=0)
    both = replace(each, hidden=shared * each.hidden, bias=bias) if shared else None
    experts = Experts(each, count, active, both, **routing)
    if config.maybe("n_group", default=1) != 1:
        config.note("n_group: experts are chosen within groups, which moves none of the numbers here")
    blocks = [Block(attention, feed=first if depth < dense else experts, norm=norm) for depth in range(layers)]

    tokens = config.size("vocab_size", default=usual.tokens)
    stack = Stack.of("decoder", model, blocks, embedding=Embedding(tokens), norm=norm)
    return decoder(config, task, stack, Head("tokens", tokens, table=tied(config, "decoder", False)))


def _latent(config: Config, model: int, usual: Usual, pairs: str) -> AttentionSpec | Nearly:
    heads = config.heads("num_attention_heads", default=usual.heads)
    if config.grouped(heads) != heads:
        config.wrong("num_key_value_heads differs from num_attention_heads", "give both alike: every head has its keys")
    dim = config.width("qk_nope_head_dim", default=128)
    turned = config.width("qk_rope_head_dim", default=64)
    project = Latent(
        rank=config.size("kv_lora_rank", default=512),
        rope=turned,
        query_rank=config.maybe("q_lora_rank", default=1536),
    )
    rope = Rope(config, config.size("max_position_embeddings", default=usual.length))
    plain = (dim + turned) ** -0.5
    biased = config.flag("attention_bias", False)
    spec = design(
        model=model,
        heads=heads,
        dim=dim,
        vdim=config.width("v_head_dim", default=128),
        pattern="causal()",
        project=project,
        bias="o" if biased else "",
        similarity=scaled(plain * rope.swelling() ** 2, plain),
        modifiers=(rope.rotary(turned, pairs),),
    )
    if not biased:
        return rope.said(spec)
    ranks = (("project.q_down_bias", project.query_rank or 0), ("project.kv_down_bias", project.rank + turned))
    more = tuple((name, size) for name, size in ranks if size)
    return Nearly(spec, "attention_bias adds one to the latent vectors, which Latent has not", more)
