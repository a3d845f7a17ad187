"""What a model says: which loss its own head has, what stands for a masked token, where its output is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor, nn

from ..blueprint.manifest import TOKENIZER
from ..hub.readable import reads_two
from ..models import Transformer

# What a model of transformers says by the name of its class.
SAYS = {
    "masked-token": re.compile("MaskedLM"),
    "label": re.compile("(Sequence|Image|Token|Audio)Classification"),
    "next-token": re.compile("CausalLM|LMHeadModel"),
    "translation": re.compile("ConditionalGeneration|MTModel|Seq2SeqLM"),
}
MASKS = ("[MASK]", "<mask>")


def head_of(model: nn.Module) -> str:
    """Which loss a model's own head has; empty if none is known.

    >>> import headwise as hw
    >>> head_of(hw.build(hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1})))
    'next-token'
    """
    if isinstance(model, Transformer):
        return _own_head(model)
    if not reads_two(model) and getattr(model, "config", None) is None:
        return ""
    found = next((name for name, words in SAYS.items() if words.search(type(model).__name__)), "")
    return "next-token" if found == "translation" and not reads_two(model) else found


def _own_head(net: Transformer) -> str:
    described = net.described
    if not described.heads or not described.heads[0].outputs:
        return ""
    head, kind = described.heads[0], described.kind
    embedding = described.stacks[-1].embedding
    tokens = head.at == "each" and embedding is not None and embedding.tokens == head.outputs
    if not tokens:
        return "label"
    return {"decoder": "next-token", "encoder-decoder": "translation", "encoder": "masked-token"}.get(kind, "label")


def ids_name(model: nn.Module) -> str:
    """What the ids are called that a model reads."""
    return "x" if isinstance(model, Transformer) else str(getattr(model, "main_input_name", "input_ids"))


def mask_of(model: nn.Module) -> int | None:
    """The id of the mask, of the model's usage or of the tokenizer that comes with it."""
    if isinstance(model, Transformer):
        if model.usage.mask is not None or model.usage.tokenizer is None:
            return model.usage.mask
        words = Tokenizer.from_str(model.usage.tokenizer)
    else:
        path = Path(str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")) / TOKENIZER
        if not path.is_file():
            return None
        words = Tokenizer.from_file(str(path))
    return next((one for mask in MASKS if (one := words.token_to_id(mask)) is not None), None)


def output_of(said: Any) -> Tensor:
    """The tensor that a model says: its states, else its logits, else the first of what it returns."""
    if isinstance(said, Tensor):
        return said
    for name in ("last_hidden_state", "logits"):
        if isinstance(found := getattr(said, name, None), Tensor):
            return found
    if isinstance(said, (tuple, list)) and said and isinstance(said[0], Tensor):
        return said[0]
    raise ValueError(f"the model returns {type(said).__name__}, and none of it is known to be its output; "
                     "wrap it so that it returns one tensor")  # fmt: skip
