"""The jobs of the Prune & convert screen: sizes and possible forms, a plan, and a new model with its proof."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..output_paths import stage_folder
from ..progress import CountedMessage
from .model_worker import JobProgress
from .open_model import OpenModel
from .surgery_arguments import (
    TEXTS_FILE,
    SurgeryTexts,
    format_command,
    new_folder,
    read_conversion,
    read_native_model,
    read_pruning,
    read_texts,
)

if TYPE_CHECKING:
    from ..models import Transformer
    from ..spec.attention_spec import AttentionSpec
    from ..surgery import AttentionConversion
    from ..surgery.verification.proof import ModelProof, ProofOptions

TIMING_SECONDS = 4.0  # to measure the speed of both models in
PROOF_STEPS = 6  # messages of write_model_folder and prove
SELECTION_STEPS = 3  # messages of choosing and removing heads


@dataclass
class StepLog:
    """Turns the messages of the library into progress: each without a count of its own is one step of `total`."""

    progress: JobProgress
    total: int
    done: int = 0

    def __call__(self, message: str) -> None:
        """Report the step that begins; raises JobCancelled if the job is to stop."""
        is_counted = isinstance(message, CountedMessage)
        self.progress(min(self.done - is_counted, self.total - 1), self.total, message)
        self.done += not is_counted


# --- Before anything is changed ------------------------------------------------------------------------


def describe_surgery(model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress) -> dict[str, Any]:
    """The sizes of the open model, and the forms that its attention can be converted to, with reasons if it cannot."""
    from ..surgery.head_selection import RANKING_METHODS
    from ..surgery.pruning_plan import count_heads
    from ..surgery.verification.efficiency import compare_cost

    progress(0, 2, "reading the model")
    net = read_native_model(model)
    specs = [spec for _, spec in net.spec.attention_specs()]
    progress(1, 2, "trying the forms")
    return {
        "heads": sum(count_heads(net.spec).values()),
        "kvHeads": sum(spec.heads.kv for spec in specs),
        "costs": [pair.data for pair in compare_cost(net, net).costs],
        "forms": list_forms(net, specs, progress),
        "methods": list(RANKING_METHODS),
    }


def list_forms(net: Transformer, specs: Sequence[AttentionSpec], progress: JobProgress) -> list[dict[str, Any]]:
    """Try every form on one attention of each kind; a form that an attention refuses has that reason."""
    from ..surgery import Pool, ToCollaborative, ToLatent, ToMHA, ToMixtureOfHeads

    heads = min(len(spec.score_head_of_output) for spec in specs)
    counts = [count for count in range(1, min(spec.heads.kv for spec in specs)) if _divides_all(count, specs)]
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
    if not reasons["mha"] and all(spec.heads.kv == len(spec.score_head_of_output) for spec in specs):
        reasons["mha"] = "every query head has its own key-value head already"
    numbers = {"kv": {"counts": counts}, "collaborative": {"width": width}, "routed": {"heads": heads}}
    return [
        {"form": form, "possible": not reason, "reason": reason} | numbers.get(form, {})
        for form, reason in reasons.items()
    ]


def _divides_all(count: int, specs: Sequence[AttentionSpec]) -> bool:
    return all(spec.heads.kv % count == 0 for spec in specs)


def _find_refusal(net: Transformer, conversion: AttentionConversion) -> str:
    """The reason why an attention of the model cannot be converted; empty if one of each kind can."""
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


def plan_pruning(model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress) -> dict[str, Any]:
    """The heads that a pruning would remove, and the sizes before and after it; nothing is written."""
    from ..surgery.pruning import prune
    from ..surgery.verification.efficiency import compare_cost

    request, net = read_pruning(model, arguments), read_native_model(model)
    log = StepLog(progress, SELECTION_STEPS)
    examples = read_texts(net, model, arguments).selection if request.needs_texts else []
    result = prune(net, request.selection, examples, fold=request.fold, log=log)
    sites = {layer.name: number for number, layer in enumerate(model.get_trace().layers)}
    return {
        "summary": result.plan.summary,
        "removed": [[sites[site], head] for site, head in result.plan.removed_heads if site in sites],
        "kept": result.plan.num_kept,
        "heads": sum(result.plan.head_counts.values()),
        "notes": list(result.plan.notes),
    } | compare_cost(net, result.after).data


def plan_conversion(model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress) -> dict[str, Any]:
    """The sizes before and after a conversion; they do not depend on texts, so that heads are pooled in order."""
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
    return {"summary": request.conversion.summary, "notes": []} | compare_cost(net, result.after).data


# --- A new model ---------------------------------------------------------------------------------------


def prune_heads(model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress) -> dict[str, Any]:
    """Write a copy of the model without some heads to a new folder, with the proof that it equals their ablation."""
    from ..surgery.pruning import prune
    from ..surgery.verification.proof import ProofOptions

    folder, request = new_folder(model, arguments), read_pruning(model, arguments)
    net = read_native_model(model)
    texts = read_texts(net, model, arguments)
    log = StepLog(progress, SELECTION_STEPS + PROOF_STEPS)
    result = prune(net, request.selection, texts.selection, fold=request.fold, log=log)
    options = ProofOptions(
        result.plan.summary,
        keep=dict(result.plan.changed_sites),
        replacements={**result.head_constants},
        notes=(*texts.notes, *result.plan.notes),
        command=format_command(model, "prune", request.options, folder),
    )
    return NewModel(model, net, result.after, folder, result.data).write_and_prove(texts, options, log)


def convert_heads(model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress) -> dict[str, Any]:
    """Write the model with another number or form of key-value heads to a new folder, with a proof."""
    from ..surgery.conversion import convert
    from ..surgery.verification.proof import ProofOptions

    folder, request = new_folder(model, arguments), read_conversion(arguments)
    net = read_native_model(model)
    texts = read_texts(net, model, arguments)
    log = StepLog(progress, len(dict(net.spec.attention_specs())) + 1 + PROOF_STEPS)
    result = convert(net, request.conversion, texts.selection, kind=request.where, log=log)
    equivalents: dict[str, Callable[[], Any]] = {}
    if result.equivalent is not None:
        equivalents["aligned, before heads are pooled"] = lambda: result.equivalent
    if request.conversion.is_exact:
        equivalents["the new form, an exact rewrite"] = lambda: result.after
    options = ProofOptions(
        request.conversion.summary,
        equivalents=equivalents,
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
    """A changed copy of the open model, the folder it is written to, and the record of the change."""

    opened: OpenModel
    before: Transformer
    after: Transformer
    folder: Path
    record: Mapping[str, Any]

    def write_and_prove(self, texts: SurgeryTexts, options: ProofOptions, log: StepLog) -> dict[str, Any]:
        """Write the model and its proof, and describe both; if that fails or is cancelled, no folder is left."""
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
    """A proof for the page: whether it holds, its sentences and its tables, and the command that repeats it."""
    from ..surgery.verification.proof_report import iter_summary

    return {"holds": proof.holds, "summary": list(iter_summary(proof)), "proof": proof.data, "command": proof.command}
