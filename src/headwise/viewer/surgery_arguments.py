"""Arguments of the jobs of the Prune & convert screen, as library objects and as options of the command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .model_actions import read_heads, read_text
from .open_model import OpenModel

if TYPE_CHECKING:
    from ..head_analysis.annotated_examples import Example
    from ..models import Transformer
    from ..surgery import AttentionConversion, HeadSelection

FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
TEXTS_FILE = "texts.txt"  # in the new folder: the lines that heads were chosen and the proof was made with
MIN_TEXTS = 2  # an interval over texts needs as many
UNKNOWN_MODEL = "MODEL"  # in a command, for a model that was opened in Python
SELECTIONS = ("heads", "keep", "clusters")
CONVERSION_FORMS = ("kv", "mha", "latent", "collaborative", "routed")


class PruningRequest(NamedTuple):
    """Which heads to remove, by what they are replaced, and the options of `headwise prune` that say so."""

    selection: HeadSelection
    fold: str
    options: tuple[str, ...]
    needs_texts: bool


class ConversionRequest(NamedTuple):
    """The new form, the attention layers to convert, and the options of `headwise convert` that say so."""

    conversion: AttentionConversion
    where: str
    options: tuple[str, ...]
    needs_texts: bool


class SurgeryTexts(NamedTuple):
    """The lines of a job, the examples that heads are chosen by, those of the proof, and notes on both."""

    lines: tuple[str, ...]
    selection: list[Example]
    proof: list[Example]
    notes: tuple[str, ...]


# --- What to do ----------------------------------------------------------------------------------------


def read_pruning(model: OpenModel, arguments: Mapping[str, Any]) -> PruningRequest:
    """Read how heads are chosen: a list `heads`, the best share `keep` by a method, or one of each of `clusters`."""
    from ..surgery import DropHeads, HeadRanking, KeepOnePerCluster, KeepTop

    selections = [name for name in SELECTIONS if arguments.get(name)]
    if len(selections) != 1:
        raise ValueError(f"{len(selections)} of {', '.join(SELECTIONS)} say which heads to remove; give exactly one")
    fold, method = read_text(arguments, "fold", "none"), read_text(arguments, "by", "best")
    ranking = HeadRanking(method)
    fold_options = () if fold == "none" else ("--fold", fold)
    if selections == ["heads"]:
        heads = [(head.site, head.head) for head in read_heads(model, arguments)]
        options = ("--heads", *list_heads(heads), *fold_options)
        return PruningRequest(DropHeads(tuple(heads)), fold, options, fold == "mean")
    if selections == ["clusters"]:
        options = ("--clusters", "--by", method, *fold_options)
        return PruningRequest(KeepOnePerCluster(ranking), fold, options, needs_texts=True)
    amount, scope = arguments["keep"], read_text(arguments, "per", "layer")
    if type(amount) not in (int, float):
        raise ValueError(f"keep={amount!r} is no share or number of heads; give for example 0.5")
    options = ("--keep", repr(amount), "--by", method, "--per", scope, *fold_options)
    return PruningRequest(KeepTop(amount, ranking, scope), fold, options, method != "random" or fold == "mean")


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
        raise ValueError(f"there is no form {form[:40]!r}; use one of {', '.join(CONVERSION_FORMS)}")
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
        return ConversionRequest(pool, where, options, pool.needs_statistics)
    if form == "collaborative":
        width = _read_number(arguments, "width", 1)
        options = ("--to", f"collaborative={width}", *where_options)
        return ConversionRequest(ToCollaborative(width), where, options, needs_texts=False)
    if form == "routed":
        always, active = _read_number(arguments, "always", 0), _read_number(arguments, "active", 1)
        options = ("--to", f"routed={always},{active}", *where_options)
        return ConversionRequest(ToMixtureOfHeads(always, active), where, options, needs_texts=True)
    exact = ToMHA() if form == "mha" else ToLatent()
    return ConversionRequest(exact, where, ("--to", form, *where_options), needs_texts=False)


def _read_number(arguments: Mapping[str, Any], name: str, least: int) -> int:
    value = arguments.get(name)
    if type(value) is not int or value < least:
        raise ValueError(f"{name}={value!r} is not a whole number of at least {least}; give for example {least + 1}")
    return value


# --- The model, its texts and the new folder -----------------------------------------------------------


def read_native_model(model: OpenModel) -> Transformer:
    """The open model as a headwise model: itself, or read again from its folder, or a converted copy."""
    from ..hub.pretrained_models import load
    from ..models import Transformer
    from ..surgery.attention_replacement import to_native_model

    net = model.get_model()
    if isinstance(net, Transformer) or not model.target:
        return to_native_model(net)
    return load(Path(model.target))


def read_texts(net: Transformer, model: OpenModel, arguments: Mapping[str, Any]) -> SurgeryTexts:
    """Read the texts of a job, one a line, as `--data` of the commands does; without any, the open text."""
    from ..head_analysis.annotated_examples import examples_from_lines, split_examples

    lines = arguments.get("texts") or [read_open_text(model)]
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ValueError("texts must be a list of lines; give one text a line")
    lines = [line for text in lines for line in text.splitlines() if line.strip()]
    reader = examples_from_lines(net, lines)
    examples = reader.examples_with_frequencies()
    if len(examples) < MIN_TEXTS:
        reasons = f" ({'; '.join(reader.notes).replace(';', ',')})" if reader.notes else ""
        raise ValueError(
            f"a proof needs at least {MIN_TEXTS} texts, because its intervals are over texts, and {len(examples)} can "
            f"be read{reasons}; give more texts, one a line"
        )
    selection, proof, note = split_examples(examples)
    return SurgeryTexts(tuple(lines), selection, proof, (note, *reader.notes))


def read_open_text(model: OpenModel) -> str:
    """The open text as a line of texts; a source and its target are separated by a tab."""
    streams = model.get_recorded().streams
    texts = [row.text or " ".join(row.words) for name in ("source", "text") for row in streams.get(name, ())[:1]]
    return "\t".join(" ".join(text.split()) for text in texts)


def new_folder(model: OpenModel, arguments: Mapping[str, Any]) -> Path:
    """The folder of a new model inside the output folder; raises ValueError if it may not be written."""
    if not model.has_model:
        model.get_model()  # raises, because a trace has no weights
    if model.output_folder is None or model.read_only:
        raise ValueError("the page may not write; start headwise view with --out DIR and without --read-only")
    name = read_text(arguments, "name")
    if not FOLDER_NAME.fullmatch(name):
        raise ValueError(f"{name[:40]!r} is no folder name; use letters, digits, '.', '_' and '-'")
    folder = model.output_folder / name
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"the folder {name} exists; choose another name")
    return folder


def format_command(model: OpenModel, command: str, options: Sequence[str], folder: Path) -> str:
    """The command that makes the same model on the terminal, from the texts that the new folder keeps.

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
