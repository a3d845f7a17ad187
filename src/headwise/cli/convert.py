"""`headwise convert`: change the number or form of key-value heads, write the new model, and verify
it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .compression_arguments import CompressionOptions, CompressionRun
from .options import Count, UsageError, check_value, options

if TYPE_CHECKING:
    from ..surgery import AttentionConversion

CONVERSION_FORMS = ("mha", "latent", "collaborative=WIDTH", "routed=ALWAYS,ACTIVE")
FORM = re.compile(r"mha|latent|collaborative=(?P<width>\d+)|routed=(?P<always>\d+),(?P<active>\d+)")


@options
class ConvertOptions(CompressionOptions):
    """Convert attention layers to fewer key-value heads (GQA, MQA) or to another form (MHA, latent,
    collaborative, routed): give one of --kv and --to. Writes the model to a new folder, with a
    proof of what was saved and what was lost.

    --kv COUNT  pool to this many key-value heads in every layer
    --to FORM  rewrite exactly as mha or latent; or convert to collaborative=WIDTH or
        routed=ALWAYS,ACTIVE
    --align [SIDE=both]  align heads before pooling, within the model's symmetries: both (also
        without SIDE), keys or values
    --grouping KIND  heads to pool: consecutive, or similar (with the most similar values)

    details of the conversion:
    --where KIND  attention layers to convert: all, self or cross
    --by METHOD  importance method for --to routed

    examples:
    headwise convert path/to/model --kv 2 --align --data texts.txt --out smaller
    headwise convert path/to/model --to latent --data texts.txt --out latent
    """

    command = "convert"
    choices = {
        "align": "surgery.conversion:ALIGN_SIDES",
        "grouping": "surgery.conversion:GROUPINGS",
        "where": "surgery.conversion:ATTENTION_KINDS",
        "by": "surgery.head_selection:RANKING_METHODS",
    }
    kv: Count | None = None
    to: str | None = None
    align: str = "none"
    grouping: str = "consecutive"
    where: str = "all"
    by: str = "best"

    def check(self) -> None:
        """Refuse a target that the model cannot have."""
        super().check()
        if (self.kv is None) == (self.to is None):
            raise UsageError(
                "give exactly one target: --kv COUNT, or --to with one of "
                f"{', '.join(CONVERSION_FORMS)}"
            )
        if self.kv is not None:
            return
        if self.align != "none" or self.grouping != "consecutive":
            raise UsageError(
                f"--align and --grouping apply to --kv only; leave them out with --to {self.to}"
            )
        match = FORM.fullmatch(self.to or "")
        if match is None:
            raise UsageError(
                f"--to {self.to} is not a known form; give one of {', '.join(CONVERSION_FORMS)}"
            )
        if match["width"]:
            check_value("Count", "--to collaborative", int(match["width"]))


def main(argv: list[str]) -> int:
    """Convert the attention layers, retrain if asked, write the model and its proof."""
    args = ConvertOptions.parse(argv)
    conversion = _parse_conversion(args)
    run = CompressionRun.from_options(args)
    run.split_texts(conversion.text_uses)
    from ..surgery.conversion import convert

    result = convert(
        run.net, conversion, run.selection_examples, kind=args.where, log=run.report_progress
    )
    return run.finish(result)


def _parse_conversion(args: ConvertOptions) -> AttentionConversion:
    """Return the conversion that the options ask for."""
    from ..surgery import HeadRanking, Pool, ToCollaborative, ToLatent, ToMHA, ToMixtureOfHeads

    if args.kv is not None:
        return Pool(args.kv, args.align, args.grouping, args.seed)
    match = FORM.fullmatch(args.to or "")
    assert match is not None
    if match["width"]:
        return ToCollaborative(int(match["width"]))
    if match["active"]:
        ranking = HeadRanking(args.by, args.objective, seed=args.seed)
        return ToMixtureOfHeads(int(match["always"]), int(match["active"]), ranking)
    return ToMHA() if args.to == "mha" else ToLatent()
