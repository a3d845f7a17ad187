"""Checkpoints of DCFormer, DCPythia and collaborative BERT: names of their published codes,
formulas written anew.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

import headwise as hw
from headwise.cli import main
from headwise.models.families import PUBLISHED_MODELS, read_model_spec
from headwise.models.model_spec import ModelTable
from headwise.util.errors import SpecError

DIM, HEADS, LAYERS, TOKENS, HIDDEN, WINDOW = 24, 3, 3, 31, 20, 4


HEAD_DIM, RANK = DIM // HEADS, 2


FACTORS = 2 * RANK * HEADS  # hidden units of the factors


CONFIG = {
    "dim": DIM,
    "n_head": HEADS,
    "n_layer": LAYERS,
    "vocab_size": TOKENS,
    "intermediate_size": HIDDEN,
}


CONFIG |= {"window_size": WINDOW, "block_size": 64, "norm_eps": 1e-5, "tie_word_embeddings": False}


KINDS = {
    "dcformer": {"architectures": ["DCFormer"], "use_qk_norm": False, "rope_base": 500},
    "dcpythia": {
        "architectures": ["DCPythia"],
        "use_qk_norm": True,
        "rope_base": 100,
        "rotary_pct": 0.5,
    },
}


def make_tensors(kind: str) -> dict[str, Tensor]:
    """Random tensors with the names and shapes of the published code, its
    joined copies included.
    """
    torch.manual_seed(1)
    is_pythia = kind == "dcpythia"
    shapes: dict[str, tuple[int, ...]] = {
        "tok_embeddings.weight": (TOKENS, DIM),
        "output.weight": (TOKENS, DIM),
    }
    norms = ["norm"]
    for n in range(LAYERS):
        at = f"layers.{n}"
        shapes |= {
            f"{at}.attention.wqkv.weight": (3 * DIM, DIM),
            f"{at}.attention.wo.weight": (DIM, DIM),
        }
        shapes |= {
            f"{at}.feed_forward.w1.weight": (HIDDEN, DIM),
            f"{at}.feed_forward.w2.weight": (DIM, HIDDEN),
        }
        compose = f"{at}.attention.dyn_w_proj"
        shapes |= {f"{compose}.dw1": (DIM, 1, 4, FACTORS), f"{compose}.dd": (DIM, 1, 4 * HEADS)}
        shapes |= {
            f"{compose}.qkw": (1, 4, FACTORS, 2 * RANK, HEADS),
            f"{compose}.dw_m": (DIM, 4 * FACTORS + 4 * HEADS),
        }
        shapes |= {f"{compose}.pre_proj.w": (1, HEADS, HEADS)}
        norms += [f"{at}.attention_norm", f"{at}.ffn_norm"]
        if is_pythia:
            shapes |= {f"{at}.attention.{side}_norm.scale": (HEAD_DIM,) for side in "qk"}
            shapes |= {f"{at}.attention.wqkv.bias": (3 * DIM,), f"{at}.attention.wo.bias": (DIM,)}
            shapes |= {
                f"{at}.feed_forward.w1.bias": (HIDDEN,),
                f"{at}.feed_forward.w2.bias": (DIM,),
            }
        else:
            shapes |= {f"{at}.feed_forward.w3.weight": (HIDDEN, DIM)}
    shapes |= {f"{norm}.weight": (DIM,) for norm in norms}
    shapes |= {f"{norm}.bias": (DIM,) for norm in norms if is_pythia}
    return {name: torch.randn(shape, dtype=torch.float64) * 0.4 for name, shape in shapes.items()}


def normalise(x: Tensor, t: dict[str, Tensor], name: str, kind: str) -> Tensor:
    if kind == "dcpythia":
        x = x - x.mean(-1, keepdim=True)
        return (
            x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * t[f"{name}.weight"]
            + t[f"{name}.bias"]
        )
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * t[f"{name}.weight"]


def rotate(x: Tensor, base: float, rotated: int) -> Tensor:
    """[T, heads, channels]: channel i and i + rotated / 2 form a complex number."""
    half = rotated // 2
    angles = torch.arange(len(x))[:, None] * torch.tensor(
        [base ** (-2 * i / rotated) for i in range(half)], dtype=torch.float64
    )
    turned = (
        torch.complex(x[..., :half], x[..., half:rotated])
        * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    return torch.cat([turned.real, turned.imag, x[..., rotated:]], -1)


def compose(a_N: Tensor, factors: dict[str, Tensor]) -> Tensor:
    """One vector over heads: a + sum of (a . w1) w2 over ranks, and a * g, of the query and of the
    key.
    """
    total = a_N.clone()
    for side in ("query", "key"):
        for r in range(RANK):
            total = total + (a_N @ factors[f"{side} w1"][r]) * factors[f"{side} w2"][r]
        total = total + a_N * factors[f"{side} gate"]
    return total


def attend(x: Tensor, t: dict[str, Tensor], n: int, kind: str) -> Tensor:
    at, options = f"layers.{n}.attention", KINDS[kind]
    biases = t.get(f"{at}.wqkv.bias", torch.zeros(3 * DIM).double())
    q, k, v = (
        y.view(len(x), HEADS, HEAD_DIM)
        for y in (x @ t[f"{at}.wqkv.weight"].T + biases).chunk(3, -1)
    )
    if kind == "dcpythia":
        q, k = (
            y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * t[f"{at}.{side}_norm.scale"]
            for y, side in ((q, "q"), (k, "k"))
        )
    rotated = int(HEAD_DIM * options.get("rotary_pct", 1.0))
    q, k = rotate(q, options["rope_base"], rotated), rotate(k, options["rope_base"], rotated)
    hidden = F.gelu(torch.einsum("td,dck->tck", x, t[f"{at}.dyn_w_proj.dw1"][:, 0]))
    both = torch.einsum("tck,ckim->tcim", hidden, t[f"{at}.dyn_w_proj.qkw"][0])
    w1, w2 = both[:, :, :RANK], both[:, :, RANK:]
    w1 = w1 / (w1.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    gate = torch.tanh(x @ t[f"{at}.dyn_w_proj.dd"][:, 0]).view(len(x), 4, HEADS)

    def factors(phase: int, i: int, j: int) -> dict[str, Tensor]:
        rows = {"query": (i, 2 * phase), "key": (j, 2 * phase + 1)}
        pieces = {"w1": w1, "w2": w2, "gate": gate}
        return {
            f"{side} {name}": piece[row]
            for side, row in rows.items()
            for name, piece in pieces.items()
        }

    out = []
    for i in range(len(x)):
        first = 0 if n % 2 else max(0, i - WINDOW + 1)
        keys = range(first, i + 1)
        scores = [
            compose((q[i] * k[j]).sum(-1) / math.sqrt(HEAD_DIM), factors(0, i, j)) for j in keys
        ]
        weights = torch.stack(scores).softmax(0)
        weights = torch.stack(
            [compose(weights[place], factors(1, i, j)) for place, j in enumerate(keys)]
        )
        out.append(torch.einsum("sn,snd->nd", weights, v[first : i + 1]).flatten())
    return torch.stack(out) @ t[f"{at}.wo.weight"].T + t.get(
        f"{at}.wo.bias", torch.zeros(DIM).double()
    )


def feed(x: Tensor, t: dict[str, Tensor], n: int, kind: str) -> Tensor:
    at = f"layers.{n}.feed_forward"
    up = x @ t[f"{at}.w1.weight"].T
    if kind == "dcpythia":
        return F.gelu(up + t[f"{at}.w1.bias"]) @ t[f"{at}.w2.weight"].T + t[f"{at}.w2.bias"]
    return (F.silu(up) * (x @ t[f"{at}.w3.weight"].T)) @ t[f"{at}.w2.weight"].T


def run(ids: list[int], t: dict[str, Tensor], kind: str) -> Tensor:
    """Logits [tokens, vocabulary] of one sequence."""
    x = t["tok_embeddings.weight"][ids]
    for n in range(LAYERS):
        h = x + attend(normalise(x, t, f"layers.{n}.attention_norm", kind), t, n, kind)
        x = h + feed(
            normalise(x if kind == "dcpythia" else h, t, f"layers.{n}.ffn_norm", kind), t, n, kind
        )
    return normalise(x, t, "norm", kind) @ t["output.weight"].T


def write(folder: Path, kind: str, **changes: object) -> dict[str, Tensor]:
    folder.mkdir()
    tensors = make_tensors(kind)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({"model_type": kind} | CONFIG | KINDS[kind] | changes)
    )
    return tensors


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_checkpoint_computes_what_the_published_code_does(kind: str, tmp_path: Path):
    tensors = write(tmp_path / "model", kind)
    net = hw.load(tmp_path / "model").double().eval()
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    expected = run(ids, tensors, kind)
    actual = net(torch.tensor([ids]))[0]
    assert (actual - expected).abs().max() < 1e-10 * expected.abs().max()
    cached = hw.generate(net, ids, max_new_tokens=4)
    assert cached == [int(run([*ids, *cached[:n]], tensors, kind)[-1].argmax()) for n in range(4)]
    assert [spec.pattern.text for _, spec in net.spec.attention_specs()] == [
        "window(4)",
        "causal()",
        "window(4)",
    ]


REFUSED = {
    "no composition in training": (
        {"use_dcmha": False},
        "use_dcmha = False composes no heads in training",
    ),
    "shared keys": ({"n_local_heads": 1}, "n_local_heads = 1 is not n_head = 3"),
    "factors of queries alone": (
        {"query_wise": True},
        "query_wise = True leaves out the factors of keys in decoding",
    ),
    "gates": ({"mgate": True}, "mgate = True adds gates that are not described"),
    "another head dimension": ({"head_dim": 16}, "head_dim = 16 is not dim / n_head = 8"),
    "unknown windows": ({"window_type": "GG"}, "window_type = 'GG' is not known"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_configurations_that_are_not_described_are_refused(name: str):
    changes, reason = REFUSED[name]
    with pytest.raises(SpecError, match=reason):
        hw.families.read_model_spec(
            {"model_type": "dcformer"} | CONFIG | KINDS["dcformer"] | changes
        )


def test_window_types_repeat_over_layers():
    keys = {"model_type": "dcformer", "n_layer": 6, "window_type": "LGLL"}
    patterns = [
        spec.pattern.text
        for _, spec in hw.families.read_model_spec(CONFIG | keys).attention_specs()
    ]
    assert patterns == [
        "window(256)",
        "causal()",
        "window(256)",
        "window(256)",
        "window(256)",
        "causal()",
    ]
    published = hw.families.read_model_spec(
        {"model_type": "dcpythia", "dim": 4096, "intermediate_size": 16384}
        | {
            "n_head": 32,
            "n_layer": 32,
            "vocab_size": 50257,
            "rotary_pct": 0.25,
            "use_qk_norm": True,
        }
    )
    assert 6.8e9 < hw.costs.count_parameters(published) < 7.2e9


BERT = {
    "model_type": "bert",
    "hidden_size": 12,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "vocab_size": 23,
}


BERT |= {
    "intermediate_size": 17,
    "max_position_embeddings": 16,
    "architectures": ["BertForMaskedLM"],
}


WIDTHS = {0: 5, 1: 9}


class CollaborativeSelf(torch.nn.Module):
    """Takes the place of `attention.self`, with the parameters of the released code."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = (
            torch.nn.Linear(12, width, bias=False),
            torch.nn.Linear(12, width, bias=False),
        )
        self.content_bias, self.value = torch.nn.Linear(12, 3, bias=False), torch.nn.Linear(12, 12)
        self.mixing = torch.nn.Parameter(torch.randn(3, width))

    def forward(self, x: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        heads = []
        for head, values in enumerate(self.value(x).chunk(3, -1)):
            scores = (self.query(x) * self.mixing[head]) @ self.key(x).transpose(-2, -1)
            scores = (scores + self.content_bias(x)[..., head][:, None]) / (
                self.mixing.shape[1] / 3
            ) ** 0.5
            heads.append(scores.softmax(-1) @ values)
        return torch.cat(heads, -1), None


def make_collaborative_bert() -> torch.nn.Module:
    torch.manual_seed(0)
    config = BertConfig(**{key: value for key, value in BERT.items() if key != "model_type"})
    model = BertForMaskedLM(config)
    for layer, width in WIDTHS.items():
        model.bert.encoder.layer[layer].attention.self = CollaborativeSelf(width)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.5)
    return model.double().eval()


@torch.no_grad()
def test_bert_with_collaborative_heads_is_read(tmp_path: Path):
    """The other layers of transformers' own BERT around attention by the formula of the paper."""
    model = make_collaborative_bert()
    tensors = {
        name: tensor for name, tensor in model.state_dict().items() if "position_ids" not in name
    }
    tensors.pop("cls.predictions.decoder.weight", None)
    tensors.pop("cls.predictions.decoder.bias", None)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    net = hw.load(tmp_path)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])
    assert (net.double()(ids) - model(ids).logits).abs().max() < 1e-10
    projects = [str(spec.project) for _, spec in net.spec.attention_specs()]
    assert [
        f"width={width}" in project
        for width, project in zip(WIDTHS.values(), projects, strict=True)
    ] == [True] * 2
    hw.save(net, tmp_path / "saved")
    assert torch.equal(hw.load(tmp_path / "saved")(ids), net(ids))


def test_a_layer_without_its_mixing_vectors_is_refused(tmp_path: Path):
    tensors = make_collaborative_bert().state_dict()
    tensors = {
        name: t
        for name, t in tensors.items()
        if "decoder" not in name and "position_ids" not in name
    }
    del tensors["bert.encoder.layer.1.attention.self.mixing"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    with pytest.raises(SpecError, match=r"layer\.1\.attention\.self") as excinfo:
        hw.load(tmp_path)
    assert "\n" not in str(excinfo.value)


# --- published models by name ---


# millions of parameters by the papers, and how exactly they say so
SIZES = {
    "transformer-base": (65, 2),
    "transformer-big": (213, 2),
    "gpt2": (124, 0.5),
    "gpt3": (175_000, 500),
    "bert-base": (110, 1),
    "llama-65b": (65_200, 100),
    "llama-3-8b": (8_000, 50),
    "deepseek-v3": (671_000, 500),
    "gpt-oss-20b": (20_900, 50),
    "gpt-oss-120b": (116_800, 50),
    "vit-base": (86, 0.5),
}


def test_every_model_has_a_size():
    assert set(SIZES) == set(PUBLISHED_MODELS)


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_those_of_the_paper(name: str):
    millions, tolerance = SIZES[name]
    assert ModelTable(read_model_spec(name)).to_dict["parameters"] / 1e6 == pytest.approx(
        millions, abs=tolerance
    )


def test_commands_take_their_names(capsys: pytest.CaptureFixture[str]):
    assert main(["cost", "llama-65b", "--context", "2048"]) == 0
    assert "llama-65b: decoder of 80 layers" in capsys.readouterr().out
    assert main(["spec", "gpt3"]) == 0
    assert "layers 0 to 95, 96 x" in capsys.readouterr().out
    assert main(["cost", "gpt9"]) == 2
    assert "did you mean 'gpt3'" in capsys.readouterr().err
    assert main(["cost", "gpt3", "--heads", "4"]) == 2
    assert "gpt3 has its own heads; leave it out" in capsys.readouterr().err


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    with pytest.raises(ValueError, match="holds neither"):
        read_model_spec("gpt2")
