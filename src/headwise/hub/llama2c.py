"""Read llama2.c files: models of format version 0, and tokenizers, converted to the `tokenizers`
library.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from torch import Tensor

from ..errors import SpecError
from ..families import get_weight_names, read_model_spec as described_by
from ..model_spec import ModelSpec, ProcessorSpec
from ..models import Transformer
from .checkpoint_weights import TensorInfo, build_from_weights

# --- Tokenizers: scored pieces, converted to BPE merges that split text identically ---------------

SPECIAL_PIECES = ("<unk>", "<s>", "</s>")  # names of the first three ids in other libraries
BOS_ID = 1
BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
MAX_PIECE_LENGTH, PIECE_HEADER = struct.Struct("<i"), struct.Struct("<fi")


class ScoredPiece(NamedTuple):
    """A piece of text and its score; pieces with higher scores are merged first."""

    text: str
    score: float


def make_tokenizer_json(path: Path, vocab_size: int) -> str:
    """Convert a llama2.c tokenizer of `vocab_size` pieces to a tokenizer.json document.

    A space is put before the text, which is split into characters, or bytes where a character is
    not a piece. Then the neighbours whose merge has the best score are merged, the leftmost first,
    until no merge is a piece.
    """
    pieces = read_pieces(path, vocab_size)
    tokenizer = Tokenizer(
        BPE(
            {piece.text: number for number, piece in enumerate(pieces)},
            find_merges(path, pieces),
            unk_token=SPECIAL_PIECES[0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL_PIECES[BOS_ID]} $A", special_tokens=[(SPECIAL_PIECES[BOS_ID], BOS_ID)]
    )
    tokenizer.add_special_tokens(list(SPECIAL_PIECES))
    return tokenizer.to_str()


def read_pieces(path: Path, vocab_size: int) -> list[ScoredPiece]:
    """Read all pieces with their scores, in the order of their ids."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SpecError(
            f"{path} cannot be read: {error.strerror}; give the tokenizer of the model"
        ) from None
    scored_pieces, at = list[ScoredPiece](), MAX_PIECE_LENGTH.size
    while len(scored_pieces) < vocab_size and at + PIECE_HEADER.size <= len(data):
        score, size = PIECE_HEADER.unpack_from(data, at)
        at += PIECE_HEADER.size
        text = data[at : at + size] if 0 <= size <= len(data) - at else None
        if text is None:
            break
        scored_pieces.append(ScoredPiece(_decode_piece(path, text, len(scored_pieces)), score))
        at += size
    if len(scored_pieces) < vocab_size or at != len(data):
        more = "" if len(scored_pieces) < vocab_size else ", and more follows"
        raise SpecError(
            f"{path} contains {len(scored_pieces)} whole pieces{more}, but the model has "
            f"{vocab_size}; "
            "give its own tokenizer"
        )
    pieces = [ScoredPiece(name, 0.0) for name in SPECIAL_PIECES] + scored_pieces[
        len(SPECIAL_PIECES) :
    ]
    if len({piece.text for piece in pieces}) < vocab_size:
        raise SpecError(
            f"{path} contains a piece twice, so its id is ambiguous; give another tokenizer"
        )
    return pieces


def find_merges(path: Path, pieces: Sequence[ScoredPiece]) -> list[tuple[str, str]]:
    """All pairs of pieces whose concatenation is a piece, the best score first.

    >>> find_merges(
    ...     Path("-"),
    ...     [ScoredPiece(text, -n) for n, text in enumerate(("b", "a", "ab", "aba", "ba"))],
    ... )
    [('a', 'b'), ('a', 'ba'), ('ab', 'a'), ('b', 'a')]
    """
    texts = {piece.text for piece in pieces if not BYTE_PIECE.fullmatch(piece.text)} - set(
        SPECIAL_PIECES
    )
    merges, by_score = list[tuple[str, str]](), dict[float, str]()
    for text, score in sorted(pieces, key=lambda piece: -piece.score):
        pairs = [
            (text[:at], text[at:])
            for at in range(1, len(text))
            if {text, text[:at], text[at:]} <= texts
        ]
        if pairs and (first := by_score.setdefault(score, text)) != text:
            raise SpecError(
                f"{path}: {first!r} and {text!r} both have the score {score}, so their order is "
                "ambiguous; "
                "give another tokenizer"
            )
        merges += pairs
    return merges


def _decode_piece(path: Path, data: bytes, number: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise SpecError(
            f"{path}: piece {number} is not UTF-8; give the tokenizer of the model"
        ) from None


# --- Models ---------------------------------------------------------------------------------------

FORMAT_NAME = "llama2.c"
HEADER = struct.Struct("<7i")
MAGIC = 0x616B3432  # "ak42", magic number of later versions
ROPE_BASE, NORM_EPS = 10_000.0, 1e-5  # constants in llama2.c's code; the file does not store them
PICKLES = (b"PK\x03\x04", b"\x80")  # first bytes of torch.save files and of other pickles
ROPE_TOLERANCE = 1e-3  # for RoPE tables that were computed in float32


class Llama2cHeader(NamedTuple):
    """Sizes, in the order of the file. A negative vocab_size means that the output head has its own
    weight.
    """

    model: int
    hidden: int
    layers: int
    heads: int
    kv: int
    vocab_size: int
    max_length: int

    @property
    def dim(self) -> int:
        """Head dimension."""
        return self.model // self.heads

    @property
    def is_valid(self) -> bool:
        """Whether the sizes are positive and divide as a model needs."""
        sizes = (*self[:5], abs(self.vocab_size), self.max_length)
        return (
            min(sizes) > 0
            and not self.model % self.heads
            and not self.heads % self.kv
            and not self.dim % 2
        )

    @property
    def file_size(self) -> int:
        """Expected file size in bytes. Computed before `shapes` is listed, because sizes may be
        nonsense.

        >>> Llama2cHeader(64, 172, 5, 8, 4, 512, 512).file_size
        1056540
        """
        model, hidden, kv = self.model, self.hidden, self.kv * self.dim
        per_layer = 2 * model + 2 * model * model + 2 * kv * model + 3 * hidden * model
        tables = (1 + (self.vocab_size < 0)) * abs(self.vocab_size) * model
        num_values = (
            tables + self.layers * per_layer + model + self.max_length * 2 * (self.dim // 2)
        )
        return HEADER.size + 4 * num_values

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by tensor name, in the order of the file: all layers of one tensor, then those of
        the next.
        """
        tokens, model, hidden, kv = (
            abs(self.vocab_size),
            self.model,
            self.hidden,
            self.kv * self.dim,
        )
        per_layer: dict[str, tuple[int, ...]] = {
            "rms_att": (model,),
            "wq": (model, model),
            "wk": (kv, model),
        }
        per_layer |= {"wv": (kv, model), "wo": (model, model), "rms_ffn": (model,)}
        per_layer |= {"w1": (hidden, model), "w2": (model, hidden), "w3": (hidden, model)}
        layers = {
            f"{layer}.{name}": shape
            for name, shape in per_layer.items()
            for layer in range(self.layers)
        }
        angles = dict.fromkeys(("angles_cos", "angles_sin"), (self.max_length, self.dim // 2))
        head = {"wcls": (tokens, model)} if self.vocab_size < 0 else {}
        return {"tokens": (tokens, model), **layers, "rms_final": (model,), **angles, **head}

    @property
    def model_spec(self) -> ModelSpec:
        """Spec of the model: a Llama, whose rows of wq and wk are stored in another order."""
        sizes = {
            "hidden_size": self.model,
            "intermediate_size": self.hidden,
            "num_hidden_layers": self.layers,
        }
        sizes |= {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv,
            "vocab_size": abs(self.vocab_size),
        }
        config = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": self.max_length,
        }
        constants = {
            "rope_theta": ROPE_BASE,
            "rms_norm_eps": NORM_EPS,
            "tie_word_embeddings": self.vocab_size > 0,
        }
        return described_by(config | sizes | constants)


class Llama2cTensors:
    """The tensors of a llama2.c model file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.header = _read_header(path, file.read(HEADER.size), path.stat().st_size)
        except OSError as error:
            raise SpecError(
                f"{path} cannot be read: {error.strerror}; give a file of {FORMAT_NAME}"
            ) from None
        self.infos: Mapping[str, TensorInfo] = {
            name: TensorInfo(shape, "F32") for name, shape in self.header.shapes.items()
        }

    def iter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor in the order of the file, memory-mapped."""
        count, at = self.header.file_size // 4, HEADER.size // 4
        numbers = torch.from_file(str(self.path), shared=False, size=count, dtype=torch.float32)
        for name, shape in self.header.shapes.items():
            size = math.prod(shape)
            yield name, numbers[at : at + size].view(shape)
            at += size


def load_llama2c(path: Path, dropout: float = 0.0, tokenizer: Path | None = None) -> Transformer:
    """Load a llama2.c model with `tokenizer`, or with tok<vocab_size>.bin or tokenizer.bin from its
    folder.
    """
    stored = Llama2cTensors(path)
    _check_rope_base(stored)
    tokens = abs(stored.header.vocab_size)
    candidates = (path.parent / name for name in (f"tok{tokens}.bin", "tokenizer.bin"))
    tokenizer_path = tokenizer or next(
        (candidate for candidate in candidates if candidate.is_file()), None
    )
    usage = (
        ProcessorSpec()
        if tokenizer_path is None
        else ProcessorSpec(
            (BOS_ID,), end=(BOS_ID,), tokenizer=make_tokenizer_json(tokenizer_path, tokens)
        )
    )
    net = build_from_weights(
        stored.header.model_spec, get_weight_names(FORMAT_NAME), stored, dropout
    )
    net.usage = usage
    return net


def _read_header(path: Path, first: bytes, size: int) -> Llama2cHeader:
    """Parse the header; raises unless the file has exactly the size that it implies."""
    if len(first) < HEADER.size:
        raise SpecError(
            f"{path} is {size} bytes long, too short for a file of {FORMAT_NAME}; copy the file "
            "again"
        )
    header = Llama2cHeader(*HEADER.unpack(first))
    if header.is_valid and size == header.file_size:
        return header
    if header.model == MAGIC:
        raise SpecError(
            f"{path} has version {header.hidden} of {FORMAT_NAME}; export it with --version 0"
        )
    if first.startswith(PICKLES):
        raise SpecError(
            f"{path} is a pickle, which can run code when it is loaded; give safetensors, or a "
            f"file of {FORMAT_NAME}"
        )
    if not header.is_valid:
        raise SpecError(
            f"{path} begins with {list(header)}, which are not sizes of a model; give a file of "
            f"{FORMAT_NAME}"
        )
    raise SpecError(
        f"{path} is {size:,} bytes long, but its sizes require {header.file_size:,}; copy the "
        "file again"
    )


def _check_rope_base(stored: Llama2cTensors) -> None:
    """Raise if the stored RoPE tables have another base, which the header does not record."""
    header = stored.header
    frequencies = ROPE_BASE ** (-torch.arange(0, header.dim, 2, dtype=torch.float64) / header.dim)
    angles = torch.arange(header.max_length, dtype=torch.float64)[:, None] * frequencies
    for name, tensor in stored.iter_tensors():
        if name.startswith("angles_"):
            expected = angles.cos() if name.endswith("cos") else angles.sin()
            if not bool(((tensor - expected).abs() < ROPE_TOLERANCE).all()):
                raise SpecError(
                    f"{stored.path} contains a RoPE {name[7:]} table whose base is not "
                    f"{ROPE_BASE:.0f}; "
                    "convert it to a transformers folder, whose config can store the base"
                )
