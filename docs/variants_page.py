"""What `docs/build.py` writes into docs/variants.md: every preset with its formula, its price and who runs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import headwise as hw
from headwise import costs
from headwise.interfaces import Part
from headwise.masking.patterns import And, Or, Pattern
from headwise.parts import REGISTRY
from headwise.presets import PRESETS
from headwise.spec.attention_spec import SLOTS, AttentionSpec

MODEL, HEADS, TOKENS, FAR = 512, 8, 1024, 8192  # the sizes at which all are priced
Row = Sequence[str]


def prices() -> tuple[Row, list[Row]]:
    """Head and rows of the table in which presets stand side by side."""
    head = ["preset", "parameters", f"MFLOP a token, {TOKENS} tokens", "bytes a token", f"MB at {FAR} tokens", "runs"]
    return head, [[f"[`{name}`](#{name})", *price(name), runs(specs(name))] for name in PRESETS]


def specs(name: str) -> AttentionSpec:
    return hw.design(preset=name, model=MODEL, heads=HEADS)


def price(name: str) -> list[str]:
    """Parameters, FLOPs asked for each token of a text, and what a bfloat16 cache holds."""
    spec = specs(name)
    flops = costs.required_flops(spec, costs.self_attention_work(spec, batch=1, queries=TOKENS)) / TOKENS / 1e6
    told = [f"{costs.count_parameters(spec):,}", f"{flops:.3f}"]
    if spec.pattern.tokens_before_decode != 0:
        return [*told, "-", "-"]
    held = costs.cache_bytes(spec, batch=1, capacity=FAR, bytes_per_number=2)
    each = "a state" if spec.is_recurrent else str(2 * costs.cached_numbers_per_token(spec))
    return [*told, each, f"{held / 1e6:.3f}"]


def runs(spec: AttentionSpec) -> str:
    """Who runs it on the CPU: a whole text, the same with gradients, and a step of one token."""
    whole, trained = hw.why(spec), hw.why(spec, when="grad")
    step = hw.why(spec, tokens="one")
    said = [str(told.backend) for told in (whole, trained, step)]
    return " / ".join(said if spec.pattern.tokens_before_decode == 0 else said[:2])


def chapters() -> Iterator[str]:
    """One chapter for each preset."""
    for name, make in PRESETS.items():
        spec = specs(name)
        parameters, flops, each, held = price(name)
        lines = [f"### {name}", "", sentence(make.__doc__), ""]
        lines += [f"- {told}" for told in formulas(spec)]
        lines += [f"- **pattern**: `{spec.pattern.text}`", *rules(spec.pattern)]
        lines += [f"- **parameters**: {parameters} ({share(spec)})"]
        lines += [f"- **FLOPs**: {flops} million a token in a text of {TOKENS}"]
        kept = "reads ahead, so nothing is decoded step by step" if each == "-" else f"{each} bytes a token in bfloat16"
        kept = f"a state of {held} MB whatever the length" if each == "a state" else kept
        lines += [f"- **cache**: {kept}", f"- **runs on the CPU**: {runs(spec)}; on CUDA: {on_cuda(spec)}"]
        lines += [f"- **sources disagree**: {said}" for part in unusual(spec) for said in part.disagreements]
        yield "\n".join(lines)


def on_cuda(spec: AttentionSpec) -> str:
    reasons = hw.why(spec, device="cuda", dtype="bf16", when="grad")
    return str(reasons.backend)


def formulas(spec: AttentionSpec) -> Iterator[str]:
    """The definition of every part that is not the usual choice, with its paper."""
    for part in dict.fromkeys(unusual(spec)):
        paper = f" ([{part.paper}](https://arxiv.org/abs/{part.paper}))" if part.paper[:4].isdigit() else ""
        yield f"`{part!r}`{paper}: {sentence(type(part).__doc__)}"


def unusual(spec: AttentionSpec) -> list[Part]:
    usual = [part for _, part in hw.design(model=MODEL, heads=HEADS).parts()]
    return [part for _, part in spec.parts() if part not in usual]


def rules(pattern: Pattern) -> Iterator[str]:
    """The definition of a published pattern, with what its sources disagree on."""
    if isinstance(pattern, And | Or):
        yield from rules(pattern.left)
        yield from rules(pattern.right)
    elif pattern not in (hw.Full(), hw.Causal()):
        said = (type(pattern).__doc__ or "").split(">>>")[0].strip().split("\n\n")
        yield from (f"  - {sentence(paragraph)}" for paragraph in said)


def share(spec: AttentionSpec) -> str:
    """Its parameters beside those of plain attention."""
    plain = costs.count_parameters(hw.design(model=MODEL, heads=HEADS))
    more = costs.count_parameters(spec) - plain
    return "as plain attention" if not more else f"{more:+,} beside plain attention"


def sentence(doc: str | None) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((doc or "").strip().split("\n\n")[0].split())


def others() -> Iterator[str]:
    """Parts that no preset uses: what each is, and what it costs beside the usual choices."""
    used = {type(part) for name in PRESETS for _, part in specs(name).parts()}
    for cls in (cls for _, cls in sorted(REGISTRY.items()) if issubclass(cls, Part) and cls not in used):
        paper = f" ([{cls.paper}](https://arxiv.org/abs/{cls.paper}))" if cls.paper[:4].isdigit() else ""
        yield f"- `{cls.__name__}`{paper}: {sentence(cls.__doc__)}{extra(cls)}"
        yield from (f"  - sources disagree: {said}" for said in cls.disagreements)


def extra(cls: type[Part]) -> str:
    """What the part adds in parameters and cache where it stands beside the usual choices."""
    slot = next((slot for slot, kind in SLOTS.items() if issubclass(cls, kind)), None)
    plain = hw.design(model=MODEL, heads=HEADS, pattern="causal")
    words = {slot: cls()} if slot else {"modifiers": (cls(),)}
    try:
        spec = hw.design(model=MODEL, heads=HEADS, pattern="causal", **words)
    except hw.SpecError as error:
        return f" Beside the usual choices: {error}."
    more = costs.count_parameters(spec) - costs.count_parameters(plain)
    kept = 2 * (costs.cached_numbers_per_token(spec) - costs.cached_numbers_per_token(plain))
    cache = "a state" if spec.is_recurrent else f"{kept:+,} bytes a token"
    return f" Parameters {more:+,}, cache {cache}; runs: {runs(spec)}."


def page() -> str:
    """All of it, as Markdown."""
    head, rows = prices()
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    rest = "### Parts without a preset\n\nBeside the usual choices, causal:\n\n" + "\n".join(others())
    return "\n\n".join([table, *chapters(), rest])
