"""Turn texts, tensors or dictionaries into the arguments of any model, with the strings of its
tokens.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...attention.masking.sequence_info import SequenceInfo
from ...models import Transformer
from ...models.generation import get_decoder_start_ids, max_positions
from ...models.generation.decoding_config import DecodingConfig
from ...models.generation.generate import generate
from ...util.errors import SequenceTooLong
from ..traces import TokenRow
from .model_tokenizer import PAD_ID, TokenDecoder, make_reader, pad_row, use_tokenizer
from .site import Site

IDS = "input_ids"  # the name that tokenizers give to the ids
DECODER_IDS = "decoder_input_ids"
# Entries of a tokenizer's output, with the value that changes nothing, for models without an
# argument of this name.
NEUTRAL_VALUES = {"attention_mask": 1, "token_type_ids": 0}
MASKS = {"attention_mask": "source_sequence", "decoder_attention_mask": "sequence"}

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]


def check_is_module(model: Any) -> nn.Module:
    """Return the model; raise ValueError if it is not an nn.Module."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model is of type {type(model).__name__}; give an nn.Module, or hw.load(name)"
        )
    return model


def check_eval_mode(model: nn.Module) -> None:
    """Raise ValueError if a module of a model is in train mode."""
    if any(module.training for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} is in train mode, where dropout changes what heads do; call "
            "model.eval() first"
        )


def _forward_signature(model: nn.Module) -> inspect.Signature | None:
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):  # compiled and scripted modules may have none
        return None


def list_arguments(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of a model's forward, without *args and **kwargs."""
    signature = _forward_signature(model)
    parameters = [] if signature is None else signature.parameters.values()
    return tuple(
        one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    )


def find_ids_argument(model: nn.Module) -> str:
    """Return the name of the argument that takes token ids: `main_input_name` of transformers, else
    the first one.

    >>> class NanoGPT(nn.Module):
    ...     def forward(self, idx, targets=None): ...
    >>> find_ids_argument(NanoGPT())
    'idx'
    """
    if isinstance(model, Transformer):
        return "x"
    arguments = list_arguments(model)
    main = getattr(model, "main_input_name", None)
    if isinstance(main, str) and (main in arguments or not arguments):
        return main
    return IDS if IDS in arguments or not arguments else arguments[0]


def takes_mapping(model: nn.Module) -> bool:
    """Return True if a model takes all its tensors as one dictionary, like SentenceTransformer."""
    signature = _forward_signature(model)
    if signature is None:
        return False
    names = list_arguments(model)
    if not names:
        return False
    annotation = str(signature.parameters[names[0]].annotation)
    return any(word in annotation.lower() for word in ("dict", "mapping"))


def to_named_tensors(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model by name, from its own names or from the output of a
    tokenizer.

    Lists and arrays of numbers become tensors. Names of tokenizers, such as `input_ids`, become the
    names of the model where these differ; an attention mask becomes the `sequence` of a headwise
    model.
    """
    names = {name: _to_tensor(name, value) for name, value in inputs.items()}
    if isinstance(model, Transformer):
        return _rename_for_headwise(model, names)
    arguments = list_arguments(model)
    ids = find_ids_argument(model)
    if (
        takes_mapping(model)
        or IDS not in names
        or IDS in arguments
        or not arguments
        or ids in names
    ):
        return names
    renamed = {ids if name == IDS else name: value for name, value in names.items()}
    for name, neutral in NEUTRAL_VALUES.items():
        if name not in renamed or name in arguments:
            continue
        if not bool((renamed[name] == neutral).all()):
            fact = f"{type(model).__name__} takes no argument {name!r}, but the inputs have one"
            raise ValueError(
                f"{fact}; give one text at a time, or its own arguments: {', '.join(arguments)}"
            )
        del renamed[name]
    return renamed


def bind_arguments(model: nn.Module, names: dict[str, Any]) -> CallArguments:
    """Return the positional and keyword arguments of a call with these named tensors; raise if the
    model has no such arguments.
    """
    if takes_mapping(model) and list_arguments(model)[0] not in names:
        return (names,), {}
    signature = _forward_signature(model)
    if signature is not None:
        try:
            signature.bind(**names)
        except TypeError:
            fact = f"{type(model).__name__} cannot be called with {', '.join(names)}"
            raise ValueError(
                f"{fact}; its arguments are {', '.join(list_arguments(model))}"
            ) from None
    return (), names


def _to_tensor(name: str, value: Any) -> Any:
    """Make a tensor from a list or array of numbers; a single row of ids gets a batch axis."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if not isinstance(value, list) or not value:
        return value
    try:
        tensor = torch.tensor(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name!r} is a list that makes no tensor; give rows of equal length, as a tokenizer "
            "returns them with "
            "padding=True, return_tensors='pt'"
        ) from None
    return tensor[None] if tensor.dim() == 1 else tensor


def _rename_for_headwise(model: Transformer, names: dict[str, Any]) -> dict[str, Any]:
    """Rename arguments from transformers' names to headwise's; headwise names stay."""
    if IDS not in names:
        return names
    has_source = model.spec.kind == "encoder-decoder"
    new_names = {IDS: "source" if has_source else "x", DECODER_IDS: "x"}
    renamed = {new_names.get(name, name): value for name, value in names.items()}
    for mask_name, argument in MASKS.items():
        mask = renamed.pop(mask_name, None)
        name = argument if has_source else "sequence"
        if isinstance(mask, Tensor) and not bool((mask == 1).all()):
            ids = renamed["source" if name == "source_sequence" else "x"]
            renamed[name] = SequenceInfo.from_batch(ids, segments=mask.long() - 1)
    types = renamed.pop("token_type_ids", None)
    if isinstance(types, Tensor) and bool((types != 0).any()):
        raise ValueError(
            "token_type_ids of several segments are not read from a tokenizer; give x=(ids, types)"
        )
    return renamed


# Arguments of transformers models that add no tokens to the ids.
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
INPUT_KINDS = (
    "token ids or another tensor, a tuple of arguments, a mapping of named tensors, a "
    "text or a list of texts"
)


@dataclass(frozen=True)
class ModelInputs:
    """Hold the arguments of a model call, and the token rows of its streams ("text", "source").

    `token_counts` are the tokens per stream, or None if only a run can count them. `prompt_ids` are
    the prompts that are continued with new tokens. `has_source`: the model is an encoder-decoder,
    with a source and a text. `decode_token` turns an id into a string.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    token_rows: Mapping[str, tuple[TokenRow, ...]] = field(default_factory=dict)
    token_counts: Mapping[str, int] | None = None
    batch_size: int = 1
    has_source: bool = False
    prompt_ids: list[list[int]] = field(default_factory=list)
    decode_token: TokenDecoder = str

    def repeat(self, num_rows: int) -> ModelInputs:
        """Return the arguments of a batch of equal rows, from those of one row."""

        def expand(tensor: Tensor) -> Tensor:
            is_one_row = tensor.dim() and len(tensor) == 1
            return tensor.expand(num_rows, *tensor.shape[1:]) if is_one_row else tensor

        kwargs = map_tensors(expand, dict(self.kwargs))
        return replace(self, args=map_tensors(expand, self.args), kwargs=kwargs)

    def extend_rows(self, new_ids: Sequence[Sequence[int]]) -> tuple[TokenRow, ...]:
        """Extend text rows by generated ids, which may include the prompt or only continue it."""
        old_rows = self.token_rows.get("text", ())
        rows: list[TokenRow] = []
        for number, ids in enumerate(new_ids):
            row = old_rows[number] if number < len(old_rows) else TokenRow((), ())
            num_ids = len(row.ids)
            new = list(ids[num_ids:] if tuple(ids[:num_ids]) == row.ids else ids)
            end = (len(row.text), len(row.text))
            rows.append(
                TokenRow(
                    (*row.ids, *new),
                    (*row.words, *map(self.decode_token, new)),
                    (*row.offsets, *[end] * len(new)) if row.offsets else (),
                    row.text,
                )
            )
        return tuple(rows)


SOURCE_ALONE = (
    'a source alone is not enough to run the decoder; give {"source": TEXT, "text": '
    "TEXT}, or set max_new_tokens"
)


def prepare_inputs(
    model: nn.Module, inputs: Any, max_new_tokens: int = 0, tokenizer: object = None
) -> ModelInputs:
    """Return the arguments of a model call from any form of inputs; checks lengths where the model
    does not.

    The forms: token ids, as a tensor, an array or lists, or another tensor; a tuple of positional
    arguments; a mapping of named tensors, such as the output of a tokenizer; a text, or several
    that become the rows of one batch; {"source": ..., "text": ...} with two texts for an
    encoder-decoder model. The ids get the name that the model gives them, such as "idx" or "x".
    `tokenizer` encodes texts (default: the model's own).
    """
    check_is_module(model)
    if tokenizer is not None:
        with use_tokenizer(model, tokenizer) as reader:
            return prepare_inputs(reader, inputs, max_new_tokens)
    inputs = _as_ids(inputs)
    texts = [inputs] if isinstance(inputs, str) else inputs
    if isinstance(texts, (list, tuple)) and texts and all(isinstance(one, str) for one in texts):
        stream = "source" if is_encoder_decoder(model) else "text"
        return _from_texts(model, {stream: texts}, max_new_tokens)
    if isinstance(inputs, Mapping):
        if inputs and all(isinstance(value, str) for value in inputs.values()):
            if set(inputs) != {"source", "text"} or not is_encoder_decoder(model):
                fact = f"{type(model).__name__} does not take the texts {', '.join(inputs)}"
                raise ValueError(
                    f"{fact}; give a text, or source and text to an encoder-decoder model"
                )
            streams = {stream: [inputs[stream]] for stream in ("source", "text")}
            return _from_texts(model, streams, 0)
        return _from_tensors(model, to_named_tensors(model, inputs), max_new_tokens)
    if isinstance(inputs, Tensor) and _is_ids(inputs):
        named = {IDS: inputs, "attention_mask": torch.ones_like(inputs)}
        names = named if takes_mapping(model) else {find_ids_argument(model): inputs}
        return _from_tensors(model, names, max_new_tokens)
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    if isinstance(inputs, tuple) and len(args) == 1:
        return prepare_inputs(model, args[0], max_new_tokens)
    tensors = [value for value in args if isinstance(value, Tensor) and value.dim()]
    if not tensors:
        raise ValueError(f"inputs are of type {type(inputs).__name__}; give {INPUT_KINDS}")
    if max_new_tokens:
        raise ValueError("max_new_tokens needs ids; give ids [rows, tokens], or a text")
    return ModelInputs(_to_device(model, args), batch_size=len(tensors[0]))


def is_token_input(inputs: Any) -> bool:
    """True for token ids and for mappings of the model's arguments."""
    return isinstance(inputs, Mapping) or (
        isinstance(_as_ids(inputs), Tensor) and _is_ids(_as_ids(inputs))
    )


def _as_ids(inputs: Any) -> Any:
    """Return token ids [T] or [B, T] as a tensor [B, T]; other inputs unchanged."""
    ids: Any = inputs
    if isinstance(inputs, list | np.ndarray) and len({np.shape(row) for row in inputs}) == 1:
        array = np.asarray(inputs)
        ids = torch.from_numpy(array) if array.dtype.kind in "iu" else inputs
    is_row = isinstance(ids, Tensor) and ids.dim() == 1 and not ids.is_floating_point()
    return ids[None] if is_row else ids


def split_rows(model: nn.Module, inputs: Any) -> list[Any]:
    """Return the rows of a batch as inputs of their own, without padding that its mask names."""
    ids = _as_ids(inputs)
    names = dict(ids) if isinstance(ids, Mapping) else {find_ids_argument(model): ids}
    tensors = {name: _to_tensor(name, value) for name, value in names.items()}
    is_tensor = {name: isinstance(one, Tensor) and one.dim() > 0 for name, one in tensors.items()}
    count = max((len(one) for name, one in tensors.items() if is_tensor[name]), default=1)
    rows: list[Any] = []
    for number in range(count):
        row = {
            name: one[number : number + 1] if is_tensor[name] and len(one) == count else one
            for name, one in tensors.items()
        }
        mask = row.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all()):
            is_text = mask[0].bool()
            for name, one in row.items():
                if isinstance(one, Tensor) and one.shape == mask.shape:
                    row[name] = one[:, is_text]
        rows.append(row)
    return rows


def run_prepared(model: nn.Module, inputs: ModelInputs, max_new_tokens: int = 0) -> Any:
    """Run a model and return its output, or the generated tokens if `max_new_tokens` is set."""
    kind = type(model).__name__
    try:
        if not max_new_tokens:
            return model(*inputs.args, **inputs.kwargs)
        if isinstance(model, Transformer):
            # with several rows no end token, because finished rows would leave the batch
            config = DecodingConfig(end=() if inputs.batch_size > 1 else None)
            return generate(model, inputs.prompt_ids, max_new_tokens=max_new_tokens, config=config)
        generate_method: Any = getattr(model, "generate", None)
        if generate_method is None:
            raise ValueError(f"{kind} cannot generate tokens; leave max_new_tokens out")
        return generate_method(**inputs.kwargs, max_new_tokens=max_new_tokens, do_sample=False)
    except IndexError as error:
        raise ValueError(
            f"{kind} cannot run these inputs: {error}; check for ids beyond its vocabulary "
            "and for more tokens than it has positions"
        ) from None


def run_model(model: nn.Module, inputs: Any, *, tokenizer: object = None) -> Any:
    """Run a model without gradients on inputs of any form that `prepare_inputs` describes.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 256}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> with hw.ablate(net, [(0, 1)]):
    ...     hw.run_model(net, "a text", tokenizer="bytes").shape
    torch.Size([1, 6, 256])
    """
    arguments = prepare_inputs(model, inputs, 0, tokenizer)
    with torch.no_grad():
        return model(*arguments.args, **arguments.kwargs)


def _from_tensors(model: nn.Module, names: dict[str, Any], steps: int) -> ModelInputs:
    """Make inputs from tensors by argument name."""
    is_headwise = isinstance(model, Transformer)
    has_source = is_encoder_decoder(model)
    if is_headwise:
        keys = {"text": "x", "source": "source"}
    else:
        first = IDS if IDS in names else find_ids_argument(model)
        keys = {"text": DECODER_IDS, "source": first} if has_source else {"text": first}
        if not has_source and DECODER_IDS in names:
            keys["source"] = DECODER_IDS
    ids: dict[str, Tensor] = {}
    rows: dict[str, tuple[TokenRow, ...]] = {}
    for stream, key in keys.items():
        tensor = names.get(key)
        if isinstance(tensor, Tensor) and _is_ids(tensor):
            _check_length(model, tensor.shape[1] + (steps if stream == "text" else 0))
            ids[stream] = tensor
            rows[stream] = tuple(
                TokenRow(tuple(row), tuple(map(str, row))) for row in tensor.tolist()
            )
    counts: dict[str, int] | None = {stream: ids[stream].shape[1] for stream in ids}
    if has_source and steps:
        counts.setdefault("text", 1)
    is_complete = len(counts) == 2 if has_source else bool(counts)
    if is_complete and (is_headwise or names.keys() <= NON_TOKEN_INPUTS):
        counts.setdefault("source", counts.get("text", 0))
    else:
        counts = None
    prompts = rows.get("source" if has_source else "text", ())
    tensors = [tensor for tensor in names.values() if isinstance(tensor, Tensor) and tensor.dim()]
    return ModelInputs(
        *bind_arguments(model, _to_device(model, names)),
        rows,
        counts,
        len(tensors[0]) if tensors else 1,
        has_source,
        [list(row.ids) for row in prompts],
    )


def get_device(model: nn.Module) -> torch.device:
    """Return the device for inputs of a model: the device of its first parameter with values."""
    devices = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
    return next(devices, torch.device("cpu"))


def _to_device(model: nn.Module, value: Any) -> Any:
    """Move the tensors and positions in a value to the device of a model's inputs."""
    device = get_device(model)
    return map_tensors(lambda one: one.to(device), value, (Tensor, SequenceInfo))


def map_tensors(function: Callable[[Any], Any], value: Any, kinds: Any = Tensor) -> Any:
    """Apply a function to every tensor of a value, or to objects of other `kinds`; what is left
    stays as it is.

    >>> map_tensors(lambda tensor: tensor + 1, (torch.tensor(1), {"x": torch.tensor(2)}, "y"))
    (tensor(2), {'x': tensor(3)}, 'y')
    """
    if isinstance(value, kinds):
        return function(value)
    if isinstance(value, MutableMapping):  # outputs of transformers are mappings too
        mapped = copy(value)
        for name, item in value.items():
            mapped[name] = map_tensors(function, item, kinds)
        return mapped
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        items = [map_tensors(function, item, kinds) for item in value]
        is_named = isinstance(value, tuple) and type(value) is not tuple
        return type(value)(*items) if is_named else type(value)(items)
    return value


def _is_ids(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point()


def is_encoder_decoder(model: nn.Module) -> bool:
    """Return True if a model has an encoder for a source and a decoder for a text."""
    if isinstance(model, Transformer):
        return model.spec.kind == "encoder-decoder"
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


# Parts of models that read no text, by the names of their modules
TOWER = re.compile(r"(?:^|\.)(?:(?P<image>vision|visual|image)|(?P<audio>audio))")


def get_streams(site: Site, has_source: bool) -> tuple[str, str]:
    """Return the streams of queries and keys at a site; `has_source` for encoder-decoder models."""
    tower = TOWER.search(site.path)
    if tower is not None:
        stream = tower.lastgroup or "image"
        return stream, stream
    if not has_source:
        return "text", "text"
    if site.kind == "cross":
        return "text", "source"
    return ("source", "source") if "encoder" in site.stack else ("text", "text")


def get_max_length(model: nn.Module) -> int | None:
    """Return the maximum number of tokens of a model; None if it is unlimited or unknown."""
    if isinstance(model, Transformer):
        limits = map(max_positions, model.spec.stacks)
        return min((limit for limit in limits if limit is not None), default=None)
    config = getattr(model, "config", None)
    limits = (getattr(config, name, None) for name in MAX_LENGTH_KEYS)
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)


def _check_length(model: nn.Module, count: int) -> None:
    """Raise if a model gets too many tokens for its config; headwise models check themselves."""
    max_length = None if isinstance(model, Transformer) else get_max_length(model)
    if max_length is not None and count > max_length:
        fact = (
            f"{count} tokens are {count - max_length} more than the {max_length} positions of "
            f"{type(model).__name__}"
        )
        raise SequenceTooLong(f"{fact}; shorten the text, or lower max_new_tokens")


# --- Texts ----------------------------------------------------------------------------------------


def _from_texts(model: nn.Module, texts: Mapping[str, Sequence[str]], steps: int) -> ModelInputs:
    """Make inputs from the texts of each stream, "text" or "source", or both."""
    reader = make_reader(model)
    is_headwise = isinstance(model, Transformer)
    has_source = is_encoder_decoder(model)
    rows: dict[str, list[TokenRow]] = {}
    for stream, items in texts.items():
        read = reader.read_target if has_source and stream == "text" else reader.read_source
        rows[stream] = [read(text) for text in items]
    counts = {stream: max(len(row.ids) for row in of_stream) for stream, of_stream in rows.items()}
    if not min(counts.values()):
        raise ValueError("the text is empty; give at least one token")
    _check_length(model, max(counts.values()) + (0 if has_source else steps))
    main = "source" if has_source else "text"
    is_source_alone = has_source and "text" not in texts
    if is_source_alone and not steps:
        raise ValueError(SOURCE_ALONE)
    num_rows = len(rows[main])
    is_ragged = any(len(row.ids) < counts[main] for row in rows[main])
    if is_headwise and not has_source and steps and is_ragged:
        raise ValueError(
            "texts of several lengths cannot be traced together while they go on; trace one "
            "at a time"
        )
    # generated tokens must follow the text directly
    left = is_headwise or (bool(steps) and not has_source)
    token_rows: dict[str, tuple[TokenRow, ...]] = {}
    for stream, of_stream in rows.items():
        token_rows[stream] = tuple(pad_row(row, counts[stream], left) for row in of_stream)
    call: CallArguments = ((), {})
    if is_headwise and is_source_alone:  # `generate` encodes the prompts
        start = get_decoder_start_ids(model)
        words = tuple(map(reader.decode_token, start))
        token_rows["text"] = (TokenRow(start, words),) * num_rows
        counts["text"] = len(start)
    else:
        ids = torch.tensor([row.ids for row in token_rows[main]])
        is_pad = ids == PAD_ID
        pad = getattr(getattr(model, "config", None), "pad_token_id", None) or 0
        named = {IDS: ids.masked_fill(is_pad, pad), "attention_mask": (~is_pad).long()}
        arguments = list_arguments(model)
        is_unknown = IDS in arguments and "attention_mask" not in arguments
        if len(texts) > 1 or (is_unknown and not bool(is_pad.any())):
            del named["attention_mask"]
        if len(texts) > 1:
            named[DECODER_IDS] = torch.tensor([row.ids for row in token_rows["text"]])
        call = bind_arguments(model, _to_device(model, to_named_tensors(model, named)))
        counts.setdefault("text", 1)
        counts.setdefault("source", counts["text"])
    prompts = [list(row.ids) for row in rows[main]] if is_headwise else []
    decode = reader.decode_token
    return ModelInputs(*call, token_rows, counts, num_rows, has_source, prompts, decode)
