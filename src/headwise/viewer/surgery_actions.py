"""Jobs of the Prune & convert screen: sizes and possible forms, a plan, and a new model with its
verification.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..report.progress import CountedMessage
from .model_actions import list_texts
from .model_worker import (
    HEADS,
    LINES,
    MOST,
    Field,
    JobProgress,
    action,
    choice,
    flag,
    integer,
    number,
    text,
)
from .open_model import OpenModel

if TYPE_CHECKING:
    from ..attention.spec.attention_spec import AttentionSpec
    from ..models import Transformer
    from ..observe.head_analysis.annotated_examples import Example
    from ..surgery import AttentionConversion


FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
TEXTS_FILE = (
    "texts.txt"  # in the new folder: the lines of the choice of heads and of the verification
)
MIN_TEXTS = 2  # an interval over texts needs as many
UNKNOWN_MODEL = "MODEL"  # in a command, for a model that was opened in Python
TIMING_SECONDS = 4.0  # to measure the speed of both models in
VERIFICATION_STEPS = 7  # messages of write_and_verify
SELECTION_STEPS = 3  # messages of choosing and removing heads


# --- What to do: arguments of the library, and the options of the command line of the same name ---


class Change(NamedTuple):
    """A model change: the head selection or conversion, how to make it from examples, its use of
    texts, its progress messages, and the equivalent command and options.
    """

    command: str
    strategy: Any
    make: Callable[[Transformer, Any, Sequence[Example], Callable[[str], None]], Any]
    text_uses: tuple[str, ...]
    steps: int
    options: tuple[str, ...]


def list_heads(heads: Sequence[tuple[str, int]]) -> list[str]:
    """Format the heads as `headwise prune --heads` takes them.

    >>> list_heads([("decoder.0.attention", 3), ("decoder.0.cross", 0), ("decoder.0.attention", 1)])
    ['decoder.0.attention:1,3', 'decoder.0.cross:0']
    """
    by_site: dict[str, list[int]] = {}
    for site, head in heads:
        by_site.setdefault(site, []).append(head)
    return [f"{site}:{','.join(map(str, sorted(numbers)))}" for site, numbers in by_site.items()]


def _list_options(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[str, ...]:
    """List the options that are not at their default."""
    options: list[str] = []
    for name, value in values.items():
        if value != defaults.get(name):
            options += [f"--{name}", str(value)]
    return tuple(options)


PRUNING = {
    "heads": HEADS,
    "keep": number(None),
    "clusters": flag(),
    "by": text("best"),
    "per": text("layer"),
    "fold": text("none"),
}
SELECTIONS = ("heads", "keep", "clusters")


def _read_pruning(model: OpenModel, name: str, arguments: Any) -> Change:
    """Read which heads to choose: a list `heads`, the best share `keep` by a method, or one per
    cluster in `clusters`.
    """
    from ..surgery import DropHeads, HeadRanking, HeadSelection, KeepOnePerCluster, KeepTop
    from ..surgery.any_model import prune
    from ..surgery.pruning import list_text_uses

    values = {name: field.get(model, name, arguments) for name, field in PRUNING.items()}
    chosen = [name for name in SELECTIONS if values[name]]
    if len(chosen) != 1:
        raise ValueError(
            f"{len(chosen)} of {', '.join(SELECTIONS)} say which heads to remove; give exactly one"
        )
    ranking = HeadRanking(values["by"])
    shown = {"by": values["by"], "fold": values["fold"]}
    if values["heads"]:
        heads = [(head.site, head.head) for head in values["heads"]]
        selection: HeadSelection = DropHeads(tuple(heads))
        options = ("--heads", *list_heads(heads))
        del shown["by"]
    elif values["clusters"]:
        selection = KeepOnePerCluster(ranking)
        options = ("--clusters",)
    else:
        selection = KeepTop(values["keep"], ranking, values["per"])
        options = ("--keep", repr(values["keep"]))
        shown["per"] = values["per"]
    return Change(
        "prune",
        selection,
        lambda net, heads, examples, log: prune(net, heads, examples, fold=values["fold"], log=log),
        list_text_uses(selection, values["fold"]),
        SELECTION_STEPS,
        (*options, *_list_options(shown, {"by": "best", "per": "layer", "fold": "none"})),
    )


CONVERSION_FORMS: dict[str, dict[str, Field]] = {  # each with its fields
    "kv": {"kv": integer(1, MOST), "align": text("none"), "grouping": text("consecutive")},
    "mha": {},
    "latent": {},
    "collaborative": {"width": integer(1, MOST)},
    "routed": {"always": integer(0, MOST), "active": integer(1, MOST)},
}
FORM = choice(tuple(CONVERSION_FORMS))


def _read_conversion(model: OpenModel, name: str, arguments: Any) -> Change:
    """Read the target form, its numbers, and the kind of attention."""
    from ..surgery.any_model import convert

    form = FORM.get(model, "form", arguments)
    where = text("all").get(model, "where", arguments)
    fields = CONVERSION_FORMS[form]
    values = {name: field.get(model, name, arguments) for name, field in fields.items()}
    conversion = make_conversion(form, *values.values())
    numbers = ",".join(str(value) for value in values.values())
    options = ("--to", f"{form}={numbers}" if numbers else form)
    if form == "kv":
        options = _list_options(values, {"align": "none", "grouping": "consecutive"})
    return Change(
        "convert",
        conversion,
        lambda net, change, examples, log: convert(net, change, examples, kind=where, log=log),
        conversion.text_uses,
        len(model.get_trace().layers) + 1,
        (*options, *_list_options({"where": where}, {"where": "all"})),
    )


def make_conversion(form: str, *numbers: Any) -> AttentionConversion:
    """Make the conversion for a form and its numbers."""
    from .. import surgery

    classes = {
        "kv": surgery.Pool,
        "mha": surgery.ToMHA,
        "latent": surgery.ToLatent,
        "collaborative": surgery.ToCollaborative,
        "routed": surgery.ToMixtureOfHeads,
    }
    return classes[form](*numbers)


PRUNING_CHANGE = Field(_read_pruning, key="*")
CONVERSION_CHANGE = Field(_read_conversion, key="*")


# --- The model, its texts and the new folder ------------------------------------------------------


def read_native_model(model: OpenModel) -> Transformer:
    """Return the open model as a headwise model: itself, reloaded from its folder, or a converted
    copy.
    """
    from ..hub.pretrained_models import load
    from ..models import Transformer
    from ..surgery.attention_replacement import to_native_model

    net = model.get_model()
    if isinstance(net, Transformer) or not model.target:
        return to_native_model(net)
    return load(Path(model.target), **model.loading._asdict())


def read_texts(
    net: Transformer, model: OpenModel, lines: Sequence[str], uses: Sequence[str]
) -> tuple[Sequence[str], list[Example], list[Example], tuple[str, ...]]:
    """Read the texts of a job, one per line, as `--data` does. Without any, use the open text.

    `uses` names the purposes for which the change uses texts. Returns the lines, the examples for
    choosing heads, the examples for the verification, and notes on both.
    """
    from ..observe.head_analysis.annotated_examples import examples_from_lines
    from ..surgery.model_and_texts import split_examples

    lines = lines or list_texts(model)
    reader = examples_from_lines(net, lines)
    examples = reader.examples_with_frequencies()
    if len(examples) < MIN_TEXTS:
        reasons = f" ({'; '.join(reader.notes).replace(';', ',')})" if reader.notes else ""
        raise ValueError(
            f"a verification report needs at least {MIN_TEXTS} texts, because its intervals are "
            f"over texts, and {len(examples)} can be read{reasons}; give more texts, one a line"
        )
    selection, verification, notes = split_examples(examples, uses)
    return lines, selection, verification, (*notes, *reader.notes)


def new_folder(model: OpenModel, name: str) -> Path:
    """Return the folder for a new model inside the output folder. Raises ValueError if writing is
    not allowed.
    """
    if not model.has_model:
        model.get_model()  # raises, because a trace has no weights
    if model.output_folder is None or model.read_only:
        raise ValueError(
            "the page may not write; start headwise view with --out DIR and without --read-only"
        )
    if not FOLDER_NAME.fullmatch(name):
        raise ValueError(f"{name[:40]!r} is no folder name; use letters, digits, '.', '_' and '-'")
    folder = model.output_folder / name
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"the folder {name} exists; choose another name")
    return folder


def format_command(model: OpenModel, command: str, options: Sequence[str], folder: Path) -> str:
    """Return the terminal command for the same model, using the texts saved in the new folder.

    >>> format_command(OpenModel(), "prune", ["--keep", "0.5"], Path("out/small"))
    'headwise prune MODEL --keep 0.5 --data out/small/texts.txt --out out/small-again'
    """
    files = ["--data", str(folder / TEXTS_FILE), "--out", f"{folder}-again"]
    return shlex.join(["headwise", command, model.target or UNKNOWN_MODEL, *options, *files])


@dataclass
class StepLog:
    """Turns library messages into progress. A message without a count is one step of `total`."""

    progress: JobProgress
    total: int
    done: int = 0

    def __call__(self, message: str) -> None:
        """Report the step that begins. Raises JobCancelled if the job should stop."""
        is_counted = isinstance(message, CountedMessage)
        self.progress(min(self.done - is_counted, self.total - 1), self.total, message)
        self.done += not is_counted


# --- Before anything is changed -------------------------------------------------------------------


@action("surgery")
def describe_surgery(model: OpenModel, progress: JobProgress) -> dict[str, Any]:
    """Describe the sizes of the open model and the forms its attention can take, with reasons if it
    cannot.
    """
    from ..surgery.head_selection import RANKING_METHODS
    from ..surgery.pruning_plan import count_heads
    from ..surgery.verification.efficiency import compare_cost

    progress(0, 2, "reading the model")
    net = read_native_model(model)
    specs = [spec for _, spec in net.spec.attention_specs()]
    sizes = compare_cost(net, net)
    progress(1, 2, "trying the forms")
    return {
        "heads": sum(count_heads(net.spec).values()),
        "kvHeads": sum(spec.heads.kv for spec in specs),
        "costs": sizes.data["numbers"],
        "dtype": sizes.dtype,
        "forms": list_forms(net, specs, progress),
        "methods": list(RANKING_METHODS),
    }


def list_forms(
    net: Transformer, specs: Sequence[AttentionSpec], progress: JobProgress
) -> list[dict[str, Any]]:
    """Try every form on one attention of each kind; record the reason for each refused form."""
    heads = min(len(spec.score_head_of_output) for spec in specs)
    width = max(spec.heads.dim for spec in specs)
    kv_heads = [spec.heads.kv for spec in specs]
    divided = math.gcd(*kv_heads)
    counts = [n for n in range(1, min(kv_heads)) if divided % n == 0]
    has_own_kv = all(spec.heads.kv == len(spec.score_head_of_output) for spec in specs)
    tried: dict[str, Sequence[int]] = {
        "kv": counts[-1:],
        "mha": (),
        "latent": (),
        "collaborative": (width,),
        "routed": (min(1, heads - 1), 1),
    }
    shown: dict[str, dict[str, Any]] = {"kv": {"counts": counts}, "collaborative": {"width": width}}
    shown["routed"] = {"heads": heads}
    forms: list[dict[str, Any]] = []
    for form, numbers in tried.items():
        progress.check()
        if form == "kv" and not counts:
            reason = "every attention has one key-value head already"
        else:
            reason = _find_refusal(net, make_conversion(form, *numbers))
        if form == "mha" and not reason and has_own_kv:
            reason = "every query head has its own key-value head already"
        described = {"form": form, "possible": not reason, "reason": reason}
        forms.append(described | shown.get(form, {}))
    return forms


def _find_refusal(net: Transformer, conversion: AttentionConversion) -> str:
    """Return the reason why an attention cannot be converted; empty if one of each kind can."""
    from ..surgery.attention_replacement import get_attention, get_attention_parameters
    from ..util.errors import SpecError

    tried: list[AttentionSpec] = []
    for site, spec in net.spec.attention_specs():
        if spec in tried:
            continue
        tried.append(spec)
        importance = [0.0] * len(spec.score_head_of_output)
        weights = get_attention_parameters(net, site)
        try:
            conversion.convert_layer(get_attention(net, site).spec, weights, None, importance)
        except SpecError as error:
            return f"{site}: {error}"
    return ""


@action("plan-pruning", change=PRUNING_CHANGE, texts=LINES)
def plan_pruning(
    model: OpenModel, progress: JobProgress, change: Change, texts: Sequence[str]
) -> dict[str, Any]:
    """Return the heads to remove, and the sizes before and after. Writes nothing."""
    from ..surgery.verification.efficiency import compare_cost

    net = read_native_model(model)
    uses = change.text_uses
    examples = read_texts(net, model, texts, uses)[1] if uses else []
    result = change.make(net, change.strategy, examples, StepLog(progress, change.steps))
    plan = result.plan
    sites = {layer.name: number for number, layer in enumerate(model.get_trace().layers)}
    removed = [[sites[site], head] for site, head in plan.removed_heads if site in sites]
    described = {
        "summary": plan.summary,
        "removed": removed,
        "kept": plan.num_kept,
        "heads": sum(plan.head_counts.values()),
        "notes": list(plan.notes),
    }
    return described | compare_cost(net, result.after).data


@action("plan-conversion", change=CONVERSION_CHANGE)
def plan_conversion(model: OpenModel, progress: JobProgress, change: Change) -> dict[str, Any]:
    """Return the sizes before and after a conversion. Sizes do not depend on texts, so heads are
    pooled in order.
    """
    from ..surgery import HeadRanking, Pool, ToMixtureOfHeads
    from ..surgery.verification.efficiency import compare_cost

    net = read_native_model(model)
    conversion = change.strategy
    if isinstance(conversion, Pool):
        conversion = replace(conversion, align="none", grouping="consecutive")
    if isinstance(conversion, ToMixtureOfHeads):
        conversion = replace(conversion, ranking=HeadRanking("random"))
    result = change.make(net, conversion, [], StepLog(progress, change.steps))
    summary = change.strategy.summary
    return {"summary": summary, "notes": []} | compare_cost(net, result.after).data


# --- A new model ----------------------------------------------------------------------------------


@action("prune", change=PRUNING_CHANGE, texts=LINES, name=text())
def prune_heads(
    model: OpenModel, progress: JobProgress, change: Change, texts: Sequence[str], name: str
) -> dict[str, Any]:
    """Write a pruned copy of the model to a new folder, with the verification that it equals
    ablation.
    """
    return write_new_model(model, progress, change, texts, new_folder(model, name))


@action("convert", change=CONVERSION_CHANGE, texts=LINES, name=text())
def convert_heads(
    model: OpenModel, progress: JobProgress, change: Change, texts: Sequence[str], name: str
) -> dict[str, Any]:
    """Write a copy with another number or form of key-value heads to a new folder, with a
    verification report.
    """
    return write_new_model(model, progress, change, texts, new_folder(model, name))


def write_new_model(
    model: OpenModel, progress: JobProgress, change: Change, lines: Sequence[str], folder: Path
) -> dict[str, Any]:
    """Change the model, write it with its verification report, and describe both. Leaves no folder
    on failure or cancellation.
    """
    from ..surgery.model_and_texts import OutputFolder, write_and_verify
    from ..surgery.verification.efficiency import TimingOptions
    from ..surgery.verification.verify import VerificationOptions, summary_table

    net = read_native_model(model)
    lines, selection, verified, notes = read_texts(net, model, lines, change.text_uses)
    log = StepLog(progress, change.steps + VERIFICATION_STEPS)
    result = change.make(net, change.strategy, selection, log)
    record = result.record
    options = VerificationOptions(
        result.summary,
        notes=(*notes, *record["notes"]),
        command=format_command(model, change.command, change.options, folder),
        timing=TimingOptions(seconds=TIMING_SECONDS),
    )
    source = Path(model.target) if model.target else None
    extra_files = {TEXTS_FILE: ("\n".join(lines) + "\n").encode()}
    output = OutputFolder(folder, source=source, extra_files=extra_files)
    written, verification = write_and_verify(
        result, result.after, verified, options, output, record, log
    )
    model.other = str(folder)
    described = {
        "holds": verification.holds,
        "summary": [
            f"{name}: {before} -> {after} ({result})" if after else f"{name}: {result}"
            for name, before, after, result in summary_table(verification).rows
        ],
        "verification": verification.data,
        "command": verification.command,
        "folder": str(folder),
        "kind": written.kind,
        "sentence": written.summary,
        "files": [*written.files, "verification.json", "VERIFICATION.md"],
    }
    if change.command == "convert":
        described["groups"] = [
            {"site": site, "groups": list(map(list, groups))}
            for site, groups in result.groups.items()
        ]
    return described
