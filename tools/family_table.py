"""Table of what headwise does with the families of 2026, in docs/families.csv.

python tools/family_table.py [NAME...]
    Builds a tiny model of every family in tests/support/families.py with random weights on a CPU,
    prints the shares of families that are ablated, traced, priced, pruned and converted, and writes
    the table; with names, prints their rows. Nothing is downloaded.

- ablated: hw.ablate of the first and the last head of a layer gives the outputs of a copy with zeros
  in the columns of that head in the output projection, which is found without headwise;
- traced: the recomputed weights are those of the model's own eager attention, to 1e-6;
- priced: hw.cost of the config counts the parameters that the model has;
- pruned: hw.prune removes half of the heads; the written folder, loaded by transformers or by its
  script without headwise, gives the outputs of a copy with zero columns for these heads, to 1e-5;
- converted: hw.convert halves the key-value heads; the written folder gives the outputs of the model
  with the mean of each two heads in their place.
"""

from __future__ import annotations

import copy
import csv
import datetime
import gc
import importlib.util
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

import headwise as hw
from coverage_table import (
    ReachedSite,
    check_ablation,
    find_projection,
    format_error,
    output_attentions,
    output_difference,
    record_sites,
    run,
    weight_error,
)
from headwise.observe.head_analysis.annotated_examples import Example
from headwise.observe.inspect.attention_sites import find_attention
from headwise.observe.inspect.site import AttentionInputs, UnreadableCall
from headwise.surgery import HeadRanking, KeepTop
from support.families import FAMILIES, Family
from support.head_means import average_neighbours, zero_columns_of

FILE = Path(__file__).resolve().parents[1] / "docs" / "families.csv"
CHECKS = ("ablated", "traced", "priced", "pruned", "converted")
HEADER = ("family", "model_type", "date", "transformers", "sites", *CHECKS, "reason")
TRACE_TOLERANCE, TOLERANCE = 1e-6, 1e-5
Inputs = dict[str, Any]


class Case(NamedTuple):
    """A tiny model with its input, and the sites that the input reaches."""

    family: Family
    model: Any
    inputs: Inputs
    reached: list[ReachedSite]

    def check_ablated(self) -> str:
        """Return "yes" if ablation equals zero columns, else the reason."""
        return check_ablation(self.model, self.inputs, self.reached)

    def check_traced(self) -> str:
        """Return "yes" if the weights of every attention are those of the model itself."""
        own_weights: list[Tensor] | None = None
        readable = [one for one in self.reached if one.module.site.observe.possible]
        for site in readable:
            call = site.recorder.call
            if call is None or isinstance(call, UnreadableCall):
                return "no call was captured" if call is None else call.reason
            if isinstance(call, AttentionInputs) and call.unsupported:
                return call.unsupported
            if site.own is None and own_weights is None:
                own_weights = output_attentions(self.model, self.inputs)
            candidates = [site.own] if site.own is not None else own_weights or []
            error = min([weight_error(call, own) for own in candidates], default=None)
            if error is None:
                return "the model returns no weights to compare with"
            if not error <= TRACE_TOLERANCE:
                return f"weights of {site.module.site.name} differ by {error:.0e}"
        return "yes" if readable else self.reached[0].module.site.observe.reason

    def check_priced(self) -> str:
        """Return "yes" if the cost of its config counts the parameters of the model."""
        config = json.loads(self.model.config.to_json_string(use_diff=False))
        estimates = hw.cost(config | {"architectures": [type(self.model).__name__]})
        counted = next(iter(estimates)).data["params"]
        held = sum(parameter.numel() for parameter in self.model.parameters())
        return "yes" if counted == held else f"{counted:,} parameters are counted, {held:,} held"

    def check_pruned(self) -> str:
        """Return the kind of folder if its model equals the one with zero columns."""
        selection = KeepTop(0.5, HeadRanking("random"))
        result: Any = hw.prune(self.model, selection, self.texts)
        expected = copy.deepcopy(self.model)
        paths = {one.site.name: one.site.path for one in find_attention(self.model)}
        for name, head in result.plan.removed_heads:
            projection = find_projection(self.model, paths[name])
            if projection is None:
                return "no output projection has a usual name and the width of the heads"
            zero_columns_of(expected.get_submodule(projection.path), head, projection.width)
        return self._check_folder(result, expected)

    def check_converted(self) -> str:
        """Return the kind of folder if its model equals the one with averaged rows."""
        expected = copy.deepcopy(self.model)
        sites = [one.site for one in find_attention(self.model) if one.site.observe.possible]
        fewest = min(site.kv for site in sites) // 2
        for site in sites if fewest else ():
            module = expected.get_submodule(site.path)
            if isinstance(module, nn.MultiheadAttention):
                for tensor in (module.in_proj_weight, module.in_proj_bias):
                    rows = tensor.data.unflatten(0, (3, fewest, site.kv // fewest, -1))
                    rows[1:] = rows[1:].mean(2, keepdim=True)
            else:
                average_neighbours(module, site.q, site.kv, site.kv // fewest)
        if not fewest:
            return "its queries share one key-value head already"
        return self._check_folder(hw.convert(self.model, fewest, self.texts), expected)

    @property
    def texts(self) -> Any:
        """Nothing for a language model, else the input."""
        return () if self.family.reads in ("text", "pair") else [Example(self.inputs, {})]

    def _check_folder(self, result: Any, expected: nn.Module) -> str:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary, "small")
            kind = result.save_pretrained(folder).kind
            loaded = load_without_headwise(folder)
            error = output_difference(run(loaded, self.inputs), run(expected, self.inputs))
        if not error <= TOLERANCE:
            return f"the written model differs by {error:.0e}"
        return {"transformers": "plain", "resized": "resized"}.get(kind, f"a folder of kind {kind}")


def load_without_headwise(folder: Path) -> nn.Module:
    """Load a written folder with transformers, or with the script that it holds."""
    script = folder / "load_model.py"
    if script.is_file():
        spec = importlib.util.spec_from_file_location("load_model", script)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.load(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, config.architectures[0]).from_pretrained(folder).eval()


class Row(NamedTuple):
    """The result for one family: its number of sites, results by check, and the reasons."""

    family: Family
    sites: int
    results: dict[str, str]

    @property
    def cells(self) -> list[str]:
        """Return the cells of the table."""
        today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        answers, reasons = list[str](), list[str]()
        for check in CHECKS:
            result = self.results.get(check, "no attention")
            is_done = result in ("yes", "plain", "resized")
            answers.append(result if is_done else "no" if self.sites else "-")
            if not is_done:
                reasons.append(f"{check}: {result}" if self.sites else result)
        reason = "; ".join(dict.fromkeys(reasons))
        start = [self.family.name, self.family.model_type, today, transformers.__version__]
        return [*start, str(self.sites), *answers, reason]


def check_family(family: Family) -> Row:
    """Return the row of one family."""
    model, inputs = family.build(), family.inputs()
    sites = find_attention(model)
    reached = record_sites(model, inputs, sites)
    case = Case(family, model, inputs, reached)
    results = dict[str, str]()
    for check in CHECKS if reached else ():
        step: Callable[[], str] = getattr(case, f"check_{check}")
        try:
            results[check] = step()
        except Exception as error:  # becomes the reason in the row
            results[check] = format_error(error, 160)
        gc.collect()
    return Row(family, len(reached), results)


def main(names: list[str]) -> int:
    """Check all families and write the table, or check those named and print their rows."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    rows = list[Row]()
    with torch.no_grad():
        for family in FAMILIES:
            if not names or family.name in names:
                rows.append(check_family(family))
                print(*rows[-1].cells, sep=",", flush=True)
    with_attention = [row for row in rows if row.sites]
    for check in CHECKS:
        done = sum(row.results[check] in ("yes", "plain", "resized") for row in with_attention)
        share = done / max(1, len(with_attention))
        print(f"{check}: {done} of {len(with_attention)} families with attention ({share:.0%})")
    if not names:
        with FILE.open("w", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerows([HEADER, *(row.cells for row in rows)])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
