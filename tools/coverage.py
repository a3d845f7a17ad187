"""Which models of transformers headwise sees and silences: `python docs/coverage.py [TYPE...]` writes docs/coverage.md.

Every text and vision family that can be built tiny from its config alone is built with random weights and run once. A
site is seen when each head's weights, computed again from what was captured, equal those of the model's own eager
attention; it is silenced when a head silenced while the model runs equals a copy whose output projection has lost that
head's columns. Nothing is downloaded.
"""

from __future__ import annotations

import copy
import gc
import os
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
from coverage_looking import Keep, apart, attentions, difference, own_weights, run
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_MAPPING
from transformers.pytorch_utils import Conv1D

import coverage_models
import headwise as hw
from headwise.inspect.adapters.output_projection import UnreadableCall
from headwise.inspect.attention_sites import find_attention
from headwise.inspect.hooks import AttentionInputs, SiteModule, install_hooks

SECONDS, MEMORY, CLOSE = 40, 8 << 30, 1e-5


class Row(NamedTuple):
    """What came of one family."""

    family: str
    model: str
    route: str
    sites: int
    seen: str
    silenced: str
    why: str


class Looked(NamedTuple):
    """A site that was reached, and what was seen there."""

    one: SiteModule
    keep: Keep
    own: Tensor | None  # weights as the function of the interface gave them


def looked(model: nn.Module, told: dict[str, Tensor], those: list[SiteModule]) -> list[Looked]:
    """What is seen of each site that the input reaches."""
    keeps = {one.module: Keep() for one in those}
    stands = {id(stand): stand for one in those for stand in one.adapter.patches()}
    with own_weights() as given, install_hooks({m: (keep,) for m, keep in keeps.items()}, list(stands.values())):
        run(model, told)
    reached = [one for one in those if keeps[one.module].said is not None]
    return [Looked(one, keeps[one.module], given.get(id(one.module))) for one in reached]


def seen(model: nn.Module, told: dict[str, Tensor], those: list[Looked]) -> str:
    """Whether all weights come out as the model's own; else why not."""
    asked: list[Tensor] | None = None
    for one in those:
        core = one.keep.seen
        if core is None:
            return one.one.site.see.why or "it shows nothing"
        if isinstance(core, AttentionInputs) and core.unsupported:
            return core.unsupported
        if isinstance(core, UnreadableCall):
            return core.why
        asked = attentions(model, told) if asked is None and one.own is None else asked
        worst = min([apart(core, own) for own in ([one.own] if one.own is not None else asked or [])], default=None)
        if worst is None:
            return "it gives no weights to compare with"
        if not worst <= CLOSE:
            return f"weights differ by {worst:.0e}"
    return "yes"


def behind(model: nn.Module, told: dict[str, Tensor], site: Looked) -> str:
    """The path of the map into which goes what heads of a site say; its name does not matter."""
    z = site.keep.said
    assert z is not None
    found_there: list[str] = []

    def enters(path: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0] if args else None
            fits = isinstance(x, Tensor) and x.numel() == z.numel() and x.shape[-1] == z.shape[-1] * z.shape[-2]
            if fits and torch.allclose(x.reshape(-1), z.reshape(-1), atol=1e-6):
                found_there.append(path)

        return hook

    maps = [(path, one) for path, one in model.named_modules() if isinstance(one, (nn.Linear, Conv1D))]
    hooks = [one.register_forward_pre_hook(enters(path)) for path, one in maps]
    run(model, told)
    for hook in hooks:
        hook.remove()
    return found_there[0] if found_there else ""


def silenced(model: nn.Module, told: dict[str, Tensor], those: list[Looked]) -> str:
    """Whether silencing equals a copy without the columns, at the first and the last site that the input reaches."""
    whole = run(model, told)
    for one in (those[0], those[-1]):
        assert one.keep.said is not None
        *_, heads, width = one.keep.said.shape
        head = min(1, heads - 1)
        if not one.one.site.silence.can:
            return one.one.site.silence.why
        sharing = [other.one.site.name for other in those if other.one.site.path == one.one.site.path]
        with hw.ablate(model, [(name, head) for name in sharing]):  # a copy loses its columns at all depths
            quiet = run(model, told)
        other = copy.deepcopy(model)
        path = behind(other, told, one)
        if not path:
            return "what heads say enters no map as it is, so that there are no columns to compare with"
        last, columns = other.get_submodule(path), slice(head * width, (head + 1) * width)
        last.weight[(slice(None), columns) if isinstance(last, nn.Linear) else columns] = 0
        worst = difference(quiet, run(other, told))
        if not worst <= CLOSE:
            return f"the two ways differ by {worst:.0e}"
        if difference(quiet, whole) == 0:
            return "nothing changed"
    return "yes"


def judged(family: str) -> Row | None:
    """One row of the table; None of what transformers has no bare model for."""
    kind = CONFIG_MAPPING[family]
    if kind not in MODEL_MAPPING:
        return None
    try:
        cls = MODEL_MAPPING[kind]
    except ValueError:  # a name that transformers maps and has not
        return None
    cls = cls[0] if isinstance(cls, tuple) else cls
    row = Row(family, cls.__name__, "", 0, "no", "no", "")
    tries = coverage_models.configs(kind, family)
    best: Row | None = None
    while True:
        try:
            config = next(tries)
        except StopIteration:
            break
        except Exception as error:
            best = best or row._replace(why=f"its config: {told_by(error)}")
            break
        got = tried(row, cls, config)
        if best is None or (got.silenced, got.seen, got.sites) > (best.silenced, best.seen, best.sites):
            best = got
        if got.sites:
            break
    return best


def tried(row: Row, cls: Any, config: Any) -> Row:
    """What comes of one config."""
    step = "building it"
    try:
        model = coverage_models.built(cls, config)
        step = "running it"
        told = coverage_models.readable(model, config)
        step = "looking"
        those = find_attention(model)
        if not those:
            return row._replace(why="no attention of separate heads was found")
        routes = sorted({type(one.adapter).__name__.lower() for one in those})
        row = row._replace(adapter=" and ".join(routes), sites=len(those))
        reached = looked(model, told, those)
        if not reached:
            return row._replace(why="the input reaches none")
        see, quiet = seen(model, told, reached), silenced(model, told, reached)
        why = "; ".join(dict.fromkeys(said for said in (see, quiet) if said != "yes"))
        return row._replace(seen="yes" if see == "yes" else "no", silenced="yes" if quiet == "yes" else "no", why=why)
    except Exception as error:  # whatever a family raises is its row's reason
        return row._replace(why=f"{step}: {told_by(error)}")


def told_by(error: Exception) -> str:
    """What an error says, in short."""
    return " ".join(str(error).split())[:90] or type(error).__name__


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
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, late)
    rows: list[Row] = []
    with torch.no_grad():
        for family in argv or sorted(CONFIG_MAPPING):
            signal.alarm(SECONDS)
            row = judged(family)
            signal.alarm(0)
            gc.collect()
            rows += [row] if row is not None else []
    if argv:
        print(page(rows))
    else:
        (Path(__file__).parent / "coverage.md").write_text(page(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
