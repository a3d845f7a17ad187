"""The jobs of the Prune & convert screen: sizes and possible forms, a plan, and a new model with
its proof; and what these jobs are asked for.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..output_paths import stage_folder
from ..progress import CountedMessage
from .model_actions import read_heads, read_text
from .model_worker import JobProgress
from .open_model import OpenModel

if TYPE_CHECKING:
    from ..head_analysis.annotated_examples import Example
    from ..models import Transformer
    from ..spec.attention_spec import AttentionSpec
    from ..surgery import AttentionConversion, HeadSelection
    from ..surgery.verification.proof import ModelProof, ProofOptions


FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
TEXTS_FILE = (
    "texts.txt"  # in the new folder: the lines that heads were chosen and the proof was made with
)
MIN_TEXTS = 2  # an interval over texts needs as many
UNKNOWN_MODEL = "MODEL"  # in a command, for a model that was opened in Python
SELECTIONS = ("heads", "keep", "clusters")
CONVERSION_FORMS = ("kv", "mha", "latent", "collaborative", "routed")


class PruningRequest(NamedTuple):
    """Which heads to remove, by what they are replaced, and the options of `headwise prune` that
    say so.
    """

    selection: HeadSelection
    fold: str
    options: tuple[str, ...]


class ConversionRequest(NamedTuple):
    """The new form, the attention layers to convert, and the options of `headwise convert` that say
    so.
    """

    conversion: AttentionConversion
    where: str
    options: tuple[str, ...]


class SurgeryTexts(NamedTuple):
    """The lines of a job, the examples that heads are chosen by, those of the proof, and notes on
    both.
    """

    lines: tuple[str, ...]
    selection: list[Example]
    proof: list[Example]
    notes: tuple[str, ...]


# --- What to do -----------------------------------------------------------------------------------


def read_pruning(model: OpenModel, arguments: Mapping[str, Any]) -> PruningRequest:
    """Read how heads are chosen: a list `heads`, the best share `keep` by a method, or one of each
    of `clusters`.
    """
    from ..surgery import DropHeads, HeadRanking, KeepOnePerCluster, KeepTop

    selections = [name for name in SELECTIONS if arguments.get(name)]
    if len(selections) != 1:
        raise ValueError(
            f"{len(selections)} of {', '.join(SELECTIONS)} say which heads to remove; give "
            "exactly one"
        )
    fold, method = read_text(arguments, "fold", "none"), read_text(arguments, "by", "best")
    ranking = HeadRanking(method)
    fold_options = () if fold == "none" else ("--fold", fold)
    if selections == ["heads"]:
        heads = [(head.site, head.head) for head in read_heads(model, arguments)]
        options = ("--heads", *list_heads(heads), *fold_options)
        return PruningRequest(DropHeads(tuple(heads)), fold, options)
    if selections == ["clusters"]:
        options = ("--clusters", "--by", method, *fold_options)
        return PruningRequest(KeepOnePerCluster(ranking), fold, options)
    amount, scope = arguments["keep"], read_text(arguments, "per", "layer")
    if type(amount) not in (int, float):
        raise ValueError(f"keep={amount!r} is no share or number of heads; give for example 0.5")
    options = ("--keep", repr(amount), "--by", method, "--per", scope, *fold_options)
    return PruningRequest(KeepTop(amount, ranking, scope), fold, options)


def list_heads(heads: Sequence[tuple[str, int]]) -> list[str]:
    """The heads as `headwise prune --heads` takes them.

    >>> list_heads([("decoder.0.attention", 3), ("decoder.0.cross", 0), ("decoder.0.attention", 1)])
    ['decoder.0.attention:1,3', 'decoder.0.cross:0']
    """
    by_site: dict[str, list[int]] = {}
    for site, head in heads:
        by_site.setdefault(site, []).append(head)
    return [f"{site}:{','.join(map(str, sorted(numbers)))}" for site, numbers in by_site.items()]


def read_conversion(arguments: Mapping[str, Any]) -> ConversionRequest:
    """Read the form to convert to, with its numbers, and how heads are pooled."""
    from ..surgery import Pool, ToCollaborative, ToLatent, ToMHA, ToMixtureOfHeads

    form, where = read_text(arguments, "form"), read_text(arguments, "where", "all")
    if form not in CONVERSION_FORMS:
        raise ValueError(
            f"there is no form {form[:40]!r}; use one of {', '.join(CONVERSION_FORMS)}"
        )
    where_options = () if where == "all" else ("--where", where)
    if form == "kv":
        pool = Pool(
            _read_number(arguments, "kv", 1),
            read_text(arguments, "align", "none"),
            read_text(arguments, "grouping", "consecutive"),
        )
        pooling = (() if pool.align == "none" else ("--align", pool.align)) + (
            () if pool.grouping == "consecutive" else ("--grouping", pool.grouping)
        )
        options = ("--kv", str(pool.kv), *pooling, *where_options)
        return ConversionRequest(pool, where, options)
    if form == "collaborative":
        width = _read_number(arguments, "width", 1)
        options = ("--to", f"collaborative={width}", *where_options)
        return ConversionRequest(ToCollaborative(width), where, options)
    if form == "routed":
        always, active = _read_number(arguments, "always", 0), _read_number(arguments, "active", 1)
        options = ("--to", f"routed={always},{active}", *where_options)
        return ConversionRequest(ToMixtureOfHeads(always, active), where, options)
    exact = ToMHA() if form == "mha" else ToLatent()
    return ConversionRequest(exact, where, ("--to", form, *where_options))


def _read_number(arguments: Mapping[str, Any], name: str, least: int) -> int:
    value = arguments.get(name)
    if type(value) is not int or value < least:
        raise ValueError(
            f"{name}={value!r} is not a whole number of at least {least}; give for example "
            f"{least + 1}"
        )
    return value


# --- The model, its texts and the new folder ------------------------------------------------------


def read_native_model(model: OpenModel) -> Transformer:
    """The open model as a headwise model: itself, or read again from its folder, or a converted
    copy.
    """
    from ..hub.pretrained_models import load
    from ..models import Transformer
    from ..surgery.attention_replacement import to_native_model

    net = model.get_model()
    if isinstance(net, Transformer) or not model.target:
        return to_native_model(net)
    return load(Path(model.target))


def read_texts(
    net: Transformer, model: OpenModel, arguments: Mapping[str, Any], uses: Sequence[str]
) -> SurgeryTexts:
    """Read the texts of a job, one a line, as `--data` of the commands does; without any, the open
    text.

    `uses` is what the change of the model uses texts for.
    """
    from ..head_analysis.annotated_examples import examples_from_lines
    from ..surgery.model_and_texts import split_examples

    lines = arguments.get("texts") or [read_open_text(model)]
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ValueError("texts must be a list of lines; give one text a line")
    lines = [line for text in lines for line in text.splitlines() if line.strip()]
    reader = examples_from_lines(net, lines)
    examples = reader.examples_with_frequencies()
    if len(examples) < MIN_TEXTS:
        reasons = f" ({'; '.join(reader.notes).replace(';', ',')})" if reader.notes else ""
        raise ValueError(
            f"a proof needs at least {MIN_TEXTS} texts, because its intervals are over texts, and "
            f"{len(examples)} can "
            f"be read{reasons}; give more texts, one a line"
        )
    selection, proof, notes = split_examples(examples, uses)
    return SurgeryTexts(tuple(lines), selection, proof, (*notes, *reader.notes))


def read_open_text(model: OpenModel) -> str:
    """The open text as a line of texts; a source and its target are separated by a tab."""
    streams = model.get_recorded().streams
    texts = [
        row.text or " ".join(row.words)
        for name in ("source", "text")
        for row in streams.get(name, ())[:1]
    ]
    return "\t".join(" ".join(text.split()) for text in texts)


def new_folder(model: OpenModel, arguments: Mapping[str, Any]) -> Path:
    """The folder of a new model inside the output folder; raises ValueError if it may not be
    written.
    """
    if not model.has_model:
        model.get_model()  # raises, because a trace has no weights
    if model.output_folder is None or model.read_only:
        raise ValueError(
            "the page may not write; start headwise view with --out DIR and without --read-only"
        )
    name = read_text(arguments, "name")
    if not FOLDER_NAME.fullmatch(name):
        raise ValueError(f"{name[:40]!r} is no folder name; use letters, digits, '.', '_' and '-'")
    folder = model.output_folder / name
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"the folder {name} exists; choose another name")
    return folder


def format_command(model: OpenModel, command: str, options: Sequence[str], folder: Path) -> str:
    """The command that makes the same model on the terminal, from the texts that the new folder
    keeps.

    >>> format_command(OpenModel(), "prune", ["--keep", "0.5"], Path("out/small"))
    'headwise prune MODEL --keep 0.5 --data out/small/texts.txt --out out/small-again'
    """
    return shlex.join(
        [
            "headwise",
            command,
            model.target or UNKNOWN_MODEL,
            *options,
            "--data",
            str(folder / TEXTS_FILE),
            "--out",
            f"{folder}-again",
        ]
    )


TIMING_SECONDS = 4.0  # to measure the speed of both models in
PROOF_STEPS = 6  # messages of write_model_folder and prove
SELECTION_STEPS = 3  # messages of choosing and removing heads


@dataclass
class StepLog:
    """Turns the messages of the library into progress: each without a count of its own is one step
    of `total`.
    """

    progress: JobProgress
    total: int
    done: int = 0

    def __call__(self, message: str) -> None:
        """Report the step that begins; raises JobCancelled if the job is to stop."""
        is_counted = isinstance(message, CountedMessage)
        self.progress(min(self.done - is_counted, self.total - 1), self.total, message)
        self.done += not is_counted


# --- Before anything is changed -------------------------------------------------------------------


def describe_surgery(
    model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress
) -> dict[str, Any]:
    """The sizes of the open model, and the forms that its attention can be converted to, with
    reasons if it cannot.
    """
    from ..surgery.head_selection import RANKING_METHODS
    from ..surgery.pruning_plan import count_heads
    from ..surgery.verification.efficiency import compare_cost

    progress(0, 2, "reading the model")
    net = read_native_model(model)
    specs, sizes = [spec for _, spec in net.spec.attention_specs()], compare_cost(net, net)
    progress(1, 2, "trying the forms")
    return {
        "heads": sum(count_heads(net.spec).values()),
        "kvHeads": sum(spec.heads.kv for spec in specs),
        "costs": [pair.data for pair in sizes.costs],
        "dtype": sizes.dtype,
        "forms": list_forms(net, specs, progress),
        "methods": list(RANKING_METHODS),
    }


def list_forms(
    net: Transformer, specs: Sequence[AttentionSpec], progress: JobProgress
) -> list[dict[str, Any]]:
    """Try every form on one attention of each kind; a form that an attention refuses has that
    reason.
    """
    from ..surgery import Pool, ToCollaborative, ToLatent, ToMHA, ToMixtureOfHeads

    heads = min(len(spec.score_head_of_output) for spec in specs)
    counts = [
        count
        for count in range(1, min(spec.heads.kv for spec in specs))
        if _divides_all(count, specs)
    ]
    width = max(spec.heads.dim for spec in specs)
    tried: dict[str, AttentionConversion] = {
        "mha": ToMHA(),
        "latent": ToLatent(),
        "collaborative": ToCollaborative(width),
        "routed": ToMixtureOfHeads(min(1, heads - 1), 1),
    }
    reasons = {"kv": "every attention has one key-value head already"}
    if counts:
        reasons["kv"] = _find_refusal(net, Pool(counts[-1]))
    for form, conversion in tried.items():
        progress.check()
        reasons[form] = _find_refusal(net, conversion)
    if not reasons["mha"] and all(
        spec.heads.kv == len(spec.score_head_of_output) for spec in specs
    ):
        reasons["mha"] = "every query head has its own key-value head already"
    numbers = {
        "kv": {"counts": counts},
        "collaborative": {"width": width},
        "routed": {"heads": heads},
    }
    return [
        {"form": form, "possible": not reason, "reason": reason} | numbers.get(form, {})
        for form, reason in reasons.items()
    ]


def _divides_all(count: int, specs: Sequence[AttentionSpec]) -> bool:
    return all(spec.heads.kv % count == 0 for spec in specs)


def _find_refusal(net: Transformer, conversion: AttentionConversion) -> str:
    """The reason why an attention of the model cannot be converted; empty if
    one of each kind can.
    """
    from ..errors import SpecError
    from ..surgery.attention_replacement import get_attention, get_attention_parameters

    tried: list[AttentionSpec] = []
    for site, spec in net.spec.attention_specs():
        if spec in tried:
            continue
        tried.append(spec)
        importance = [0.0] * len(spec.score_head_of_output)
        try:
            conversion.convert_layer(
                get_attention(net, site).spec, get_attention_parameters(net, site), None, importance
            )
        except SpecError as error:
            return f"{site}: {error}"
    return ""


def plan_pruning(
    model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress
) -> dict[str, Any]:
    """The heads that a pruning would remove, and the sizes before and after it;
    nothing is written.
    """
    from ..surgery.pruning import list_text_uses, prune
    from ..surgery.verification.efficiency import compare_cost

    request, net = read_pruning(model, arguments), read_native_model(model)
    log = StepLog(progress, SELECTION_STEPS)
    uses = list_text_uses(request.selection, request.fold)
    examples = read_texts(net, model, arguments, uses).selection if uses else []
    result = prune(net, request.selection, examples, fold=request.fold, log=log)
    sites = {layer.name: number for number, layer in enumerate(model.get_trace().layers)}
    return {
        "summary": result.plan.summary,
        "removed": [
            [sites[site], head] for site, head in result.plan.removed_heads if site in sites
        ],
        "kept": result.plan.num_kept,
        "heads": sum(result.plan.head_counts.values()),
        "notes": list(result.plan.notes),
    } | compare_cost(net, result.after).data


def plan_conversion(
    model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress
) -> dict[str, Any]:
    """The sizes before and after a conversion; they do not depend on texts, so that heads are
    pooled in order.
    """
    from dataclasses import replace

    from ..surgery import HeadRanking, Pool, ToMixtureOfHeads
    from ..surgery.conversion import convert
    from ..surgery.verification.efficiency import compare_cost

    request, net = read_conversion(arguments), read_native_model(model)
    conversion = request.conversion
    if isinstance(conversion, Pool):
        conversion = replace(conversion, align="none", grouping="consecutive")
    if isinstance(conversion, ToMixtureOfHeads):
        conversion = replace(conversion, ranking=HeadRanking("random"))
    log = StepLog(progress, len(model.get_trace().layers) + 1)
    result = convert(net, conversion, kind=request.where, log=log)
    return {"summary": request.conversion.summary, "notes": []} | compare_cost(
        net, result.after
    ).data


# --- A new model ----------------------------------------------------------------------------------


def prune_heads(
    model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress
) -> dict[str, Any]:
    """Write a copy of the model without some heads to a new folder, with the proof that it equals
    their ablation.
    """
    from ..surgery.pruning import list_text_uses, prune
    from ..surgery.verification.proof import ProofOptions

    folder, request = new_folder(model, arguments), read_pruning(model, arguments)
    net = read_native_model(model)
    texts = read_texts(net, model, arguments, list_text_uses(request.selection, request.fold))
    log = StepLog(progress, SELECTION_STEPS + PROOF_STEPS)
    result = prune(net, request.selection, texts.selection, fold=request.fold, log=log)
    options = ProofOptions(
        result.plan.summary,
        **result.proof_options,
        notes=(*texts.notes, *result.plan.notes),
        command=format_command(model, "prune", request.options, folder),
    )
    return NewModel(model, net, result.after, folder, result.data).write_and_prove(
        texts, options, log
    )


def convert_heads(
    model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress
) -> dict[str, Any]:
    """Write the model with another number or form of key-value heads to a new
    folder, with a proof.
    """
    from ..surgery.conversion import convert
    from ..surgery.verification.proof import ProofOptions

    folder, request = new_folder(model, arguments), read_conversion(arguments)
    net = read_native_model(model)
    texts = read_texts(net, model, arguments, request.conversion.text_uses)
    log = StepLog(progress, len(dict(net.spec.attention_specs())) + 1 + PROOF_STEPS)
    result = convert(net, request.conversion, texts.selection, kind=request.where, log=log)
    options = ProofOptions(
        request.conversion.summary,
        **result.proof_options,
        notes=(*texts.notes, *result.notes),
        command=format_command(model, "convert", request.options, folder),
    )
    groups = [
        {"site": site, "groups": [list(group) for group in groups_of_site]}
        for site, groups_of_site in result.groups.items()
    ]
    new_model = NewModel(model, net, result.after, folder, result.data)
    return new_model.write_and_prove(texts, options, log) | {"groups": groups}


@dataclass(frozen=True, eq=False)
class NewModel:
    """A changed copy of the open model, the folder it is written to, and the
    record of the change.
    """

    opened: OpenModel
    before: Transformer
    after: Transformer
    folder: Path
    record: Mapping[str, Any]

    def write_and_prove(
        self, texts: SurgeryTexts, options: ProofOptions, log: StepLog
    ) -> dict[str, Any]:
        """Write the model and its proof, and describe both; if that fails or is cancelled, no
        folder is left.
        """
        from dataclasses import replace

        from ..hub.pretrained_models import load
        from ..surgery.hf_export.model_folder import COMPRESSED_MODEL, write_model_folder
        from ..surgery.pruning_plan import fingerprint_model
        from ..surgery.verification.efficiency import TimingOptions
        from ..surgery.verification.proof import prove, write_proof

        log("writing the model")
        source = Path(self.opened.target) if self.opened.target else None
        record = dict(self.record) | {"model": fingerprint_model(self.before)}
        lines = {TEXTS_FILE: ("\n".join(texts.lines) + "\n").encode()}
        with stage_folder(self.folder, COMPRESSED_MODEL) as staged:
            written = write_model_folder(self.after, source, staged, record, extra_files=lines)
            options = replace(
                options,
                exports={"headwise.load of the written folder": lambda: load(staged)},
                timing=TimingOptions(seconds=TIMING_SECONDS),
            )
            proof = prove(self.before, self.after, texts.proof, options, log)
            write_proof(proof, staged)
            log.progress.check()
        self.opened.other = str(self.folder)
        return describe_result(proof) | {
            "folder": str(self.folder),
            "kind": written.kind,
            "sentence": written.summary,
            "files": [*written.files, "proof.json", "PROOF.md"],
        }


def describe_result(proof: ModelProof) -> dict[str, Any]:
    """A proof for the page: whether it holds, its sentences and its tables, and the command that
    repeats it.
    """
    from ..surgery.verification.proof_report import iter_summary

    return {
        "holds": proof.holds,
        "summary": list(iter_summary(proof)),
        "proof": proof.data,
        "command": proof.command,
    }
