"""What a model is given to read, as its forward takes it, and what its tokens are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from ..errors import SequenceTooLong, SpecError
from ..generation import ModelTokenizer, encode_text, get_decoder_start_ids, load_tokenizers, max_positions, pad_left
from ..model_spec.serialization import TOKENIZER_FILE
from ..models import Transformer
from ..traces import TokenRow
from .site import Site

# What transformers' models are told beside ids, which adds no tokens.
NON_TOKEN_INPUTS = frozenset(
    {
        "input_ids",
        "decoder_input_ids",
        "attention_mask",
        "decoder_attention_mask",
        "token_type_ids",
        "position_ids",
        "use_cache",
        "return_dict",
    }
)
MAX_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_target_positions")
PAD_ID = -1  # the id of a place that holds no token
TokenDecoder = Callable[[int], str]


@dataclass(frozen=True)
class ModelInputs:
    """How a model is called, by places and by names, and the rows of its streams.

    `counts` are the tokens of each stream, None where only a run can tell; `ids` are prompts that tokens are said
    behind; `two` says that one stack reads a source and another a text. `spell` writes an id.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    token_rows: Mapping[str, tuple[TokenRow, ...]] = field(default_factory=dict)
    token_counts: Mapping[str, int] | None = None
    batch_size: int = 1
    has_source: bool = False
    prompt_ids: list[list[int]] = field(default_factory=list)
    decode_token: TokenDecoder = str

    def extend_rows(self, new_ids: Sequence[Sequence[int]]) -> tuple[TokenRow, ...]:
        """The rows of what is written when this has been said: whole, or behind what was there."""
        there = self.token_rows.get("text", ())
        found: list[TokenRow] = []
        for number, ids in enumerate(new_ids):
            row = there[number] if number < len(there) else TokenRow((), ())
            new = list(ids[len(row.ids) :] if tuple(ids[: len(row.ids)]) == row.ids and row.ids else ids)
            words = (*row.words, *(self.decode_token(one) for one in new))
            offsets = (*row.offsets, *[(len(row.text), len(row.text))] * len(new)) if row.offsets else ()
            found.append(TokenRow((*row.ids, *new), words, offsets, row.text))
        return tuple(found)


def prepare_inputs(model: nn.Module, inputs: Any, max_new_tokens: int) -> ModelInputs:
    """The same, whatever form it was given in."""
    ours = isinstance(model, Transformer)
    texts = [inputs] if isinstance(inputs, str) else list(inputs) if _is_texts(inputs) else None
    if texts is not None:
        return (
            _from_texts_headwise(model, texts, max_new_tokens)
            if isinstance(model, Transformer)
            else _from_texts_transformers(model, texts, max_new_tokens)
        )
    if isinstance(inputs, Mapping) and inputs and all(isinstance(one, str) for one in inputs.values()):
        return _from_source_and_text(model, dict(inputs))
    if isinstance(inputs, Mapping):
        names = dict(inputs)
        return _from_tensors(
            model, names, ("x", "source") if ours else ("input_ids", "decoder_input_ids"), max_new_tokens
        )
    if isinstance(inputs, Tensor) and _is_ids(inputs):
        return _from_tensors(
            model, {"x" if ours else _ids_argument(model): inputs}, ("x", "source") if ours else None, max_new_tokens
        )
    places = inputs if isinstance(inputs, tuple) else (inputs,)
    if not places or not all(isinstance(one, Tensor) for one in places[:1]):
        raise ValueError(f"inputs are of type {type(inputs).__name__}; give tensors, a dictionary of them, or a text")
    if max_new_tokens:
        raise ValueError("new tokens are said behind ids; give ids [rows, tokens], or a text")
    return ModelInputs(places, batch_size=len(places[0]))


def _is_texts(inputs: Any) -> bool:
    return isinstance(inputs, (list, tuple)) and bool(inputs) and all(isinstance(one, str) for one in inputs)


def _ids_argument(model: nn.Module) -> str:
    """What the ids are called that a model of somebody else's reads."""
    return str(getattr(model, "main_input_name", "input_ids"))


def _from_tensors(model: nn.Module, names: dict[str, Any], keys: tuple[str, str] | None, steps: int) -> ModelInputs:
    """Tensors by the names that the model gives them."""
    first, second = keys or (_ids_argument(model), "decoder_input_ids")
    ours, two = isinstance(model, Transformer), is_encoder_decoder(model)
    text, source = (first, second) if ours or not two else (second, first)
    told = {name: names.get(key) for name, key in (("text", text), ("source", source))}
    ids = {name: one for name, one in told.items() if isinstance(one, Tensor) and _is_ids(one)}
    rows = {name: tuple(_make_row(row) for row in one.tolist()) for name, one in ids.items()}
    for name, one in ids.items():
        _check_length(model, one.shape[1] + (steps if name == "text" else 0))
    counts = {name: one.shape[1] for name, one in ids.items()}
    if two and steps and "text" not in counts:
        counts["text"] = 1
    whole = (set(counts) == {"text", "source"} if two else bool(counts)) and (ours or names.keys() <= NON_TOKEN_INPUTS)
    prompt = ids.get("source" if two else "text")
    tensors = [one for one in names.values() if isinstance(one, Tensor) and one.dim()]
    return ModelInputs(
        (),
        _to_device(model, names),
        rows,
        counts | {"source": counts.get("source", counts.get("text", 0))} if whole else None,
        len(tensors[0]) if tensors else 1,
        two,
        prompt.tolist() if prompt is not None else [],
    )


def _to_device(model: nn.Module, names: dict[str, Any]) -> dict[str, Any]:
    """The same on the device of the model."""
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    return {name: one.to(device) if isinstance(one, Tensor) else one for name, one in names.items()}


def _is_ids(told: Tensor) -> bool:
    return told.dim() == 2 and not told.is_floating_point()


def _make_row(ids: Sequence[int]) -> TokenRow:
    return TokenRow(tuple(ids), tuple(map(str, ids)))


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether one stack reads a source, and another a text."""
    if isinstance(model, Transformer):
        return model.spec.kind == "encoder-decoder"
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def get_streams(site: Site, has_source: bool) -> tuple[str, str]:
    """Which tokens ask and which are read at a site; `two` where one stack reads a source and another a text."""
    if not has_source:
        return "text", "text"
    if site.kind == "cross":
        return "text", "source"
    return ("source", "source") if "encoder" in site.stack else ("text", "text")


def get_max_length(model: nn.Module) -> int | None:
    """How many tokens a model takes at most; None where there is no end."""
    if isinstance(model, Transformer):
        return min((n for stack in model.spec.stacks if (n := max_positions(stack)) is not None), default=None)
    config = getattr(model, "config", None)
    return next((n for name in MAX_LENGTH_KEYS if isinstance(n := getattr(config, name, None), int)), None)


def _check_length(model: nn.Module, count: int) -> None:
    """Refuse more tokens than a model of somebody else's says it takes; ours refuse for themselves."""
    most = None if isinstance(model, Transformer) else get_max_length(model)
    if most is not None and count > most:
        fact = f"{count} tokens are {count - most} more than the {most} positions of {type(model).__name__}"
        raise SequenceTooLong(f"{fact}; shorten the text, or ask for fewer new tokens")


def _from_texts_headwise(net: Transformer, texts: list[str], steps: int) -> ModelInputs:
    """Texts for a model of ours, with what its usage says stands around them."""
    device = next(net.parameters()).device
    reading, writing = load_tokenizers(net)
    usage = net.usage
    found = [_make_surrounded_row(reading, usage.before, text, usage.behind) for text in texts]
    for row, text in zip(found, texts, strict=True):
        if list(row.ids) != encode_text(net, text):
            raise SpecError(f"{text[:40]!r} is read in another way than it is told; give ids")
    if is_encoder_decoder(net):
        if not steps:
            raise ValueError("a source alone is no text to trace; say max_new_tokens, or give ids of both by name")
        begin = get_decoder_start_ids(net)
        text = tuple(TokenRow(begin, tuple(writing.token_text(one) for one in begin)) for _ in found)
        ids, _ = pad_left([row.ids for row in found], device)
        counts = {"text": len(begin), "source": ids.shape[1]}
        rows = {"source": _pad_rows(found, ids), "text": text}
        return ModelInputs((), {}, rows, counts, len(found), True, [list(row.ids) for row in found], writing.token_text)
    if steps and len({len(row.ids) for row in found}) > 1:
        raise ValueError("texts of several lengths cannot be traced together while they go on; trace one at a time")
    ids, tokens = pad_left([row.ids for row in found], device)
    count = ids.shape[1]
    names = {"x": ids} | ({} if tokens is None else {"sequence": tokens})
    counts = {"text": count, "source": count}
    prompts = [list(row.ids) for row in found]
    return ModelInputs(
        (), names, {"text": _pad_rows(found, ids)}, counts, len(found), False, prompts, writing.token_text
    )


def _from_source_and_text(model: nn.Module, texts: Mapping[str, str]) -> ModelInputs:
    """A source, and the text that is written while it is read."""
    if set(texts) != {"source", "text"} or not is_encoder_decoder(model):
        fact = f"{type(model).__name__} is given {', '.join(texts)}"
        raise ValueError(f"{fact}; give a text, or source and text to a model of two stacks")
    if isinstance(model, Transformer):
        reading, writing = load_tokenizers(model)
        usage, keys = model.usage, ("source", "x")
        source = _make_surrounded_row(reading, usage.before, texts["source"], usage.behind)
        text = _make_surrounded_row(writing, get_decoder_start_ids(model), texts["text"], ())
    else:
        tokenizer, keys = _load_tokenizer(model), ("input_ids", "decoder_input_ids")
        start = getattr(getattr(model, "config", None), "decoder_start_token_id", None) or 0
        source, text = _encode(tokenizer, texts["source"]), _encode(tokenizer, texts["text"])
        first = TokenRow((start,), (_make_decoder(tokenizer)(start),), ((0, 0),))
        text = TokenRow(first.ids + text.ids, first.words + text.words, first.offsets + text.offsets, text.text)
    names = dict(zip(keys, (torch.tensor([source.ids]), torch.tensor([text.ids])), strict=True))
    rows = {"source": (source,), "text": (text,)}
    counts = {"source": len(source.ids), "text": len(text.ids)}
    _check_length(model, max(counts.values()))
    return ModelInputs((), _to_device(model, names), rows, counts, 1, True)


def _make_surrounded_row(words: ModelTokenizer, before: Sequence[int], text: str, behind: Sequence[int]) -> TokenRow:
    """The row of a text between ids of its own."""
    ids, places = words.ids(text), words.places(text)
    named = [text[start:stop] or words.token_text(one) for one, (start, stop) in zip(ids, places, strict=True)]
    end = len(text)
    return TokenRow(
        (*before, *ids, *behind),
        (*map(words.token_text, before), *named, *map(words.token_text, behind)),
        (*[(0, 0)] * len(before), *places, *[(end, end)] * len(behind)),
        text,
    )


def _pad_rows(rows: Sequence[TokenRow], ids: Tensor) -> tuple[TokenRow, ...]:
    """The same, as long as each other: places without a token stand before."""
    found: list[TokenRow] = []
    for row in rows:
        gap = ids.shape[1] - len(row.ids)
        found.append(
            TokenRow((PAD_ID,) * gap + row.ids, ("",) * gap + row.words, ((0, 0),) * gap + row.offsets, row.text)
        )
    return tuple(found)


def _from_texts_transformers(model: nn.Module, texts: list[str], steps: int) -> ModelInputs:
    """Texts for a model of transformers, as the tokenizer beside its weights reads them."""
    tokenizer = _load_tokenizer(model)
    found = [_encode(tokenizer, text) for text in texts]
    two, longest = is_encoder_decoder(model), max(len(row.ids) for row in found)
    if not longest:
        raise ValueError("the text is empty; give at least one token")
    _check_length(model, longest + (0 if two else steps))
    pad = getattr(getattr(model, "config", None), "pad_token_id", None) or 0
    left = bool(steps) and not two  # what is said must stand next to what was read
    gaps = [longest - len(row.ids) for row in found]
    ids = [_pad(row.ids, [pad] * gap, left) for row, gap in zip(found, gaps, strict=True)]
    live = [_pad([1] * (longest - gap), [0] * gap, left) for gap in gaps]
    names = _to_device(model, {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(live)})
    rows = tuple(
        TokenRow(
            _pad(row.ids, [PAD_ID] * gap, left),
            _pad(row.words, [""] * gap, left),
            _pad(row.offsets, [(0, 0)] * gap, left),
            row.text,
        )
        for row, gap in zip(found, gaps, strict=True)
    )
    if two and not steps:
        raise ValueError("a source alone is no text to trace; say max_new_tokens, or give ids of both by name")
    counts = {"text": 1 if two else longest, "source": longest}
    return ModelInputs(
        (), names, {"source" if two else "text": rows}, counts, len(rows), two, [], _make_decoder(tokenizer)
    )


def _load_tokenizer(model: nn.Module) -> Tokenizer:
    """What lies beside the weights of a model of transformers."""
    path = Path(str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")) / TOKENIZER_FILE
    if not path.is_file():
        fact = f"{type(model).__name__} comes with no {TOKENIZER_FILE}"
        raise ValueError(f"{fact}; give what it reads, as in {{'input_ids': tokenizer(text, return_tensors='pt')...}}")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _pad(row: Sequence[Any], gap: Sequence[Any], left: bool) -> tuple[Any, ...]:
    return (*gap, *row) if left else (*row, *gap)


def _encode(tokenizer: Tokenizer, text: str) -> TokenRow:
    found = tokenizer.encode(text)
    words = tuple(
        token if special else text[start:stop] or token
        for token, special, (start, stop) in zip(found.tokens, found.special_tokens_mask, found.offsets, strict=True)
    )
    return TokenRow(tuple(found.ids), words, tuple(found.offsets), text)


def _make_decoder(tokenizer: Tokenizer) -> TokenDecoder:
    def spell(one: int) -> str:
        return tokenizer.decode([one]) or tokenizer.id_to_token(one) or str(one)

    return spell
