"""Runs of document 002, section 3: the listing of multi-head attention, its eight steps, and how it
is called.
"""

from __future__ import annotations

import math
import time
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..attention.interfaces.core_types import Probe
from ..attention.multihead_attention import MultiHeadAttention
from ..attention.op_trace import walk
from ..attention.presets import design
from ..attention.tensor_attention import attend
from ..models.families import read_model_spec
from .attention_mechanism import causal_mask
from .catalogue import Outcome, judge, judge_condition
from .kernel_lookup import cross_attention, one_source_or_two
from .matrix_figures import Picture, draw_grids, draw_matrices
from .measured_layers import largest_difference, make_layer, sample, size_text
from .translator_runs import (
    MEASURED_TEXTS,
    load_translator,
    measure_translator,
    record_weights,
)

__all__ = ["causal_mask", "cross_attention", "one_source_or_two"]

Shape = tuple[int, ...]
ALIGNMENT = (
    "alignment input",
    "alignment target",
)  # 1 - AER of the row that reads, or predicts, a target word


class HarvardAttention(nn.Module):
    """Four linear maps of d_model, h heads, and -1e9 for masked scores, as the listing describes
    them.
    """

    def __init__(self, heads: int, model: int) -> None:
        super().__init__()
        self.heads = heads
        self.dim = model // heads
        self.linears = nn.ModuleList(nn.Linear(model, model) for _ in range(4))
        self.double()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """The output [batch, seq_len, d_model]; the mask [batch, 1 or T, S] is
        alike for all heads.
        """
        batch = query.shape[0]
        inputs = (query, key, value)
        q, k, v = (
            linear(x).view(batch, -1, self.heads, self.dim).transpose(1, 2)
            for linear, x in zip(list(self.linears)[:3], inputs, strict=True)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.dim)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        z = (
            (scores.softmax(-1) @ v)
            .transpose(1, 2)
            .contiguous()
            .view(batch, -1, self.heads * self.dim)
        )
        return self.linears[3](z)


def harvard_listing(*, heads: int = 3, ours: int = 3) -> Outcome:
    """The listing against hw.attention.MultiHeadAttention with its weights: rows with a visible
    key, and a row without.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        listing = HarvardAttention(heads, 12)
    layer = MultiHeadAttention(12, ours).double()
    for number, linear in enumerate((layer.query, layer.key, layer.value, layer.output)):
        source = listing.linears[number]
        linear.load_state_dict(source.state_dict())
    x = sample(1, 2, 7, 12)
    mask = sample(2, 2, 7, 7) > 0
    mask[:, :, 0] = True
    equal = largest_difference(listing(x, x, x, mask), layer(x, x, x, mask))
    mask[0, 1] = False
    outputs = layer(x, x, x, mask)
    hidden = largest_difference(listing(x, x, x, mask), outputs)
    gives_bias = largest_difference(outputs[0, 1], layer.output.bias) < 1e-12
    return judge_condition(
        equal < 1e-12 and gives_bias, hidden < 1e-12, visible=equal, hidden=hidden
    )


def shapes_of_the_steps(*, heads: int = 8) -> Outcome:
    """The shapes of the eight steps as the document numbers them, against those that hw.walk finds
    in a real layer.
    """
    shapes = [step.shape for step in walk(design(model=512, heads=heads), batch=5, tokens=10).steps]
    claimed: list[Shape] = [
        (5, 10, 512),
        (5, 10, 8, 64),
        (5, 8, 10, 64),
        (5, 8, 10, 10),
        (5, 10, 8, 64),
        (5, 10, 512),
    ]
    num_matched = 0
    place = 0
    for shape in claimed:
        later = [number for number in range(place, len(shapes)) if shapes[number] == shape]
        if later:
            num_matched = num_matched + 1
            place = later[0] + 1
    numbers = {"found": num_matched, "claimed": len(claimed), "operations": len(shapes)}
    return judge(num_matched == len(claimed), **numbers, figure=_walk_figure())


def _walk_figure() -> Picture:
    """The eight steps of 3 tokens of width 4 with 2 heads, with their numbers."""
    layer = make_layer(design(model=4, heads=2))
    x = sample(5, 3, 4)
    state = layer.state_dict()
    q, k, v = (x @ state[f"project.{side}"].T for side in "qkv")
    named: list[tuple[str, Tensor]] = [("X", x), ("1 X W_Q", q)]
    outputs = []
    for head in range(2):
        part = slice(2 * head, 2 * head + 2)
        weights = (q[:, part] @ k[:, part].T / math.sqrt(2)).softmax(-1)
        outputs.append(weights @ v[:, part])
        named += [
            (f"2-3 Q head {head}", q[:, part]),
            (f"4 A head {head}", weights),
            (f"4 Z head {head}", outputs[-1]),
        ]
    z = torch.cat(outputs, -1)
    named += [("5-7 concat", z), ("8 concat W_O", z @ state["output.o"].T)]
    return draw_matrices([(name, matrix.tolist()) for name, matrix in named])


def three_or_many_matrices(*, blocks: str = "columns") -> Outcome:
    """Queries by one large matrix and view, and by one small matrix per head; `blocks` is how the
    matrix is cut.
    """
    layer = make_layer(design(model=12, heads=3))
    x = sample(1, 7, 12)
    probe = Probe("q")
    layer(x[None], probe=probe)
    w_q = layer.state_dict()["project.q"].T
    channels = torch.arange(12)
    columns = channels.view(3, 4) if blocks == "columns" else channels.view(4, 3).T
    small = torch.stack([x @ w_q[:, own] for own in columns], 1)
    difference = largest_difference(probe.tensors["q"][0], small)
    return judge(difference > 1e-12, corrected=difference <= 1e-12, difference=difference)


def eight_dimensions(*, width: int | None = None) -> Outcome:
    """Dimensions of the sub-space of one of 8 heads at d = 512, by the rank of its queries."""
    layer = make_layer(design(model=512, heads=8, dim=width))
    probe = Probe("q")
    layer(sample(1, 1, 100, 512), probe=probe)
    queries = probe.tensors["q"][0].detach()
    rank = int(torch.linalg.matrix_rank(queries[:, 0]))
    heads = queries.shape[1]
    return judge(rank == 8, corrected=(heads, rank) == (8, 64), heads=heads, rank=rank)


def three_or_four_axes(*, transpose: bool = True) -> Outcome:
    """Attention on [B, h, T, d_k] against [B h, T, d_k]; without `transpose`, heads and tokens are
    mixed up.
    """
    q, k, v = (sample(seed, 2, 7, 3, 4) for seed in (1, 2, 3))
    four = [t.transpose(1, 2) for t in (q, k, v)]
    three = [(t.transpose(1, 2) if transpose else t).reshape(6, 7, 4) for t in (q, k, v)]
    outputs = [attend(*tensors)[0] for tensors in (four, three)]
    difference = largest_difference(outputs[0].reshape(6, 7, 4), outputs[1])
    return judge(difference < 1e-12, difference=difference)


def merged_tensor(*, tokens: int = 10) -> Outcome:
    """Shapes of the scores and of the head outputs that step 5 transposes, for
    d = 512 and 8 heads.
    """
    steps = walk(design(model=512, heads=8), batch=5, tokens=tokens).steps
    scores = next(step.shape for step in steps if step.shape == (5, 8, tokens, tokens))
    last = max(number for number, step in enumerate(steps) if step.shape == scores)
    output = next(step.shape for step in steps[last + 1 :] if len(step.shape) == 4)
    text = {"scores": " x ".join(map(str, scores)), "output": " x ".join(map(str, output))}
    merged = steps[-2].shape
    return judge(
        sorted(output) == sorted(scores),
        corrected=(scores, output, merged) == ((5, 8, 10, 10), (5, 8, 10, 64), (5, 10, 512)),
        **text,
        merged=output[-1] * 8,
    )


def contiguous_copies(*, transposed: bool = False) -> Outcome:
    """Test if contiguous() copies a tensor that is contiguous, and one that is transposed."""
    x = sample(1, 5, 10, 8, 4)
    copies = [
        tensor.contiguous().untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        for tensor in (x, x.transpose(1, 2))
    ]
    return judge(
        copies[1] if transposed else copies[0],
        corrected=copies == [False, True],
        contiguous=str(copies[0]),
        transposed=str(copies[1]),
    )


def shape_of_the_mask(*, width: int = 12) -> Outcome:
    """Test if a mask [B, T, d_model] fits the scores [B, h, T, S] of 5 tokens, and one of [B, 1,
    S].
    """
    layer = MultiHeadAttention(12, 3).double()
    x = sample(1, 2, 5, 12)
    shape = layer(x, x, x, torch.ones(2, 1, 5)).shape
    try:
        layer(x, x, x, torch.ones(2, 5, width))
        message = "-"
    except ValueError as error:
        message = str(error)
    return judge(
        message == "-",
        corrected=shape == x.shape,
        right=" x ".join(map(str, shape)),
        message=message,
    )


def encoder_layer(*, same: bool = True) -> Outcome:
    """query = key = value = x in hw.attention.MultiHeadAttention, against the layer of headwise
    called with x.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ours = MultiHeadAttention(12, 3, bias=False).double()
    layer = make_layer(design(model=12, heads=3))
    names = {
        "project.q": ours.query,
        "project.k": ours.key,
        "project.v": ours.value,
        "output.o": ours.output,
    }
    layer.load_state_dict({name: linear.weight.detach() for name, linear in names.items()})
    x = sample(1, 1, 7, 12)
    other = x if same else sample(2, 1, 7, 12)
    difference = largest_difference(ours(x, other, other), layer(x))
    return judge(difference < 1e-12, difference=difference)


def output_shape(*, with_output: bool = True) -> Outcome:
    """Shapes of input, concatenated heads and output of a layer with d_v = 5; without W_O the heads
    are the output.
    """
    layer = make_layer(design(model=12, heads=3, vdim=5))
    x = sample(1, 2, 5, 12)
    heads = layer.head_outputs(x).flatten(-2).detach()
    output = layer(x).detach() if with_output else heads
    shapes = {name: size_text(each) for name, each in (("input", x), ("heads", heads))}
    is_wider = heads.shape == (2, 5, 15)
    return judge(output.shape == x.shape and is_wider, **shapes)


def one_product_or_many(*, heads: int = 8) -> Outcome:
    """Time of the attention of 5 rows of 10 tokens of width 512 with all heads at once, and head by
    head in a loop.
    """
    x = sample(1, 5, 10, 512).float()
    matrices = [sample(seed, 512, 512).float() / 23 for seed in (2, 3, 4)]

    def at_once() -> Tensor:
        q, k, v = ((x @ matrix).unflatten(-1, (heads, -1)).transpose(1, 2) for matrix in matrices)
        return attend(q, k, v)[0].transpose(1, 2).flatten(2)

    def in_a_loop() -> Tensor:
        outputs = []
        for parts in zip(*(matrix.chunk(heads, 1) for matrix in matrices), strict=True):
            q, k, v = (x @ part for part in parts)
            outputs.append(attend(q, k, v)[0])
        return torch.cat(outputs, -1)

    with _CountedProducts() as whole:
        expected = at_once()
    with _CountedProducts() as loop:
        difference = largest_difference(expected, in_a_loop())
    # Processor time of the fastest of several runs, of both calls; the two alternate.
    fastest = {in_a_loop: math.inf, at_once: math.inf}
    for call in (in_a_loop, at_once) * 60:
        start = time.process_time_ns()
        for _ in range(5):
            call()
        fastest[call] = min(fastest[call], time.process_time_ns() - start)
    ratio = fastest[in_a_loop] / fastest[at_once]
    products = loop.count / whole.count
    return judge(
        products > 1 and ratio > 1 and difference < 1e-4,
        ratio=ratio,
        difference=difference,
        heads=heads,
        products=products,
    )


class _CountedProducts(TorchDispatchMode):
    """Counts the matrix products that torch runs inside the context."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
        return func(*args, **kwargs or {})


def cross_heads_align(*, role: str = "cross") -> Outcome:
    """Heads of the bundled translator's cross-attention that align words, over held-out texts."""
    table = measure_translator()
    heads = [head for head in table.heads if head.site.endswith(role)]
    aligned = sum("alignment" in [one.name for one in head.classes] for head in heads)
    numbers = {"best": 0.0, "chance": 0.0}
    best = heads[0]
    for head in heads:
        for measure in filter(None, map(head.measures.get, ALIGNMENT)):
            if measure.value > numbers["best"]:
                numbers = {"best": measure.value, "chance": measure.chance}
                best = head
    holds = aligned > len(heads) / 2 and numbers["best"] > 2 * numbers["chance"]
    weights = record_weights(load_translator(), best.site)[0][0, best.head]
    figure = draw_grids({"": weights}, "source token", "target token")
    counts = {"aligned": aligned, "heads": len(heads), "texts": MEASURED_TEXTS}
    return judge(holds, **counts, **numbers, figure=figure)


def places_of_attention(*, model: str = "transformer-base") -> Outcome:
    """Attention sublayers in a layer of the first and of the last stack of a model, and in the
    whole model.
    """
    spec = read_model_spec(model)
    layers = list(chain.from_iterable(stack.layers for stack in spec.stacks))
    counts = [(block.attention is not None) + (block.cross is not None) for block in layers]
    encoder = counts[0]
    decoder = counts[-1]
    return judge((encoder, decoder) == (1, 2), encoder=encoder, decoder=decoder, all=sum(counts))
