"""A tokenizer as llama2.c keeps it, pieces of text with scores, as a document of `tokenizers` that cuts text alike."""

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

SPECIAL_PIECES = ("<unk>", "<s>", "</s>")  # what the first ids are called elsewhere
BOS_ID = 1
BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
MAX_PIECE_LENGTH, PIECE_HEADER = struct.Struct("<i"), struct.Struct("<fi")


class ScoredPiece(NamedTuple):
    """A piece of text, and how early it is put together: the highest score first."""

    text: str
    score: float


def make_tokenizer_json(path: Path, vocab_size: int) -> str:
    """The tokenizer in a file of so many pieces.

    Text becomes characters, those that are no piece their bytes, with a space before the first; then the two
    neighbours that make the piece of the best score are joined, the leftmost first, until none do.
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
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL_PIECES[BOS_ID]} $A", special_tokens=[(SPECIAL_PIECES[BOS_ID], BOS_ID)]
    )
    tokenizer.add_special_tokens(list(SPECIAL_PIECES))
    return tokenizer.to_str()


def read_pieces(path: Path, vocab_size: int) -> list[ScoredPiece]:
    """Every piece with its score, by number."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}; give the tokenizer of the model") from None
    found, at = list[ScoredPiece](), MAX_PIECE_LENGTH.size
    while len(found) < vocab_size and at + PIECE_HEADER.size <= len(data):
        score, size = PIECE_HEADER.unpack_from(data, at)
        at += PIECE_HEADER.size
        text = data[at : at + size] if 0 <= size <= len(data) - at else None
        if text is None:
            break
        found.append(ScoredPiece(_decode_piece(path, text, len(found)), score))
        at += size
    if len(found) < vocab_size or at != len(data):
        more = "" if len(found) < vocab_size else ", and more follows"
        raise SpecError(
            f"{path} holds {len(found)} whole pieces{more}, the model has {vocab_size}; give its own tokenizer"
        )
    pieces = [ScoredPiece(name, 0.0) for name in SPECIAL_PIECES] + found[len(SPECIAL_PIECES) :]
    if len({piece.text for piece in pieces}) < vocab_size:
        raise SpecError(f"{path} holds a piece twice, and which number it has nobody can say; give another tokenizer")
    return pieces


def find_merges(path: Path, pieces: Sequence[ScoredPiece]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, the best score first.

    >>> find_merges(Path("-"), [ScoredPiece(text, -n) for n, text in enumerate(("b", "a", "ab", "aba", "ba"))])
    [('a', 'b'), ('a', 'ba'), ('ab', 'a'), ('b', 'a')]
    """
    known = {piece.text for piece in pieces if not BYTE_PIECE.fullmatch(piece.text)} - set(SPECIAL_PIECES)
    found, by_score = list[tuple[str, str]](), dict[float, str]()
    for text, score in sorted(pieces, key=lambda piece: -piece.score):
        pairs = [(text[:at], text[at:]) for at in range(1, len(text)) if {text, text[:at], text[at:]} <= known]
        if pairs and (first := by_score.setdefault(score, text)) != text:
            raise SpecError(f"{path}: {first!r} and {text!r} both score {score}; which comes first nobody can say")
        found += pairs
    return found


def _decode_piece(path: Path, data: bytes, number: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise SpecError(f"{path}: piece {number} is no text; give the tokenizer of the model") from None


# --- A file of llama2.c --------------------------------------------------------------------------------

FORMAT_NAME = "llama2.c"
HEADER = struct.Struct("<7i")
MAGIC = 0x616B3432  # of later versions, "ak42"
ROPE_BASE, NORM_EPS = 10_000.0, 1e-5  # which the format does not say: llama2.c has them in its code
PICKLES = (b"PK\x03\x04", b"\x80")  # how a file of torch.save, and any other pickle, begins
ROPE_TOLERANCE = 1e-3  # of angles, which others took in float32


class Llama2cHeader(NamedTuple):
    """Sizes, in the order of the file; heads that have a table of their own are said by a negative vocabulary."""

    model: int
    hidden: int
    layers: int
    heads: int
    kv: int
    vocab_size: int
    max_length: int

    @property
    def dim(self) -> int:
        """How wide a head is."""
        return self.model // self.heads

    @property
    def is_valid(self) -> bool:
        """Whether these can be sizes of a model at all."""
        sizes = (*self[:5], abs(self.vocab_size), self.max_length)
        return min(sizes) > 0 and not self.model % self.heads and not self.heads % self.kv and not self.dim % 2

    @property
    def file_size(self) -> int:
        """How long the file is; worked out before anything is listed, for sizes may be nonsense.

        >>> Llama2cHeader(64, 172, 5, 8, 4, 512, 512).file_size
        1056540
        """
        model, hidden, kv = self.model, self.hidden, self.kv * self.dim
        each = 2 * model + 2 * model * model + 2 * kv * model + 3 * hidden * model
        tables = (1 + (self.vocab_size < 0)) * abs(self.vocab_size) * model
        numbers = tables + self.layers * each + model + self.max_length * 2 * (self.dim // 2)
        return HEADER.size + 4 * numbers

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor, in the order of the file; those of one kind follow each other, layer by layer."""
        tokens, model, hidden, kv = abs(self.vocab_size), self.model, self.hidden, self.kv * self.dim
        each: dict[str, tuple[int, ...]] = {"rms_att": (model,), "wq": (model, model), "wk": (kv, model)}
        each |= {"wv": (kv, model), "wo": (model, model), "rms_ffn": (model,)}
        each |= {"w1": (hidden, model), "w2": (model, hidden), "w3": (hidden, model)}
        layers = {f"{layer}.{name}": shape for name, shape in each.items() for layer in range(self.layers)}
        angles = dict.fromkeys(("angles_cos", "angles_sin"), (self.max_length, self.dim // 2))
        head = {"wcls": (tokens, model)} if self.vocab_size < 0 else {}
        return {"tokens": (tokens, model), **layers, "rms_final": (model,), **angles, **head}

    @property
    def model_spec(self) -> ModelSpec:
        """The model: a Llama, but for the order of some rows."""
        sizes = {"hidden_size": self.model, "intermediate_size": self.hidden, "num_hidden_layers": self.layers}
        sizes |= {"num_attention_heads": self.heads, "num_key_value_heads": self.kv, "vocab_size": abs(self.vocab_size)}
        config = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": self.max_length,
        }
        rest = {"rope_theta": ROPE_BASE, "rms_norm_eps": NORM_EPS, "tie_word_embeddings": self.vocab_size > 0}
        return described_by(config | sizes | rest)


class Llama2cTensors:
    """The tensors of such a file."""

    def __init__(self, where: Path) -> None:
        self.path = where
        try:
            with where.open("rb") as file:
                self.header = _read_header(where, file.read(HEADER.size), where.stat().st_size)
        except OSError as error:
            raise SpecError(f"{where} cannot be read: {error.strerror}; give a file of {FORMAT_NAME}") from None
        self.infos: Mapping[str, TensorInfo] = {
            name: TensorInfo(shape, "F32") for name, shape in self.header.shapes.items()
        }

    def iter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, in the order of the file, which stays on disk until one is looked at."""
        count, at = self.header.file_size // 4, HEADER.size // 4
        numbers = torch.from_file(str(self.path), shared=False, size=count, dtype=torch.float32)
        for name, shape in self.header.shapes.items():
            size = math.prod(shape)
            yield name, numbers[at : at + size].view(shape)
            at += size


def load_llama2c(path: Path, dropout: float = 0.0, tokenizer: Path | None = None) -> Transformer:
    """The model in a file of llama2.c, with the tokenizer of its size that lies beside it, or the one that is named."""
    stored = Llama2cTensors(path)
    _check_rope_base(stored)
    tokens = abs(stored.header.vocab_size)
    beside = (path.parent / name for name in (f"tok{tokens}.bin", "tokenizer.bin"))
    found = tokenizer or next((one for one in beside if one.is_file()), None)
    usage = (
        ProcessorSpec()
        if found is None
        else ProcessorSpec((BOS_ID,), end=(BOS_ID,), tokenizer=make_tokenizer_json(found, tokens))
    )
    net = build_from_weights(stored.header.model_spec, get_weight_names(FORMAT_NAME), stored, dropout)
    net.usage = usage
    return net


def _read_header(path: Path, first: bytes, size: int) -> Llama2cHeader:
    """The sizes, if the file is just as long as they say."""
    if len(first) < HEADER.size:
        raise SpecError(f"{path} is {size} bytes long, too short for a file of {FORMAT_NAME}; copy the file again")
    header = Llama2cHeader(*HEADER.unpack(first))
    if header.is_valid and size == header.file_size:
        return header
    if header.model == MAGIC:
        raise SpecError(f"{path} is of version {header.hidden} of {FORMAT_NAME}; export it in its first, --version 0")
    if first.startswith(PICKLES):
        raise SpecError(
            f"{path} is a pickle, which runs code when it is read; give safetensors, or a file of {FORMAT_NAME}"
        )
    if not header.is_valid:
        raise SpecError(
            f"{path} begins with {list(header)}, which are no sizes of a model; give a file of {FORMAT_NAME}"
        )
    raise SpecError(f"{path} is {size:,} bytes long, its sizes ask for {header.file_size:,}; copy the file again")


def _check_rope_base(stored: Llama2cTensors) -> None:
    """Refuse the angles of another base, which a file holds without saying so."""
    header = stored.header
    rate = ROPE_BASE ** (-torch.arange(0, header.dim, 2, dtype=torch.float64) / header.dim)
    angle = torch.arange(header.max_length, dtype=torch.float64)[:, None] * rate
    for name, tensor in stored.iter_tensors():
        if name.startswith("angles_"):
            wanted = angle.cos() if name.endswith("cos") else angle.sin()
            if not bool(((tensor - wanted).abs() < ROPE_TOLERANCE).all()):
                raise SpecError(
                    f"{stored.path} holds {name[7:]} of angles that are not those of the base {ROPE_BASE:.0f}; "
                    "write it as a folder of transformers, which can say another base"
                )
