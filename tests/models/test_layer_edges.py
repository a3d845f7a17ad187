"""Keys and values of earlier layers, and value residuals, against renderings of the papers."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise import model_spec as ms
from headwise.attention.interfaces import RowStep
from headwise.attention.presets import PRESETS
from headwise.observe.head_analysis.head_circuits import measure_head_circuits
from headwise.observe.head_analysis.model_steps import model_steps
from headwise.observe.traces.head_steps import HeadPlace
from headwise.surgery.attention_replacement import (
    AttentionChange,
    get_attention,
    get_attention_parameters,
    replace_attentions,
)
from headwise.util.errors import SpecError

WIDTH, HEADS, KV, DIM, TOKENS = 16, 4, 2, 4, 31
PLAIN = [{}, {}, {}, {}]
CLA = [{}, {"kv_layers_back": 1}, {}, {"kv_layers_back": 1}]
YOCO = [{}, {}, {"kv_layers_back": 1}, {"kv_layers_back": 1}]
BY_KIND = [{}, {}, {"kv_layers_back": 2}, {"kv_layers_back": 2}]  # as Gemma 3n: by pattern
MEAN = [{}, *[{"value_residual": "mean"}] * 3]
LEARNED = [{}, *[{"value_residual": "learned"}] * 3]
BY_HEAD = [{}, {"kv_layers_back": 1}, {}, {"kv_layers_back": 3}]
NARROW = [{}, {"kv_layers_back": 1}, {"kv_layers_back": 2}, {"kv_layers_back": 2}]
NARROWER = ["causal", "window(3)", "dilated(3,2)", "window(4) | first(2)"]
RINGS = [{}, {"kv_layers_back": 1}, {"kv_layers_back": 1}, {"kv_layers_back": 1}]
OF_RINGS = ["window(4) | first(2)", "window(3)", "window(2) | first(1)", "first(1) | window(1)"]
EDGES = {
    "cla": CLA,
    "yoco": YOCO,
    "by kind": BY_KIND,
    "by head": BY_HEAD,
    "narrower": NARROW,
    "of rings": RINGS,
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
        if edges is NARROW or edges is RINGS:
            pattern = (NARROWER if edges is NARROW else OF_RINGS)[depth]
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


def visible_to(edges, depth: int, head: int, t: int) -> list[int]:
    """The tokens that a head of a layer attends to from token t."""
    past = range(t + 1)
    if edges is NARROW:
        return [
            [*past],
            [s for s in past if t - s < 3],
            [s for s in past if t - s in (0, 2, 4)],
            [s for s in past if t - s < 4 or s < 2],
        ][depth]
    if edges is RINGS:
        last, first = [(4, 2), (3, 0), (2, 1), (1, 1)][depth]
        return [s for s in past if t - s < last or s < first]
    is_window = head > 1 if edges is BY_HEAD else edges is BY_KIND and depth % 2 == 0
    return [s for s in past if t - s < 3 or not is_window]


def attend(q: Tensor, k: Tensor, v: Tensor, edges, depth: int) -> Tensor:
    """Each head and query by itself over the tokens that it may see."""
    out = torch.zeros_like(q)
    for t in range(q.shape[1]):
        for h in range(HEADS):
            past = visible_to(edges, depth, h, t)
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
        o = attend(q, *made[depth], edges, depth).flatten(-2)
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
            o = attend(q, rotate(own[0]), own[1], YOCO, depth)
        else:
            o = attend(q, k, v, YOCO, depth)
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
    for sizes in ([9], [1] * 9, [5, 1, 3], [2, *[1] * 7]):
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
    if kind in ("cla", "yoco", "mean", "learned", "both"):  # windows cache fewer tokens
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
        reasons = "key-value heads|has no self-attention|cache of layer"
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
        ({"modifiers": (hw.parts.Rotary(base=500.0),)}, "other keys and values: by"),
        ({"heads": hw.Heads.grouped(q=4, kv=1, dim=DIM)}, "the same key-value heads"),
    ):
        block = replace(first, attention=replace(first.attention, **changed))
        with pytest.raises(SpecError, match=expected):
            ms.StackSpec.from_blocks("decoder", WIDTH, [block, *others])
    with pytest.raises(SpecError, match="has no values to add"):
        replace(first, kv_layers_back=1, value_residual="mean")


@pytest.mark.parametrize("preset", PRESETS)
def test_readers_of_every_preset_have_queries_alone(preset):
    """All that a reader has gets a gradient, and costs what torch counts; decoding is exact."""
    small = {
        "mla": hw.parts.MLAProjection(rank=6, rope=4),
        "gla": hw.parts.GroupedLatent(rank=6, rope=4),
        "mohsa": hw.parts.Overlapping(overlap=2),  # not by depth
    }
    options = {"project": small[preset]} if preset in small else {}
    spec = hw.design(preset=preset, model=2 * WIDTH, heads=HEADS, dim=8, **options)
    block = ms.BlockSpec(spec, feed=ms.FeedForwardSpec(24))
    blocks = [block, replace(block, kv_layers_back=1)]
    refused = "recurrent" if spec.is_recurrent else "depends on the query"
    if spec.is_recurrent or spec.parts_of(RowStep):
        with pytest.raises(SpecError, match=refused):
            ms.StackSpec.from_blocks("decoder", 2 * WIDTH, blocks)
        return
    stack = ms.StackSpec.from_blocks("decoder", 2 * WIDTH, blocks)
    model = ms.ModelSpec("reader", "decoder", (stack,))
    net = hw.build(model, seed=0).double()
    x = torch.randn(2, 9, 2 * WIDTH, generator=torch.Generator().manual_seed(5)).double()
    for layer in net.stacks["decoder"].blocks:
        layer.attention.backend_name = "dense"
    counter = FlopCounterMode(display=False)
    with counter:
        y = net(x)
    y.square().sum().backward()
    reader = net.stacks["decoder"].blocks[1].attention
    assert [name for name, one in reader.named_parameters() if one.grad is None] == []
    cost = hw.cost(model, hw.Workload(batch=2, context=9, dtype="fp32")).estimates[0]
    assert cost.counted_flops["prefill"] == counter.get_total_flops()
    if spec.pattern.tokens_before_decode == 0:
        net.eval()
        cache = net.cache(batch=2, capacity=16)
        steps = [net(part, cache=cache) for part in x.split([4, 1, 1, 3], 1)]
        torch.testing.assert_close(torch.cat(steps, 1), net(x))


# --- What is said of layers whose keys and values come from elsewhere -----------------------------


@pytest.mark.parametrize(
    ("kind", "caveat"),
    [
        ("cla", "it attends to the keys and values of decoder.0.attention"),
        ("mean", "the first layer's values are added to its own"),
    ],
)
def test_views_of_a_layer_by_its_own_input_are_refused(kind, caveat):
    net = make_model(EDGES[kind]).eval()
    site = "decoder.1.attention"
    with pytest.raises(SpecError, match="cannot fold the circuits"):
        hw.head_analysis.fold_circuits(net, site, 0)
    assert hw.get_circuits(net)[site].caveats[-1] == caveat
    numbers = {(one.site, one.head): one for one in measure_head_circuits(net)}
    assert math.isnan(numbers[site, 1].copying)
    assert not math.isnan(numbers["decoder.0.attention", 1].copying)
    with pytest.raises(ValueError, match="cannot attribute L1H0"):
        hw.head_analysis.attribute_score(net, [(IDS[:1], -1, 1)], "L1H0")
    with pytest.raises(ValueError, match="cannot follow the steps"):
        model_steps(net, IDS[:1], HeadPlace(site, 0, 2))
    with pytest.raises(ValueError, match="reads keys or values of an earlier layer"):
        hw.importance(net, [IDS[:1], IDS[1:]], method="lrp")


def test_biases_of_values_are_folded_where_they_are_the_layer_s_own():
    biased = {"bias": "qkvo"}
    for kind in ("mean", "both"):
        layer = 2 if kind == "both" else 1  # layer 2 reads the sums of layer 1
        drop = hw.surgery.DropHeads(((f"decoder.{layer}.attention", 0),))
        with pytest.raises(SpecError, match="values of the first layer are added"):
            hw.prune(make_model(EDGES[kind], **biased), drop, fold="bias")
    net = make_model(CLA, **biased).eval()
    drop = hw.surgery.DropHeads((("decoder.1.attention", 0),))
    pruned = hw.prune(net, drop, fold="bias").after
    owner = net.stacks["decoder"].blocks[0].attention
    constant = owner.weights["project"]["v_bias"][:DIM]
    with hw.patch(net, {(1, 0): constant.detach()}):
        torch.testing.assert_close(pruned(IDS), net(IDS))


@pytest.mark.parametrize("kind", ["mean", "cla"])
def test_changes_of_values_that_are_added_or_read_are_refused(kind):
    net = make_model(EDGES[kind], bias="qkvo").eval()
    site = "decoder.1.attention"
    layer = get_attention(net, site)
    folded = hw.fold_bias(layer.spec, get_attention_parameters(net, site))
    change = AttentionChange(folded.spec, folded.weights)
    with pytest.raises(SpecError, match=r"added head by head|other keys and values"):
        replace_attentions(net, {site: change})
    if kind == "mean":
        with pytest.raises(SpecError, match="added head by head"):
            hw.convert(make_model(MEAN).eval(), hw.surgery.ToLatent())
    else:
        with pytest.raises(SpecError, match="none to align"):
            hw.convert(make_model(CLA).eval(), hw.surgery.Pool(1, align="both"), [IDS])


def test_a_head_of_a_reader_with_latents_is_refused_in_one_line():
    net = make_model(
        CLA, kv=HEADS, preset="mla", dim=8, project=hw.parts.MLAProjection(rank=6, rope=4)
    )
    with pytest.raises(SpecError, match="key-value heads"):
        hw.prune(net, hw.surgery.DropHeads((("decoder.1.attention", 0),)))


@pytest.mark.parametrize("backend", [None, "ragged"])  # which trusts what caches say of rows
def test_left_padded_rows_decode_as_each_row_alone(backend):
    for kind, edges in EDGES.items():
        if backend and kind == "by head":
            continue
        net = make_model(edges).eval().float()
        ids = torch.cat([torch.zeros(1, 2, dtype=torch.int64), IDS[:1, :5]], 1)
        rows = torch.cat([ids, IDS[1:, :7]])
        tokens = hw.SequenceInfo.from_batch(rows, lengths=[5, 7], pad="left")
        cache = net.cache(batch=2, capacity=16)
        net(rows, sequence=tokens, cache=cache)
        for layer in net.stacks["decoder"].blocks:
            layer.attention.backend_name = backend
        with torch.no_grad():
            steps = [net(IDS[:, t : t + 1], cache=cache) for t in (7, 8)]
        for layer in net.stacks["decoder"].blocks:
            layer.attention.backend_name = None
        alone = [torch.cat([IDS[0, :5], IDS[0, 7:]]), IDS[1]]
        for row, text in enumerate(alone):
            expected = net(text[None])[0, -2:]
            torch.testing.assert_close(
                torch.cat(steps, 1)[row], expected, msg=lambda text, kind=kind: f"{kind}: {text}"
            )
