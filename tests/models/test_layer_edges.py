"""Keys and values of earlier layers, and value residuals, against renderings of the papers."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise import model_spec as ms
from headwise.util.errors import SpecError

WIDTH, HEADS, KV, DIM, TOKENS = 16, 4, 2, 4, 31
PLAIN = [{}, {}, {}, {}]
CLA = [{}, {"kv_layers_back": 1}, {}, {"kv_layers_back": 1}]
YOCO = [{}, {}, {"kv_layers_back": 1}, {"kv_layers_back": 1}]
BY_KIND = [{}, {}, {"kv_layers_back": 2}, {"kv_layers_back": 2}]  # as Gemma 3n: by pattern
MEAN = [{}, *[{"value_residual": "mean"}] * 3]
LEARNED = [{}, *[{"value_residual": "learned"}] * 3]
BY_HEAD = [{}, {"kv_layers_back": 1}, {}, {"kv_layers_back": 3}]
EDGES = {
    "cla": CLA,
    "yoco": YOCO,
    "by kind": BY_KIND,
    "by head": BY_HEAD,
    "mean": MEAN,
    "learned": LEARNED,
    "both": [{}, {"value_residual": "learned"}, {"kv_layers_back": 1}, {"value_residual": "mean"}],
}


def model_spec(edges, kv=KV, **options) -> ms.ModelSpec:
    """A decoder of four layers, of windows and all tokens in turn where `edges` is BY_KIND."""
    blocks = []
    for depth, edge in enumerate(edges):
        pattern = "window(3)" if edges is BY_KIND and depth % 2 == 0 else "causal"
        if edges is BY_HEAD:
            pattern = "perhead((causal(), window(3)), (0, 0, 1, 1))"
        options = {"modifiers": (hw.parts.Rotary(),), **options}
        spec = hw.design(model=WIDTH, heads=HEADS, kv=kv, pattern=pattern, **options)
        feed = ms.FeedForwardSpec(24, "gelu")
        blocks.append(ms.BlockSpec(spec, feed=feed, norm=ms.NormSpec("rms"), **edge))
    stack = ms.StackSpec.from_blocks(
        "decoder", WIDTH, blocks, embedding=ms.EmbeddingSpec(TOKENS), norm=ms.NormSpec("rms")
    )
    head = ms.OutputHeadSpec("tokens", TOKENS, table="decoder")
    return ms.ModelSpec("edges", "decoder", (stack,), (head,))


def make_model(edges, **options) -> hw.Transformer:
    net = hw.build(model_spec(edges, **options), seed=0).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in net.parameters():
            if tensor.dim() == 1:  # norms and weights of values, which start alike
                tensor.add_(0.3 * torch.rand(tensor.shape, generator=generator))
    return net


IDS = torch.randint(TOKENS, (2, 9), generator=torch.Generator().manual_seed(2))


# --- Renderings -----------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * (x.square().mean(-1, keepdim=True) + 1e-5) ** -0.5


def rotate(x: Tensor) -> Tensor:
    """Rotary embedding, one token and pair of channels at a time."""
    turned = torch.empty_like(x)
    half = DIM // 2
    for t in range(x.shape[1]):
        for i in range(half):
            angle = torch.tensor(t * 10000.0 ** (-2 * i / DIM), dtype=x.dtype)
            a, b = x[:, t, :, i], x[:, t, :, half + i]
            turned[:, t, :, i] = a * angle.cos() - b * angle.sin()
            turned[:, t, :, half + i] = a * angle.sin() + b * angle.cos()
    return turned


def windows(edges, depth: int) -> list[int]:
    """How many tokens each head of a layer attends to."""
    if edges is BY_HEAD:
        return [TOKENS, TOKENS, 3, 3]
    return [3 if edges is BY_KIND and depth % 2 == 0 else TOKENS] * HEADS


def attend(q: Tensor, k: Tensor, v: Tensor, windows: list[int]) -> Tensor:
    """Each head and query by itself over its last tokens."""
    out = torch.zeros_like(q)
    for t in range(q.shape[1]):
        for h, window in enumerate(windows):
            past = slice(max(0, t - window + 1), t + 1)
            g = h // (HEADS // KV)
            scores = torch.einsum("bk,bsk->bs", q[:, t, h], k[:, past, g]) / DIM**0.5
            out[:, t, h] = torch.einsum("bs,bsv->bv", scores.softmax(-1), v[:, past, g])
    return out


def rendering(net: hw.Transformer, edges, ids: Tensor) -> Tensor:
    """The model written out: layers of queries alone attend to the keys and values of the layer
    that `kv_layers_back` leads to.
    """
    p = dict(net.named_parameters())
    h = p["decoder.embedding.tokens"][ids]
    made: dict[int, tuple[Tensor, Tensor]] = {}
    values = None
    for depth, edge in enumerate(edges):
        name = f"decoder.{depth}"
        z = rms(h, p[f"{name}.attention_norm.weight"])

        def heads(key: str, z=z, name=name) -> Tensor:
            return (z @ p[f"{name}.attention.project.{key}"].T).unflatten(-1, (-1, DIM))

        q = rotate(heads("q"))
        if edge.get("kv_layers_back"):
            made[depth] = made[depth - edge["kv_layers_back"]]
        else:
            v = heads("v")
            if values is None:
                values = v
            if edge.get("value_residual") == "mean":
                v = 0.5 * values + 0.5 * v
            if edge.get("value_residual") == "learned":
                first, own = p[f"{name}.value_mix"]
                v = first * values + own * v
            made[depth] = (rotate(heads("k")), v)
        o = attend(q, *made[depth], windows(edges, depth)).flatten(-2)
        h = h + o @ p[f"{name}.attention.output.o"].T
        z = rms(h, p[f"{name}.feed_norm.weight"])
        h = h + F.gelu(z @ p[f"{name}.feed.up"].T) @ p[f"{name}.feed.down"].T
    return rms(h, p["decoder.norm.weight"]) @ p["decoder.embedding.tokens"].T


@pytest.mark.parametrize("kind", EDGES)
@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_outputs_and_gradients_equal_the_rendering(kind, checkpointing):
    net = make_model(EDGES[kind])
    net.checkpointing = checkpointing
    parameters = dict(net.named_parameters())
    expected = rendering(net, EDGES[kind], IDS)
    weights = torch.rand(expected.shape, generator=torch.Generator().manual_seed(3)).double()
    grads = torch.autograd.grad((expected * weights).sum(), list(parameters.values()))
    actual = net(IDS)
    torch.testing.assert_close(actual, expected)
    own = torch.autograd.grad((actual * weights).sum(), list(parameters.values()))
    for name, one, other in zip(parameters, own, grads, strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")


def yoco_rendering(net: hw.Transformer, p: dict[str, Tensor], ids: Tensor) -> Tensor:
    """The upper half as YOCO's released code has it: keys and values of the hidden states after
    the lower half, through a norm of their own, for all upper layers.
    """
    h = p["decoder.embedding.tokens"][ids]
    for depth in range(4):
        name = f"decoder.{depth}"
        if depth == 1:
            z = rms(h, p["kv_norm"])
            k = rotate((z @ p["k"].T).unflatten(-1, (-1, DIM)))
            v = (z @ p["v"].T).unflatten(-1, (-1, DIM))
        z = rms(h, p[f"{name}.attention_norm.weight"])
        q = rotate((z @ p[f"{name}.attention.project.q"].T).unflatten(-1, (-1, DIM)))
        if depth == 0:
            own = [
                (z @ p[f"{name}.attention.project.{side}"].T).unflatten(-1, (-1, DIM))
                for side in "kv"
            ]
            o = attend(q, rotate(own[0]), own[1], [TOKENS] * HEADS)
        else:
            o = attend(q, k, v, [TOKENS] * HEADS)
        h = h + o.flatten(-2) @ p[f"{name}.attention.output.o"].T
        z = rms(h, p[f"{name}.feed_norm.weight"])
        h = h + F.gelu(z @ p[f"{name}.feed.up"].T) @ p[f"{name}.feed.down"].T
    return rms(h, p["decoder.norm.weight"]) @ p["decoder.embedding.tokens"].T


def test_the_norm_of_keys_and_values_of_yoco_folds_into_their_matrices():
    net = make_model(YOCO).requires_grad_(False)
    own = torch.rand(3 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(4)).double()
    weights = {"kv_norm": 0.5 + own[0], "k": own[1 : 1 + KV * DIM], "v": own[-KV * DIM :]}
    expected = yoco_rendering(net, dict(net.named_parameters()) | weights, IDS)
    layer = net.stacks["decoder"].blocks[1]
    fold = weights["kv_norm"] / layer.attention_norm.weight
    for side in "kv":
        layer.attention.weights["project"][side].copy_(weights[side] * fold)
    torch.testing.assert_close(net(IDS), expected)


# --- Decoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EDGES)
@pytest.mark.parametrize("cache_kind", ["smallest", "static"])
def test_cached_decoding_equals_the_whole_text(kind, cache_kind):
    net = make_model(EDGES[kind]).eval()
    for sizes in ([9], [1] * 9, [5, 1, 3]):
        cache = net.cache(batch=2, capacity=16, kind=cache_kind)
        steps = [net(ids, cache=cache) for ids in IDS.split(sizes, 1)]
        torch.testing.assert_close(torch.cat(steps, 1), net(IDS))


def test_layers_that_read_keys_have_no_cache():
    plain, cla = (make_model(edges).cache(batch=2, capacity=16) for edges in (PLAIN, CLA))
    for cache, model in ((plain, make_model(PLAIN)), (cla, make_model(CLA))):
        model(IDS, cache=cache)
    assert plain.nbytes == 2 * cla.nbytes
    assert [sorted(layer) for layer in cla.layers] == [["attention"], [], ["attention"], []]


@pytest.mark.parametrize("kind", EDGES)
def test_the_engine_generates_what_generate_does(kind):
    net = make_model(EDGES[kind]).float().eval()
    prompts = [IDS[0, :5].tolist(), IDS[1].tolist(), IDS[0, 2:4].tolist()]
    engine = hw.Engine(net, budget=2**20)
    streams = [engine.submit(prompt, max_new_tokens=6) for prompt in prompts]
    for prompt, stream in zip(prompts, streams, strict=True):
        assert list(stream.result()) == list(hw.generate(net, prompt, max_new_tokens=6))


# --- Costs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EDGES)
def test_costs_equal_the_tensors_and_the_counter_of_torch(kind):
    spec = model_spec(EDGES[kind])
    net = hw.build(spec, seed=0)
    for block in net.stacks["decoder"].blocks:
        block.attention.backend_name = "dense"
    counter = FlopCounterMode(display=False)
    with counter:
        net(IDS).sum().backward()
    cost = hw.cost(spec, hw.Workload(batch=2, context=9, dtype="fp32")).estimates[0]
    flops = cost.counted_flops
    assert flops["prefill"] + flops["backward"] == counter.get_total_flops()
    assert hw.costs.count_parameters(spec) == sum(one.numel() for one in net.parameters())
    if not kind.startswith("by"):  # windows cache their last tokens alone
        cache = net.cache(batch=2, capacity=9)
        net(IDS, cache=cache)
        assert cost.cache_bytes == cache.nbytes
    assert cost.activation_bytes is None


# --- Heads: observed, ablated, pruned -------------------------------------------------------------


@pytest.mark.parametrize("kind", EDGES)
def test_importance_equals_one_ablation_after_another(kind):
    net = make_model(EDGES[kind]).eval()
    texts = [IDS[:1], IDS[1:, :7]]

    def loss() -> float:
        with torch.no_grad():
            rows = [F.cross_entropy(net(ids)[0, :-1], ids[0, 1:]) for ids in texts]
        return float(sum(rows)) / len(rows)

    whole = loss()
    for one in hw.importance(net, texts).heads:
        with hw.ablate(net, [(one.site, one.head)]):
            assert one.value == pytest.approx(loss() - whole, abs=1e-9)


@pytest.mark.parametrize("kind", EDGES)
@pytest.mark.parametrize(
    "heads",
    [
        {0: [1], 1: [0], 3: [2, 3]},  # key-value head 1 of layer 3 goes
        {1: [0, 1, 2, 3]},  # all of a layer
        {0: [1], 1: [0], 2: [3], 3: [2]},
        {0: [0, 1], 1: [0, 1], 2: [0, 1], 3: [0, 1]},
        {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]},
        {0: [0, 1], 1: [2, 3]},
        {0: [0, 1, 2, 3]},
    ],
)
def test_pruned_models_equal_ablated_ones_or_are_refused(kind, heads):
    net = make_model(EDGES[kind]).eval()
    gone = [(f"decoder.{depth}.attention", head) for depth in heads for head in heads[depth]]
    drop = hw.surgery.DropHeads(tuple(gone))
    if is_refused(kind, heads):
        reasons = "key-value heads|shared with other|no self-attention|cache of layer"
        with pytest.raises(SpecError, match=reasons):
            hw.prune(net, drop)
        return
    pruned = hw.prune(net, drop).after
    with hw.ablate(net, gone):
        expected = net(IDS)
    torch.testing.assert_close(pruned(IDS), expected)


def is_refused(kind: str, heads: dict[int, list[int]]) -> bool:
    """By the definition: connected layers must keep the same key-value heads."""
    groups: dict[int, set[int]] = {}
    for depth in range(4):
        gone = set(heads.get(depth, ()))
        groups[depth] = {g for g in range(KV) if not {2 * g, 2 * g + 1} <= gone}
    edges = EDGES[kind]
    for depth, edge in enumerate(edges):
        owner = depth
        while edges[owner].get("kv_layers_back"):
            owner -= edges[owner]["kv_layers_back"]
        connected = [owner, 0] if edge.get("value_residual") else [owner]
        if groups[depth] and any(groups[one] != groups[depth] for one in connected):
            return True
    return False


# --- Refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edges", "options", "expected"),
    [
        ([{"kv_layers_back": 1}, {}], {}, "there is no layer -1 before it"),
        ([{"value_residual": "mean"}, {}], {}, "it is the first"),
        (CLA, {"preset": "linear", "modifiers": ()}, "recurrent state"),
        (CLA, {"modifiers": (hw.parts.ForgetGate(),)}, "depends on the query"),
        (CLA, {"project": hw.parts.ValueProjection(), "modifiers": ()}, "projects no queries"),
        (MEAN, {"preset": "mla", "kv": HEADS}, "no values of heads"),
    ],
)
def test_edges_that_are_not_defined_are_refused(edges, options, expected):
    with pytest.raises(SpecError, match=expected):
        model_spec(edges, **options)


def test_layers_of_other_keys_are_refused():
    spec = model_spec(CLA)
    first, *others = spec.stacks[0].layers
    for changed, expected in (
        ({"pattern": hw.patterns.Window(3)}, "drops after window"),
        ({"modifiers": (hw.parts.Rotary(base=500.0),)}, "another kind"),
        ({"heads": hw.Heads.grouped(q=4, kv=1, dim=DIM)}, "the same key-value heads"),
    ):
        block = replace(first, attention=replace(first.attention, **changed))
        with pytest.raises(SpecError, match=expected):
            ms.StackSpec.from_blocks("decoder", WIDTH, [block, *others])
    with pytest.raises(SpecError, match="has no values to add"):
        replace(first, kv_layers_back=1, value_residual="mean")


@pytest.mark.parametrize("preset", ["mha", "mqa", "mla", "gla", "tpa", "gta", "dcmha", "mea"])
def test_other_projections_share_what_they_cache(preset):
    """Layers that read are as wide as what they read; what they lack has no gradient elsewhere."""
    options = {"preset": preset, "dim": 8}
    if preset in ("mla", "gla"):
        kind = hw.parts.MLAProjection if preset == "mla" else hw.parts.GroupedLatent
        options["project"] = kind(rank=6, rope=4)
    kv = {"mqa": 1, "gta": 2, "gla": 2}.get(preset, HEADS)
    modifiers = {} if preset in ("mla", "gla", "gta", "tpa", "dcmha") else {"modifiers": ()}
    try:
        net = make_model(CLA, kv=kv, **options, **modifiers).eval()
    except SpecError as error:
        pytest.fail(f"{preset}: {error}")
    cache = net.cache(batch=2, capacity=16)
    steps = [net(ids, cache=cache) for ids in IDS.split([4, 1, 1, 3], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), net(IDS))
    net(IDS).square().sum().backward()
    lacking = [name for name, one in net.named_parameters() if one.grad is None]
    assert not lacking
