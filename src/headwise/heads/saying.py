"""What a model says: which loss its own head has, what stands for a masked token, where its output is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor, nn

from ..blueprint.manifest import TOKENIZER_FILE
from ..hub.readable import is_encoder_decoder
from ..models import Transformer

# What a model of transformers says by the name of its class.
OBJECTIVE_OF_CLASS = {
    "masked-token": re.compile("MaskedLM"),
    "label": re.compile("(Sequence|Image|Token|Audio)Classification"),
    "next-token": re.compile("CausalLM|LMHeadModel"),
    "translation": re.compile("ConditionalGeneration|MTModel|Seq2SeqLM"),
}
MASK_TOKENS = ("[MASK]", "<mask>")


def detect_head_objective(model: nn.Module) -> str:
    """Which loss a model's own head has; empty if none is known.

    >>> import headwise as hw
    >>> detect_head_objective(hw.build(hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1})))
    'next-token'
    """
    if isinstance(model, Transformer):
        return _native_head_objective(model)
    if not is_encoder_decoder(model) and getattr(model, "config", None) is None:
        return ""
    found = next((name for name, words in OBJECTIVE_OF_CLASS.items() if words.search(type(model).__name__)), "")
    return "next-token" if found == "translation" and not is_encoder_decoder(model) else found


def _native_head_objective(net: Transformer) -> str:
    described = net.described
    if not described.heads or not described.heads[0].outputs:
        return ""
    head, kind = described.heads[0], described.kind
    embedding = described.stacks[-1].embedding
    tokens = head.at == "each" and embedding is not None and embedding.tokens == head.outputs
    if not tokens:
        return "label"
    return {"decoder": "next-token", "encoder-decoder": "translation", "encoder": "masked-token"}.get(kind, "label")


def get_ids_argument(model: nn.Module) -> str:
    """What the ids are called that a model reads."""
    return "x" if isinstance(model, Transformer) else str(getattr(model, "main_input_name", "input_ids"))


def find_mask_id(model: nn.Module) -> int | None:
    """The id of the mask, of the model's usage or of the tokenizer that comes with it."""
    if isinstance(model, Transformer):
        if model.usage.mask is not None or model.usage.tokenizer is None:
            return model.usage.mask
        words = Tokenizer.from_str(model.usage.tokenizer)
    else:
        path = Path(str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")) / TOKENIZER_FILE
        if not path.is_file():
            return None
        words = Tokenizer.from_file(str(path))
    return next((one for mask in MASK_TOKENS if (one := words.token_to_id(mask)) is not None), None)


def get_output_tensor(outputs: Any) -> Tensor:
    """The tensor that a model says: its states, else its logits, else the first of what it returns."""
    if isinstance(outputs, Tensor):
        return outputs
    for name in ("last_hidden_state", "logits"):
        if isinstance(found := getattr(outputs, name, None), Tensor):
            return found
    if isinstance(outputs, (tuple, list)) and outputs and isinstance(outputs[0], Tensor):
        return outputs[0]
    raise ValueError(f"the model returns {type(outputs).__name__}, and none of it is known to be its output; "
                     "wrap it so that it returns one tensor")  # fmt: skip
