"""Which models of transformers headwise sees and silences: `python docs/coverage.py [TYPE...]` writes docs/coverage.md.

Every text and vision family that can be built tiny from its config alone is built with random weights and run once. A
site is seen when each head's weights, computed again from what was captured, equal those of the model's own eager
attention; it is silenced when a head silenced while the model runs equals a copy whose output projection has lost that
head's columns. Nothing is downloaded.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_MAPPING

import headwise as hw
from headwise.hub.finding import found
from headwise.hub.routes import interface, projection
from headwise.hub.routes.base import Found
from headwise.hub.watching import Core, Seen, watching

SECONDS, LARGEST, CLOSE = 40, 4e7, 1e-5
WORDS = 99
SMALL = {
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64, "embed_dim": 64, "hidden_dim": 64, "model_dim": 64,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "d_kv": 16,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "num_decoder_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "intermediate_size": 48, "d_ff": 48, "ffn_dim": 48, "n_inner": 48, "vocab_size": WORDS,
    "max_position_embeddings": 64, "n_positions": 64, "image_size": 32, "patch_size": 8, "num_channels": 3,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "embedding_size": 64, "num_mel_bins": 16, "max_source_positions": 13, "max_target_positions": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "rotary_dim": 8,
    "type_vocab_size": 2, "num_codebooks": 2,
}  # fmt: skip
MLA = {"deepseek_v2", "deepseek_v3", "axk1", "glm4_moe_lite", "kimi_k25", "mistral4", "minicpm3", "youtu"}


class Row(NamedTuple):
    """What came of one family."""

    family: str
    model: str
    route: str
    sites: int
    seen: str
    silenced: str
    why: str


def shrunk(config: Any, family: str) -> Any:
    """The config with small sizes, as far as it lets itself be changed."""
    for key, value in SMALL.items():
        try:
            told = getattr(config, key)
            if isinstance(told, int) and not isinstance(told, bool):
                setattr(config, key, value)
        except Exception:  # some sizes are said layer by layer, or follow from others
            continue
    if family in MLA:
        config.head_dim, config.num_key_value_heads = 8, 4
    try:
        kinds = list(config.layer_types or [])
        if len(kinds) > 2:
            config.layer_types = [kinds[0], next((kind for kind in kinds if kind != kinds[0]), kinds[0])]
    except Exception:
        pass
    for name in getattr(config, "sub_configs", None) or {}:
        part = getattr(config, name, None)
        if part is not None:
            shrunk(part, family)
    return config


def inputs(model: nn.Module, config: Any) -> dict[str, Tensor]:
    """Something to read."""
    torch.manual_seed(1)
    ids, told = torch.randint(3, WORDS, (2, 7)), {}
    first = model.main_input_name
    if first == "input_ids":
        told["input_ids"] = ids
    elif first == "pixel_values":
        side = getattr(config, "image_size", 32)
        high, wide = side if isinstance(side, (list, tuple)) else (side, side)
        told["pixel_values"] = torch.randn(2, getattr(config, "num_channels", 3), high, wide)
    elif first == "input_features" and getattr(config, "max_source_positions", 0) == 13:
        told["input_features"] = torch.randn(2, 16, 26)
    else:
        raise ValueError(f"it reads {first}")
    if getattr(config, "is_encoder_decoder", False):
        told["decoder_input_ids"] = ids[:, :5]
    return told


def readable(model: nn.Module, config: Any) -> dict[str, Tensor]:
    """What the model could be run on: its first input, or words and a picture together."""
    told = inputs(model, config)
    try:
        model(**told)
    except Exception:
        vision = getattr(config, "vision_config", None)
        if vision is None or "decoder_input_ids" in told:
            raise
        side = getattr(vision, "image_size", 32)
        both = {"input_ids": torch.randint(3, WORDS, (2, 7)), "pixel_values": torch.randn(2, 3, side, side)}
        model(**both)
        return both
    return told


class Keep:
    """A watcher that keeps the first of what an attention worked with."""

    wants_core = True

    def __init__(self) -> None:
        self.seen: Core | None = None

    def core(self, seen: Core) -> None:
        """Keep it."""
        self.seen = self.seen or seen

    def heads(self, z: Tensor) -> None:
        """Leave it."""


@contextmanager
def own_weights() -> Iterator[dict[int, Tensor]]:
    """What the functions of the interface give as weights, by module."""
    given: dict[int, Tensor] = {}
    original = interface._watched

    def noting(function: Any, name: str, module: nn.Module, *said: Any, **more: Any) -> Any:
        def also(*a: Any, **k: Any) -> Any:
            got = function(*a, **k)
            if isinstance(got[1], Tensor):
                given.setdefault(id(module), got[1])
            return got

        return original(also, name, module, *said, **more)

    interface._watched = noting
    try:
        yield given
    finally:
        interface._watched = original


def output(said: Any) -> Tensor:
    """The first tensor of numbers that a model gives."""
    values = said.values() if hasattr(said, "values") else said
    return next(value for value in values if isinstance(value, Tensor) and value.is_floating_point())


def seen(model: nn.Module, told: dict[str, Tensor], those: list[Found]) -> str:
    """Whether all weights come out as the model's own; else why not."""
    keeps = {one.module: Keep() for one in those if isinstance(one.route, interface.Interface)}
    if not keeps:
        return "by output_attentions alone"
    with own_weights() as given, watching({m: (keep,) for m, keep in keeps.items()}, interface.Interface().stands()):
        model(**told)
    called = {module: keep.seen for module, keep in keeps.items() if isinstance(keep.seen, Seen)}
    if not called:
        return "none was called"
    for module, core in called.items():
        own = given.get(id(module))
        if core.odd:
            return core.odd
        if own is None:
            return "it gives no weights to compare with"
        for head in range(own.shape[1]):
            worst = float((core.rows(head) - own[:, head].float()).abs().max())
            if not worst <= CLOSE:
                return f"weights differ by {worst:.0e}"
    return "yes"


def projected(model: nn.Module, site: hw.Site) -> nn.Module | None:
    """The projection behind the heads of a site, found by its name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for out in (*projection.NAMES, "^output.dense", "^attention_output.dense", "^output.out_proj"):
        last = modules.get(projection._path(site.path, out))
        if last is not None and projection._width(last) and projection._width(last) % max(1, site.q) == 0:
            return last
    return None


def silenced(model: nn.Module, told: dict[str, Tensor], those: list[Found]) -> str:
    """Whether silencing equals a copy without the columns, at the first and the last site that is called."""
    whole = output(model(**told))
    for one in (those[0], those[-1]):
        site = one.site
        with hw.silence(model, [(site.name, 1)]):
            quiet = output(model(**told))
        other = copy.deepcopy(model)
        last = projected(other, site)
        if last is None:
            return "no projection of a known name to compare with"
        width = projection._width(last) // site.q
        columns = slice(width, 2 * width)
        if isinstance(last, nn.Linear):
            last.weight[:, columns] = 0
        else:
            last.weight[columns] = 0
        expected = output(other(**told))
        worst = float((quiet - expected).abs().max()) / max(1.0, float(expected.abs().max()))
        if not worst <= CLOSE:
            return f"the two ways differ by {worst:.0e}"
        if torch.equal(quiet, whole):
            return "nothing changed"
    return "yes"


def judged(family: str) -> Row | None:
    """One row of the table; None of what has no text or picture to read."""
    kind = CONFIG_MAPPING[family]
    if kind not in MODEL_MAPPING:
        return None
    try:
        cls = MODEL_MAPPING[kind]
    except ValueError:  # a name that transformers maps and has not
        return None
    cls = cls[0] if isinstance(cls, tuple) else cls
    row = Row(family, cls.__name__, "", 0, "no", "no", "")
    step = "its config"
    try:
        config = shrunk(kind(), family)
        step = "building it"
        torch.manual_seed(0)
        model = built(cls, config)
        if sum(p.numel() for p in model.parameters()) > LARGEST:
            return row._replace(why="its config has no small form")
        step = "running it"
        told = readable(model, config)
        step = "looking"
        those = found(model)
        if not those:
            return row._replace(why="no attention of separate heads was found")
        routes = sorted({type(one.route).__name__.lower() for one in those})
        row = row._replace(route=" and ".join(routes), sites=len(those))
        see = seen(model, told, those)
        quiet = silenced(model, told, those)
        why = "; ".join(dict.fromkeys(said for said in (see, quiet) if said != "yes"))
        return row._replace(seen="yes" if see == "yes" else "no", silenced="yes" if quiet == "yes" else "no", why=why)
    except Exception as error:  # whatever a family raises is its row's reason
        return row._replace(why=f"{step}: {' '.join(str(error).split())[:90] or type(error).__name__}")


def built(cls: Any, config: Any) -> nn.Module:
    """A model with weights large enough for attention to be uneven."""
    try:
        model = cls._from_config(config, attn_implementation="eager")
    except (KeyError, ValueError, TypeError):
        model = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return model.eval()


def page(rows: list[Row]) -> str:
    """The document."""
    counts = Counter((row.seen, row.silenced) for row in rows)
    both = counts["yes", "yes"]
    quiet = sum(row.silenced == "yes" for row in rows)
    lines = [
        "# Coverage", "",
        f"Families of transformers {transformers.__version__} that read text or pictures, built tiny with random",
        "weights by `python docs/coverage.py`, which says what is meant by seen and silenced.", "",
        f"Of {len(rows)} families {both} are seen and silenced, {quiet} are silenced.", "",
        "| family | class | route | sites | seen | silenced | why not |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    order = sorted(rows, key=lambda row: (row.silenced != "yes", row.seen != "yes", row.family))
    told = [[str(cell).replace("|", "/") for cell in row] for row in order]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in told), ""])


def late(*_: object) -> None:
    """What a family that takes too long meets."""
    raise TimeoutError(f"it takes more than {SECONDS} s")


def main(argv: list[str]) -> int:
    """Judge all families, or those named, and write or print the page."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, late)
    rows: list[Row] = []
    with torch.no_grad():
        for family in argv or sorted(CONFIG_MAPPING):
            signal.alarm(SECONDS)
            row = judged(family)
            signal.alarm(0)
            rows += [row] if row is not None else []
    if argv:
        print(page(rows))
    else:
        (Path(__file__).parent / "coverage.md").write_text(page(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
