"""Coverage of transformers by tracing and ablation: `python tools/coverage_page.py [TYPE...]` writes docs/coverage.md.

Every text and vision family that can be built tiny from its config alone is built with random weights and run once.
A family is traced if the attention weights recomputed from the captured call equal those of the model's own eager
attention. It is ablated if zero-ablating a head gives the same output as a copy of the model whose output projection
has zeros in the columns of that head. Nothing is downloaded.
"""

from __future__ import annotations

import copy
import gc
import os
import re
import resource
import signal
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_MAPPING
from transformers.pytorch_utils import Conv1D

import coverage_models
import headwise as hw
from coverage_checks import Recorder, output_attentions, output_difference, record_own_weights, run, weight_error
from headwise.inspect.adapters.output_projection import UnreadableCall
from headwise.inspect.attention_sites import find_attention
from headwise.inspect.hooks import AttentionInputs, SiteModule, install_hooks

SECONDS, MEMORY, TOLERANCE = 40, 8 << 30, 1e-5


HEADER = """\
This page lists the families of transformers {version} whose attention headwise can trace and ablate. Use it to
find out whether [sites](sites.md), [traces](traces.md) and [head measures](heads.md) work for a model that headwise
does not load itself.

    python tools/coverage_page.py bert xlnet

```text
...
| family | class | adapter | sites | traced | ablated | reason if not |
|---|---|---|---|---|---|---|
| bert | BertModel | transformers | 2 | yes | yes |  |
| xlnet | XLNetModel |  | 0 | no | no | no attention with separate heads was found |
```

Without arguments, the command tests all families that read text or images and writes this page. It builds each family
from its config alone, with tiny sizes and random weights, and runs it once. No weights are downloaded.

| column | meaning |
|---|---|
| class | class of the model in transformers |
| adapter | the adapters that found its attention layers ([how they work](sites.md#how-attention-layers-are-found)) |
| sites | number of attention layers found |
| traced | "yes" if the attention weights recomputed from a recorded call equal the weights of the model itself |
| ablated | "yes" if ablating a head equals zero columns in the output projection, at the first and the last site |
| reason if not | the problem; "build failed", "run failed" and "check failed" are errors of this test |

Of {total} families, {both} are traced and ablated, and {ablated} are ablated."""

LIMITS = """## Limits

- Many families fail because they cannot be built from their config alone, or need inputs that the test does not have.
  For these a "no" does not show that headwise cannot handle their attention.
- The test uses tiny models with random weights, on a CPU, in float32."""


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


def record_sites(model: nn.Module, inputs: dict[str, Tensor], sites: list[SiteModule]) -> list[ReachedSite]:
    """Run the model; return every site that the input reaches, with its recorded call."""
    recorders = {site.module: Recorder() for site in sites}
    patches = {id(patch): patch for site in sites for patch in site.adapter.patches()}
    hooks = {module: (recorder,) for module, recorder in recorders.items()}
    with record_own_weights() as weights, install_hooks(hooks, list(patches.values())):
        run(model, inputs)
    reached = [site for site in sites if recorders[site.module].outputs is not None]
    return [ReachedSite(site, recorders[site.module], weights.get(id(site.module))) for site in reached]


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


def find_output_projection(model: nn.Module, inputs: dict[str, Tensor], site: ReachedSite) -> str:
    """Return the path of the linear layer whose input is the head outputs of a site; "" if there is none."""
    z = site.recorder.outputs
    assert z is not None
    matches: list[str] = []

    def make_hook(path: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0] if args else None
            fits = isinstance(x, Tensor) and x.numel() == z.numel() and x.shape[-1] == z.shape[-1] * z.shape[-2]
            if fits and torch.allclose(x.reshape(-1), z.reshape(-1), atol=1e-6):
                matches.append(path)

        return hook

    layers = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, (nn.Linear, Conv1D))]
    hooks = [layer.register_forward_pre_hook(make_hook(path)) for path, layer in layers]
    run(model, inputs)
    for hook in hooks:
        hook.remove()
    return matches[0] if matches else ""


def check_ablation(model: nn.Module, inputs: dict[str, Tensor], sites: list[ReachedSite]) -> str:
    """Return "yes" if ablating a head equals zero columns, at the first and the last site; else the reason."""
    original = run(model, inputs)
    for site in (sites[0], sites[-1]):
        assert site.recorder.outputs is not None
        *_, heads, width = site.recorder.outputs.shape
        head = min(1, heads - 1)
        info = site.module.site
        if not info.ablate.possible:
            return info.ablate.reason
        # A copy with zero columns changes every site that runs the same module.
        sharing = [other.module.site.name for other in sites if other.module.site.path == info.path]
        with hw.ablate(model, [(name, head) for name in sharing]):
            ablated = run(model, inputs)
        pruned = copy.deepcopy(model)
        path = find_output_projection(pruned, inputs, site)
        if not path:
            return "no linear layer reads the head outputs, so there are no columns to compare with"
        last, columns = pruned.get_submodule(path), slice(head * width, (head + 1) * width)
        last.weight[(slice(None), columns) if isinstance(last, nn.Linear) else columns] = 0
        error = output_difference(ablated, run(pruned, inputs))
        if not error <= TOLERANCE:
            return f"ablation and zero columns differ by {error:.0e}"
        if output_difference(ablated, original) == 0:
            return "ablation does not change the output"
    return "yes"


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
    candidates = coverage_models.configs(kind, family)
    best: Row | None = None
    while True:
        try:
            config = next(candidates)
        except StopIteration:
            break
        except Exception as error:
            best = best or row._replace(reason=f"config failed: {format_error(error)}")
            break
        result = check_config(row, cls, config)
        if best is None or (result.ablated, result.traced, result.sites) > (best.ablated, best.traced, best.sites):
            best = result
        if result.sites:
            break
    return best


def check_config(row: Row, cls: Any, config: Any) -> Row:
    """Return the row for one config."""
    step = "build failed"
    try:
        model = coverage_models.build_model(cls, config)
        step = "run failed"
        inputs = coverage_models.find_inputs(model, config)
        step = "check failed"
        sites = find_attention(model)
        if not sites:
            return row._replace(reason="no attention with separate heads was found")
        adapters = sorted({adapter_name(site.adapter) for site in sites})
        row = row._replace(adapter=" and ".join(adapters), sites=len(sites))
        reached = record_sites(model, inputs, sites)
        if not reached:
            return row._replace(reason="the test input reaches no site")
        checks = check_weights(model, inputs, reached), check_ablation(model, inputs, reached)
        traced, ablated = ("yes" if check == "yes" else "no" for check in checks)
        reason = "; ".join(dict.fromkeys(check for check in checks if check != "yes"))
        return row._replace(traced=traced, ablated=ablated, reason=reason)
    except Exception as error:  # any error of a family becomes the reason in its row
        return row._replace(reason=f"{step}: {format_error(error)}")


def adapter_name(adapter: object) -> str:
    """Return the class name of an adapter as words, without the last: "output projection"."""
    return " ".join(re.findall("[A-Z][a-z]+", type(adapter).__name__)[:-1]).lower()


def format_error(error: Exception) -> str:
    """Return the first 90 characters of an error's message."""
    return " ".join(str(error).split())[:90] or type(error).__name__


def page(rows: list[Row]) -> str:
    """Return the page as Markdown."""
    counts = Counter((row.traced, row.ablated) for row in rows)
    both = counts["yes", "yes"]
    num_ablated = sum(row.ablated == "yes" for row in rows)
    lines = [
        "# Coverage of transformers", "",
        *HEADER.format(
            version=transformers.__version__, total=len(rows), both=both, ablated=num_ablated
        ).splitlines(), "",
        "| family | class | adapter | sites | traced | ablated | reason if not |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    order = sorted(rows, key=lambda row: (row.ablated != "yes", row.traced != "yes", row.family))
    table = [[str(cell).replace("|", "/") for cell in row] for row in order]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in table), "", LIMITS, ""])


def raise_timeout(*_: object) -> None:
    """Handle the alarm of a family that takes too long."""
    raise TimeoutError(f"the test takes more than {SECONDS} s")


def main(argv: list[str]) -> int:
    """Check all families and write the page, or check those named and print it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, raise_timeout)
    rows: list[Row] = []
    with torch.no_grad():
        for family in argv or sorted(CONFIG_MAPPING):
            signal.alarm(SECONDS)
            row = check_family(family)
            signal.alarm(0)
            gc.collect()
            rows += [row] if row is not None else []
    if argv:
        print(page(rows))
    else:
        (Path(__file__).resolve().parents[1] / "docs" / "coverage.md").write_text(page(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
