"""Texts that a model generates while it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import SpecError
from ..generation import generate
from ..model_spec import ModelSpec, ProcessorSpec
from ..models import Transformer
from .recipe import Recipe

SAMPLE_TEMPERATURE = 0.8


def check_samples(recipe: Recipe, model_spec: ModelSpec, usage: ProcessorSpec) -> None:
    """Raise SpecError if samples are asked for that this model cannot generate."""
    if bool(recipe.sample_every) != bool(recipe.sample_prompts):
        missing = "sample_prompts" if recipe.sample_every else "sample_every"
        raise SpecError(f"{missing} is missing; sample_every and sample_prompts belong together")
    if not recipe.sample_every:
        return
    if not usage.tokenizer or model_spec.kind not in ("decoder", "encoder-decoder"):
        kind = "has no tokenizer" if not usage.tokenizer else f"is of kind {model_spec.kind}"
        raise SpecError(
            f"sample_prompts need a model that generates text, but {model_spec.name} {kind}; leave them out"
        )


def sample_texts(net: Transformer, recipe: Recipe, step: int) -> Iterator[dict[str, Any]]:
    """Records of one sample for each prompt. Every step samples with the same random numbers, and none of torch's."""
    prompts = list(recipe.sample_prompts)
    options: dict[str, Any] = {"temperature": SAMPLE_TEMPERATURE, "seed": recipe.seed}
    texts = generate(net, prompts, max_new_tokens=recipe.sample_tokens, **options)
    for prompt, text in zip(prompts, texts, strict=True):
        yield {"event": "sample", "step": step, "prompt": prompt, "text": text}
