"""Tables of what headwise does with the families of transformers.

python tools/coverage_table.py sites [TYPE...]
    Coverage by tracing and ablation, in docs/coverage.csv; with types, prints their rows. Every text
    and vision family that can be built tiny from its config alone is built with random weights and
    run once. A family is traced if the attention weights recomputed from the captured call equal
    those of the model's own eager attention. It is ablated if zero-ablating a head gives the same
    output as a copy of the model whose output projection has zeros in the columns of that head;
    `find_projection` finds both without headwise. Nothing is downloaded.
python tools/coverage_table.py config-fields [FAMILY...]
    What becomes of each field of config.json in each family that hw.load builds, in
    docs/config-fields.json. Every field is compared with transformers for several values. With names
    of families, only their rows are replaced.
"""

from __future__ import annotations

import copy
import csv
import gc
import inspect
import json
import os
import resource
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_MAPPING
from transformers.pytorch_utils import Conv1D

import headwise as hw
from headwise.observe.inspect.adapters import known_interfaces
from headwise.observe.inspect.attention_sites import find_attention
from headwise.observe.inspect.hooks import AttentionHook, SiteModule, install_hooks
from headwise.observe.inspect.site import (
    AttentionInputs,
    ObservedCall,
    UnreadableCall,
    WeightsOnlyCall,
)

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support.config_fields import BASES, classify_fields, list_outcomes  # noqa: E402
from support.head_means import zero_columns_of  # noqa: E402
from support.small_configs import WORDS, configs  # noqa: E402

# --- Sites ---------------------------------------------------------------------------------------

os.environ["TRANSFORMERS_VERBOSITY"] = "error"


SECONDS, MEMORY, TOLERANCE = 15, 8 << 30, 1e-5
SITES_FILE = Path(__file__).resolve().parents[1] / "docs" / "coverage.csv"


# --- Tiny models of families, built from their configs, and inputs for them -----------------------

LARGEST = 4e7
NUM_HEADS = (
    "num_attention_heads",
    "num_heads",
    "n_heads",
    "n_head",
    "num_q_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "heads",
)
HEAD_WIDTHS = (
    ("v_head_dim",),
    (
        "head_dim",
        "attention_head_size",
        "head_size",
        "d_kv",
        "key_value_proj_dim",
        "dim_head",
        "dim_per_head",
    ),
)
HIDDEN_SIZES = ("embed_dim", "hidden_size", "d_model", "n_embd", "dim")
OUTPUT_PROJECTIONS = (
    "o_proj",
    "o_proj.linear",
    "out_proj",
    "c_proj",
    "dense",
    "out_lin",
    "wo",
    "Wo",
    "o",
    "proj",
    "projection",
    "projection_layer",
    "to_out",
    "to_out.0",
    "linear_out",
    "fc_out",
    "out",
    "o_a_proj",
    "output",
    "output_projection",
    "attention_out",
    "^output.dense",
    "^attention_output.dense",
    "^output.out_proj",
    "^output",
    "^o_proj",
    "^out_proj",
    "^dense",
)


def build_model(cls: Any, config: Any) -> nn.Module:
    """Return a model with weights so large that attention is not uniform."""
    with torch.device("meta"):
        if sum(p.numel() for p in cls(config).parameters()) > LARGEST:
            raise ValueError("its config has no small form")
    torch.manual_seed(0)
    try:
        model = cls._from_config(config, attn_implementation="eager")
    except (KeyError, ValueError, TypeError):
        model = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return model.eval()


def find_inputs(model: nn.Module, config: Any) -> dict[str, Tensor]:
    """Return the first inputs that the model runs on: its check_sites input, or text and an image
    together.
    """
    first_error: Exception | None = None
    for inputs in candidate_inputs(model, config):
        try:
            torch.manual_seed(2)
            model(**inputs)
            return inputs
        except Exception as error:
            first_error = first_error or error
    raise first_error or ValueError(f"it reads {model.main_input_name}")


def candidate_inputs(model: nn.Module, config: Any) -> Iterator[dict[str, Tensor]]:
    """Yield inputs, the most likely to work first."""
    torch.manual_seed(1)
    ids, first = torch.randint(3, WORDS, (2, 7)), model.main_input_name
    more = {"decoder_input_ids": ids[:, :5]} if getattr(config, "is_encoder_decoder", False) else {}
    if first == "input_ids":
        yield {"input_ids": ids, **more}
        if "use_cache" in inspect.signature(model.forward).parameters:
            yield {"input_ids": ids, "use_cache": False, **more}
        yield {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
        yield {"input_ids": ids, "bbox": torch.zeros(2, 7, 4, dtype=torch.long), **more}
    part = getattr(config, "vision_config", config)
    if first == "pixel_values" or part is not config:
        for image in images(part):
            yield (
                {first: image, **more}
                if first != "input_ids"
                else {"input_ids": ids, "pixel_values": image}
            )
            yield {"input_ids": ids, "pixel_values": image, **more}
    if first == "pixel_values_videos":
        yield from ({first: image[:, None].repeat(1, 16, 1, 1, 1)} for image in images(part))
    if first == "input_values":
        yield {first: torch.randn(2, 4000), **more}
        yield {first: torch.randn(2, 1, 4000), **more}
    if first in ("input_features", "input_values"):
        for bins in (16, 80, 128, 160):
            yield {first: torch.randn(2, bins, 26), **more}
            yield {first: torch.randn(2, 64, bins), **more}


def images(config: Any) -> Iterator[Tensor]:
    """Yield images of the size in the config and of common sizes, then a short video."""
    channels, size = getattr(config, "num_channels", 3), getattr(config, "image_size", 32)
    size = size if isinstance(size, (list, tuple)) else (size, size)
    for height, width in dict.fromkeys((tuple(size), (32, 32), (224, 224))):
        yield torch.randn(2, channels, height, width)
    yield torch.randn(2, getattr(config, "num_frames", 8), channels, *size)


# --- Outputs of two runs, and captured attention weights with those of the model ------------------


class Recorder(AttentionHook):
    """Hook that records the first call of an attention layer and its first head outputs."""

    def __init__(self) -> None:
        self.call: ObservedCall | None = None
        self.outputs: Tensor | None = None

    def on_call(self, call: ObservedCall, /) -> None:
        """Record the first call."""
        self.call = self.call or call

    def on_head_outputs(self, z: Tensor, /) -> None:
        """Record the first head outputs."""
        self.outputs = z.detach().clone() if self.outputs is None else self.outputs


@contextmanager
def record_own_weights() -> Iterator[dict[int, Tensor]]:
    """Yield a dictionary that collects the weights returned by attention functions, by the id of
    the module.
    """
    weights: dict[int, Tensor] = {}
    original = known_interfaces._call_with_hooks

    def call_and_record(
        function: Any, name: str, module: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        def recording(*args: Any, **kwargs: Any) -> Any:
            outputs = function(*args, **kwargs)
            if isinstance(outputs[1], Tensor):
                weights.setdefault(id(module), outputs[1])
            return outputs

        return original(recording, name, module, *args, **kwargs)

    known_interfaces._call_with_hooks = call_and_record
    try:
        yield weights
    finally:
        known_interfaces._call_with_hooks = original


def tensors(outputs: Any) -> Iterator[Tensor]:
    """Yield every floating-point tensor in the outputs of a model."""
    if isinstance(outputs, Tensor):
        if outputs.is_floating_point():
            yield outputs.detach().float()
    elif isinstance(outputs, (dict, list, tuple)):
        for value in outputs.values() if isinstance(outputs, dict) else outputs:
            yield from tensors(value)


def run(model: nn.Module, inputs: dict[str, Tensor], **options: Any) -> Any:
    """Run a model from a fixed seed, because some models sample."""
    torch.manual_seed(2)
    return model(**inputs, **options)


def output_difference(outputs: Any, expected: Any) -> float:
    """Return the largest difference of two outputs, relative to the largest number (at least 1)."""
    pairs = [(a, b) for a, b in zip(tensors(outputs), tensors(expected), strict=True) if a.numel()]
    largest = max(
        [1.0, *(float(b[b.isfinite()].abs().max()) for _, b in pairs if b.isfinite().any())]
    )
    return max(float((a - b).nan_to_num(0, 0, 0).abs().max()) for a, b in pairs) / largest


def output_attentions(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return the weights of a model with output_attentions=True; none if it lacks this option."""
    try:
        outputs = run(model, inputs, output_attentions=True)
    except TypeError:
        return []
    weights = [value for key, value in outputs.items() if "attentions" in key]
    return [tensor for tensor in tensors(weights) if tensor.dim() == 4]


def weight_error(core: ObservedCall, own: Tensor) -> float:
    """Return the largest error of captured weights; those of a sliding window are compared by
    diagonal.
    """
    if isinstance(core, WeightsOnlyCall) and own.shape[:2] != core.weights.shape[:2]:
        return torch.inf
    if isinstance(core, WeightsOnlyCall) and own.shape[2:] != core.weights.shape[2:]:
        wide, (length, keys) = core.weights, own.shape[2:]  # a window of keys centred on the query
        if length > min(wide.shape[-2:]) or keys % 2 == 0:
            return torch.inf
        cells = [(t, t + n - keys // 2, n) for t in range(length) for n in range(keys)]
        return max(
            float((wide[..., t, s] - own[..., t, n]).abs().max())
            for t, s, n in cells
            if 0 <= s < length
        )
    rows = [core.head_weights(head).float() for head in range(own.shape[1])]
    same = all(row.shape == own[:, 0].shape for row in rows)
    return (
        max(float((row - own[:, n].float()).abs().max()) for n, row in enumerate(rows))
        if same
        else torch.inf
    )


# --- The check of a family, and the page ----------------------------------------------------------


class Row(NamedTuple):
    """The result for one family."""

    family: str
    model: str
    adapter: str
    sites: int
    traced: str
    ablated: str
    reason: str


class ReachedSite(NamedTuple):
    """A site that the input reaches, with what was recorded there."""

    module: SiteModule
    recorder: Recorder
    own: Tensor | None  # weights returned by the attention function of the model


def record_sites(
    model: nn.Module, inputs: dict[str, Tensor], sites: list[SiteModule]
) -> list[ReachedSite]:
    """Run the model; return every site that the input reaches, with its recorded call."""
    recorders = {site.module: Recorder() for site in sites}
    hooks = {module: (recorder,) for module, recorder in recorders.items()}
    with record_own_weights() as weights, install_hooks(hooks, sites):
        run(model, inputs)
    reached = [site for site in sites if recorders[site.module].outputs is not None]
    return [
        ReachedSite(site, recorders[site.module], weights.get(id(site.module))) for site in reached
    ]


def check_weights(model: nn.Module, inputs: dict[str, Tensor], sites: list[ReachedSite]) -> str:
    """Return "yes" if all recomputed weights equal those of the model, else the reason."""
    all_weights: list[Tensor] | None = None
    for site in sites:
        core = site.recorder.call
        if core is None:
            return site.module.site.observe.reason or "no call was captured"
        if isinstance(core, AttentionInputs) and core.unsupported:
            return core.unsupported
        if isinstance(core, UnreadableCall):
            return core.reason
        if all_weights is None and site.own is None:
            all_weights = output_attentions(model, inputs)
        candidates = [site.own] if site.own is not None else all_weights or []
        error = min([weight_error(core, own) for own in candidates], default=None)
        if error is None:
            return "the model returns no weights to compare with"
        if not error <= TOLERANCE:
            return f"weights differ by {error:.0e}"
    return "yes"


class OwnProjection(NamedTuple):
    """An output projection, its number of heads and their width."""

    path: str
    heads: int
    width: int


def find_projection(model: nn.Module, path: str) -> OwnProjection | None:
    """Return the output projection of the attention module at `path`, by names, sizes and the
    config alone.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    module, parent, parts = modules[path], path.rpartition(".")[0], path.split(".")
    around = [
        ".".join(parts[:end]) for end in reversed(range(len(parts) + 1))
    ]  # the innermost first
    sources = [module, *(getattr(modules[outer], "config", None) for outer in around)]
    heads = first_int(sources, NUM_HEADS)
    for name in OUTPUT_PROJECTIONS:
        place = (
            f"{parent}.{name[1:]}".strip(".")
            if name.startswith("^")
            else f"{path}.{name}".strip(".")
        )
        columns = count_columns(modules.get(place))
        columns *= getattr(modules.get(place), "n_groups", 1)  # of groups of heads, each apart
        if not columns:
            continue
        for names in HEAD_WIDTHS:
            width = first_int(sources, names)
            if heads * width == columns:
                return OwnProjection(place, heads, width)
        width = first_int([module], HEAD_WIDTHS[1]) or (
            first_int(sources, HIDDEN_SIZES) // heads if heads else 0
        )
        if (
            heads and width and columns % width == 0
        ):  # the projection may also read other channels, after those of the heads
            return OwnProjection(place, min(heads, columns // width), width)
    return None


def first_int(sources: list[Any], names: tuple[str, ...]) -> int:
    """Return the first of these attributes that is a positive int, by source and then by name; 0 if
    none is.
    """
    for source in sources:
        for name in names:
            try:
                value = getattr(source, name, None)
            except Exception:  # some sizes differ from layer to layer
                continue
            if type(value) is int and value > 0:
                return value
    return 0


def count_columns(layer: nn.Module | None) -> int:
    """Return the number of input channels of a linear layer; 0 if it is not one."""
    if isinstance(layer, nn.Linear):
        return layer.weight.shape[1]
    return layer.weight.shape[0] if isinstance(layer, Conv1D) else 0


def zero_columns(model: nn.Module, projection: OwnProjection, head: int) -> nn.Module:
    """Return a copy of the model whose output projection has zeros in the columns of one head."""
    pruned = copy.deepcopy(model)
    zero_columns_of(pruned.get_submodule(projection.path), head, projection.width)
    return pruned


def check_ablation(model: nn.Module, inputs: dict[str, Tensor], sites: list[ReachedSite]) -> str:
    """Return "yes" if ablating the first and the last head equals zero columns, at the ends of each
    class of sites.
    """
    original = run(model, inputs)
    has_effect = False
    by_class: dict[type[nn.Module], list[ReachedSite]] = {}
    for site in sites:
        by_class.setdefault(type(model.get_submodule(site.module.site.path)), []).append(site)
    for site in dict.fromkeys(
        site for of_class in by_class.values() for site in (of_class[0], of_class[-1])
    ):
        info = site.module.site
        projection = find_projection(model, info.path)
        if not info.ablate.possible:
            return info.ablate.reason
        if projection is None:
            return "no output projection has a usual name and the width of the heads"
        # A copy with zero columns changes every site that runs the same module.
        sharing = [other.module.site.name for other in sites if other.module.site.path == info.path]
        for head in sorted({0, projection.heads - 1}):
            with hw.ablate(model, [(name, head) for name in sharing]):
                ablated = run(model, inputs)
            error = output_difference(ablated, run(zero_columns(model, projection, head), inputs))
            if not error <= TOLERANCE:
                return f"ablation and zero columns differ by {error:.0e} at {info.name}"
            has_effect = has_effect or output_difference(ablated, original) > 0
    return "yes" if has_effect else "ablation does not change the output"


def check_family(family: str) -> Row | None:
    """Return the row of one family; None if transformers has no bare model of it."""
    kind = CONFIG_MAPPING[family]
    if kind not in MODEL_MAPPING:
        return None
    try:
        cls = MODEL_MAPPING[kind]
    except ValueError:  # a name in the mapping without a class
        return None
    cls = cls[0] if isinstance(cls, tuple) else cls
    row = Row(family, cls.__name__, "", 0, "no", "no", "")
    best: Row | None = None
    try:
        for config in configs(kind, family):
            result = check_config(row, cls, config)
            best = max(
                best or result, result, key=lambda row: (row.ablated, row.traced, row.sites > 0)
            )
            if result.ablated == "yes":
                break
    except Exception as error:
        best = best or row._replace(reason=f"config failed: {format_error(error)}")
    return best


def check_config(row: Row, cls: Any, config: Any) -> Row:
    """Return the row for one config."""
    step = "build failed"
    try:
        model = build_model(cls, config)
        step = "run failed"
        inputs = find_inputs(model, config)
        step = "check failed"
        sites = find_attention(model)
        if not any(site.site.ablate.possible for site in sites):
            hw.sites(model, inputs)
            sites = find_attention(model)
        if not sites:
            return row._replace(reason="no attention with separate heads was found")
        adapters = sorted({site.adapter for site in sites})
        row = row._replace(adapter=" and ".join(adapters), sites=len(sites))
        reached = record_sites(model, inputs, sites)
        if not reached:
            reasons = {site.site.ablate.reason for site in sites} - {""}
            return row._replace(
                reason="; ".join(sorted(reasons)) or "the test input reaches no site"
            )
        checks = [
            _run_check(check, model, inputs, reached) for check in (check_weights, check_ablation)
        ]
        traced, ablated = ("yes" if check == "yes" else "no" for check in checks)
        reason = "; ".join(dict.fromkeys(check for check in checks if check != "yes"))
        return row._replace(traced=traced, ablated=ablated, reason=reason)
    except Exception as error:  # any error of a family becomes the reason in its row
        return row._replace(reason=f"{step}: {format_error(error)}")


def _run_check(
    check: Any, model: nn.Module, inputs: dict[str, Tensor], sites: list[ReachedSite]
) -> str:
    """Return the result of a check, or the error that it raised."""
    try:
        return check(model, inputs, sites)
    except Exception as error:  # becomes the reason in the row
        return f"check failed: {format_error(error)}"


def format_error(error: Exception, length: int = 90) -> str:
    """Return the first characters of an error's message."""
    return " ".join(str(error).split())[:length] or type(error).__name__


def write_table(rows: list[Row], stream: TextIO) -> None:
    """Write the rows as CSV."""
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("family", "class", "adapter", "sites", "traced", "ablated", "reason"))
    writer.writerows(rows)


class FamilyTimeout(BaseException):
    """Raised when a family takes too long; not an Exception, so that no check takes it for an error
    of its own.
    """


def raise_timeout(*_: object) -> None:
    raise FamilyTimeout


def check_in_time(family: str) -> Row | None:
    """Return the row of one family, after at most `SECONDS` of processor time."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        return check_family(family)
    except FamilyTimeout:
        return Row(family, "", "", 0, "no", "no", f"the test takes more than {SECONDS} s")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        gc.collect()


def check_sites(argv: list[str]) -> int:
    """Check all families and write docs/coverage.csv, or check those named and print their rows."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGPROF, raise_timeout)  # seconds of this process, whatever else runs
    rows: list[Row] = []
    with torch.no_grad():
        for family in argv or sorted(CONFIG_MAPPING):
            row = check_in_time(family)
            rows += [row] if row is not None else []
    if argv:
        write_table(rows, sys.stdout)
    else:
        with SITES_FILE.open("w", newline="") as stream:
            write_table(rows, stream)
    return 0


# --- Fields of config.json -----------------------------------------------------------------------


FIELDS_FILE = ROOT / "docs" / "config-fields.json"
NUM_PAIRS = 10


def compare_fields(families: list[str]) -> int:
    """Compare the fields of these families, or of all; return 1 if a case differs."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    has_difference = False
    for family in families or list(BASES):
        outcomes = list_outcomes(family, NUM_PAIRS)
        for case, outcome in outcomes:
            if outcome.kind == "different":
                print(f"{family}: {case}: {outcome.detail}", flush=True)
                has_difference = True
        counts = Counter(outcome.kind for _, outcome in outcomes)
        print(family, dict(counts), flush=True)
        _write_fields(family, dict(sorted(counts.items())), classify_fields(outcomes))
    return int(has_difference)


def _write_fields(family: str, counts: dict[str, int], fields: dict[str, list[str]]) -> None:
    """Replace the row of a family, one line per class of fields."""
    old = json.loads(FIELDS_FILE.read_text()) if FIELDS_FILE.is_file() else {}
    cases, rows = (
        old.get("cases", {}) | {family: counts},
        old.get("families", {}) | {family: fields},
    )
    lines = ["{", f'"transformers": "{transformers.__version__}",', '"cases": {']
    lines.append(
        ",\n".join(f" {json.dumps(name)}: {json.dumps(cases[name])}" for name in sorted(cases))
    )
    lines.append('},\n"families": {')
    blocks = []
    for name in sorted(rows):
        kinds = ",\n".join(
            f"  {json.dumps(kind)}: {json.dumps(names)}" for kind, names in rows[name].items()
        )
        blocks.append(f" {json.dumps(name)}: {{\n{kinds}\n }}")
    lines.append(",\n".join(blocks) + "\n}\n}\n")
    FIELDS_FILE.write_text("\n".join(lines))


# --- Command --------------------------------------------------------------------------------------

COMMANDS = {
    "sites": check_sites,
    "config-fields": compare_fields,
}


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit(__doc__)
    sys.exit(COMMANDS[sys.argv[1]](sys.argv[2:]))
