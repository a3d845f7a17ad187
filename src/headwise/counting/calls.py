"""How much is asked, the calls that it comes to, and their totals as backends and torch's counter have them."""

from __future__ import annotations

from dataclasses import dataclass

from ..blueprint import ModelSpec
from ..errors import SpecError
from ..spec import AttentionSpec
from .devices import Device, dtype_bytes
from .reading import ForwardCall, ExecutionTarget, AttentionComponent
from .scopes import check_depth_known, image_tokens, max_lengths
from .whole import SpecOrModel, ModelComponent

MAX_SIZE = 2**62  # tokens, rows: beyond it nobody can mean what they say


@dataclass(frozen=True)
class Workload:
    """How much is asked: rows, tokens of each, precision, and the machine.

    `source` is how many tokens cross-attention reads, for a model as many as `context` unless said; `generate` how many
    tokens are written behind a prompt of `context`.
    """

    batch: int = 1
    context: int = 2048
    dtype: str = "bf16"
    device: str = "h200"
    source: int | None = None
    generate: int = 0

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("context", 1), ("source", 1), ("generate", 0)):
            size = getattr(self, name)
            if not (name == "source" and size is None) and (type(size) is not int or not least <= size <= MAX_SIZE):
                raise SpecError(f"{name}={size!r} is no load; give a whole number from {least} to {MAX_SIZE}")
        dtype_bytes(self.dtype)
        Device.from_name(self.device)

    @property
    def cached_tokens(self) -> int:
        """Tokens of a row that are remembered at the end: the last one written is read by nobody."""
        return self.context + max(self.generate - 1, 0)


PricedCalls = dict[str, tuple[list[ModelComponent], ForwardCall]]


def list_calls(spec_or_model: SpecOrModel, every: list[ModelComponent], workload: Workload, name: str) -> PricedCalls:
    """Every call that is priced, with the pieces that run in it."""
    whole, late = _full_call(spec_or_model, workload), [piece for piece in every if not piece.before_last_stack]
    calls = {"prefill": (every, whole)}
    readers = [piece for piece in late if isinstance(piece, AttentionComponent)]
    decodes = all(piece.can_decode for piece in readers) and (isinstance(spec_or_model, AttentionSpec) or not _reads_images_only(spec_or_model))
    if decodes:
        calls["decode"] = (late, whole._replace(tokens=1, past=workload.context - 1, mode="steps"))
    if workload.generate and not decodes:
        raise SpecError(f"{name or 'this'} reads ahead and cannot write token by token; price it without generate")
    if workload.generate:
        steps = whole._replace(tokens=workload.generate - 1, past=workload.context, mode="steps")
        calls |= {"prompt": (every, whole._replace(mode="prompt")), "steps": (late, steps)}
    return calls


def _full_call(described: SpecOrModel, load: Workload) -> ForwardCall:
    """All tokens at once: those of the load, or of an image."""
    most, source = max_lengths(described), load.source or load.context
    if isinstance(described, AttentionSpec):
        check_depth_known(described)
        if described.source is not None and load.source is None:
            told = f"source={described.source} is the width of a sequence of a length that no load says"
            raise SpecError(f"{told}; give its tokens, as in Load(source=512) or --source 512")
        images: list[int | None] = [None, None]
    else:
        images = [None, *image_tokens(described)][-2:]
        source = min(source, most.source or source) if load.source is None else source
    if most.own is not None and load.cached_tokens > most.own:
        fewer = max(most.own - load.cached_tokens + load.context, 1)
        raise SpecError(f"{load.cached_tokens} tokens are more than the {most.own} that have positions; give context={fewer}")
    if most.source is not None and source > most.source:
        fact = f"{source} tokens of the source are more than the {most.source} that have positions"
        raise SpecError(f"{fact}; give source={most.source}")
    return ForwardCall(load.batch, images[1] or load.context, source=images[0] or source)


def _reads_images_only(model: ModelSpec) -> bool:
    """Whether it looks at images alone."""
    return image_tokens(model)[-1] is not None


def executed_flops_by_call(calls: PricedCalls, on: ExecutionTarget) -> dict[str, int]:
    """What backends execute in each call."""
    every, whole = calls["prefill"]
    ahead = {phase: sum(p.times * p.executed_flops(call, on) for p in some) for phase, (some, call) in calls.items()}
    return {"prefill": ahead.pop("prefill"), "backward": sum(p.times * p.executed_backward_flops(whole, on) for p in every), **ahead}


def counted_flops_by_call(calls: PricedCalls) -> dict[str, int | None]:
    """What torch's counter sees in each call; None where it cannot."""
    found: dict[str, int | None] = {}
    for phase, (some, call) in calls.items():
        seen = [(piece.times, piece.counted_products(call)) for piece in some]
        blind = any(each is None for _, each in seen)
        ways = {"prefill": (1, 1), "backward": (1, 2)} if phase == "prefill" else {phase: (1, 1)}
        for way, factors in ways.items():
            total = sum(n * sum(factors[one.num_grad_factors - 1] * one.flops for one in each or ()) for n, each in seen)
            found[way] = None if blind else total
    return found
