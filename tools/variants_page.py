"""The generated part of docs/variants.md: every preset with its formula, costs and backends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import headwise as hw
from headwise import costs
from headwise.attention.interfaces import Part
from headwise.attention.interfaces.part import REGISTRY
from headwise.attention.masking.patterns import And, Or, Pattern
from headwise.attention.presets import PRESETS
from headwise.attention.spec.attention_spec import SLOTS, AttentionSpec

MODEL, HEADS, TOKENS, CACHE_TOKENS = 512, 8, 1024, 8192  # sizes for all costs
Row = Sequence[str]


def cost_table() -> tuple[Row, list[Row]]:
    """Header and rows of the table that compares presets."""
    head = [
        "preset",
        "parameters",
        f"MFLOP per token, {TOKENS} tokens",
        "cache, bytes per token",
        f"cache, MB at {CACHE_TOKENS} tokens",
        "backends: forward / with gradients / decode step",
    ]
    rows = [
        [f"[`{name}`](#{name})", *costs_of(name), " / ".join(cpu_backends(specs(name)))]
        for name in PRESETS
    ]
    return head, rows


def specs(name: str) -> AttentionSpec:
    return hw.design(preset=name, model=MODEL, heads=HEADS)


def costs_of(name: str) -> list[str]:
    """Parameters, FLOPs required per token, and the size of a bfloat16 cache: per token, and in
    all.
    """
    spec = specs(name)
    flops = (
        costs.required_flops(spec, costs.self_attention_work(spec, batch=1, queries=TOKENS))
        / TOKENS
        / 1e6
    )
    lines_of_cost = [f"{costs.count_parameters(spec):,}", f"{flops:.3f}"]
    if spec.pattern.tokens_before_decode != 0:
        return [*lines_of_cost, "-", "-"]
    cache_size = costs.cache_bytes(spec, batch=1, capacity=CACHE_TOKENS, bytes_per_number=2)
    per_token = "a state" if spec.is_recurrent else str(2 * costs.cached_numbers_per_token(spec))
    return [*lines_of_cost, per_token, f"{cache_size / 1e6:.3f}"]


def cpu_backends(spec: AttentionSpec) -> list[str]:
    """The backends chosen on the CPU: for a whole text without and with gradients, and for a decode
    step if any.
    """
    whole, trained = hw.why(spec), hw.why(spec, when="grad")
    step = hw.why(spec, tokens="one")
    names = [str(reasons.backend) for reasons in (whole, trained, step)]
    return names if spec.pattern.tokens_before_decode == 0 else names[:2]


def backends_sentence(spec: AttentionSpec) -> str:
    """The backends chosen on the CPU, with the calls that they run."""
    calls = ("for a forward pass", "with gradients", "for a decode step")
    names = cpu_backends(spec)
    calls_of_backend = {
        name: [call for own, call in zip(names, calls, strict=False) if own == name]
        for name in dict.fromkeys(names)
    }
    if len(calls_of_backend) == 1:
        return f"`{names[0]}` for all calls"
    return ", ".join(f"`{name}` {' and '.join(own)}" for name, own in calls_of_backend.items())


def sections() -> Iterator[str]:
    """One section per preset."""
    for name, make in PRESETS.items():
        spec = specs(name)
        parameters, flops, per_token, cache_size = costs_of(name)
        lines = [f"### {name}", ""]
        for paragraph in (make.__doc__ or "").strip().split("\n\n"):
            lines += [sentence(paragraph), ""]
        lines += [f"- {formula}" for formula in formulas(spec)]
        lines += [f"- **pattern**: `{spec.pattern.text}`", *rules(spec.pattern)]
        lines += [f"- **parameters**: {parameters} ({share(spec)})"]
        lines += [f"- **FLOPs**: {flops} million per token, for a sequence of {TOKENS} tokens"]
        cache_text = (
            "none, because the pattern is not causal"
            if per_token == "-"
            else f"{int(per_token):,} bytes per token in bfloat16"
            if per_token.isdigit()
            else f"a recurrent state of {cache_size} MB at any length"
        )
        lines += [
            f"- **cache**: {cache_text}",
            f"- **backends on a CPU**: {backends_sentence(spec)}",
        ]
        lines += [f"- **backend on CUDA**: `{on_cuda(spec)}`"]
        disagreements = dict.fromkeys(text for part in unusual(spec) for text in part.disagreements)
        lines += [f"- **sources disagree**: {text}" for text in disagreements]
        yield "\n".join(lines)


def on_cuda(spec: AttentionSpec) -> str:
    reasons = hw.why(spec, device="cuda", dtype="bf16", when="grad")
    return str(reasons.backend)


def formulas(spec: AttentionSpec) -> Iterator[str]:
    """The definition of every part that is not a default, with its paper."""
    for part in dict.fromkeys(unusual(spec)):
        paper = (
            f" ([{part.paper}](https://arxiv.org/abs/{part.paper}))"
            if part.paper[:4].isdigit()
            else ""
        )
        yield f"`{part!r}`{paper}: {sentence(type(part).__doc__)}"


def unusual(spec: AttentionSpec) -> list[Part]:
    usual = [part for _, part in hw.design(model=MODEL, heads=HEADS).parts()]
    return [part for _, part in spec.parts() if part not in usual]


def rules(pattern: Pattern) -> Iterator[str]:
    """The definition of a published pattern, with notes on sources that disagree."""
    if isinstance(pattern, And | Or):
        yield from rules(pattern.left)
        yield from rules(pattern.right)
    elif isinstance(pattern, hw.PerHead):
        yield f"  - {sentence(hw.PerHead.__doc__)}"
        yield from dict.fromkeys(rule for one in pattern.patterns for rule in rules(one))
    elif pattern not in (hw.Full(), hw.Causal()):
        paragraphs = (type(pattern).__doc__ or "").split(">>>")[0].strip().split("\n\n")
        yield from (f"  - {sentence(paragraph)}" for paragraph in paragraphs)


def share(spec: AttentionSpec) -> str:
    """The difference of its parameters from those of multi-head attention."""
    plain = costs.count_parameters(hw.design(model=MODEL, heads=HEADS))
    more = costs.count_parameters(spec) - plain
    return (
        "as multi-head attention" if not more else f"{more:+,} compared with multi-head attention"
    )


def sentence(doc: str | None) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((doc or "").strip().split("\n\n")[0].split())


def others() -> Iterator[str]:
    """Parts that no preset uses: definition, and cost with default choices for the rest."""
    used = {type(part) for name in PRESETS for _, part in specs(name).parts()}
    for cls in (
        cls for _, cls in sorted(REGISTRY.items()) if issubclass(cls, Part) and cls not in used
    ):
        paper = (
            f" ([{cls.paper}](https://arxiv.org/abs/{cls.paper}))"
            if cls.paper[:4].isdigit()
            else ""
        )
        yield f"- `{cls.__name__}`{paper}: {sentence(cls.__doc__)}{extra(cls)}"
        yield from (f"  - sources disagree: {text}" for text in cls.disagreements)


def extra(cls: type[Part]) -> str:
    """Parameters and cache that the part adds to a layer with default choices."""
    slot = next((slot for slot, kind in SLOTS.items() if issubclass(cls, kind)), None)
    plain = hw.design(model=MODEL, heads=HEADS, pattern="causal")
    words = {slot: cls()} if slot else {"modifiers": (cls(),)}
    try:
        spec = hw.design(model=MODEL, heads=HEADS, pattern="causal", **words)
    except hw.SpecError as error:
        return f" Conflicts with the defaults: {error}."
    more = costs.count_parameters(spec) - costs.count_parameters(plain)
    cache_text = 2 * (costs.cached_numbers_per_token(spec) - costs.cached_numbers_per_token(plain))
    cache = "a recurrent state" if spec.is_recurrent else f"{cache_text:+,} bytes per token"
    return f" Parameters {more:+,}, cache {cache}; backends on a CPU: {backends_sentence(spec)}."


def page() -> str:
    """The whole part, as Markdown."""
    head, rows = cost_table()
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    rest = (
        "### Parts without a preset\n\nThese parts belong to no preset; add them to any spec. "
        "Costs are the difference "
        "that the part makes in a causal layer with default choices for all other parts.\n\n"
        + "\n".join(others())
    )
    return "\n\n".join([table, *sections(), rest])
