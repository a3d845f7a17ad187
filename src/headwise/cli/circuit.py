"""`headwise circuit`: which heads, paths and edges change a metric between two texts, and why a
head looks at a token of one text.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..report.progress import ProgressReporter
from ..util.errors import pluralise
from .arguments import (
    TokenizerOptions,
    attach_named_tokenizer,
    check_model_path,
    check_text_model,
    load_on_device,
    parse_bytes,
    print_note,
    print_result,
)
from .options import Count, InputFile, Natural, UsageError, options

if TYPE_CHECKING:
    from torch import nn

ARROW = "->"
# of --pairs
MIN_COLUMNS = 2
MAX_COLUMNS = 3


@options
class CircuitOptions(TokenizerOptions):
    """Measure which heads make a model answer a clean text otherwise than a corrupt one: the
    effect of every head on a metric of the logits, estimated by attribution patching and checked by
    patching heads one by one; the effect of paths between heads; or the graph of all edges.

    MODEL  a folder, a Hub id (org/name, org/name@revision), a .gguf file, or FILE.py:FACTORY
    --clean TEXT  text for which the model shows the behaviour
    --corrupt TEXT  text with as many tokens for which it does not
    --pairs FILE  lines CLEAN, tab, CORRUPT, and perhaps a tab and the tokens of the metric
    --target TEXT  target text up to the token that is asked for, for an encoder-decoder model
    --metric METRIC  logit_difference:A,B or log_probability:A of the next token
    --path PATH  measure a path, such as 'L0H3 -> L1H2.k', 'L0H3 -> M1' or 'L0:1,3 -> logits';
        repeatable
    --edges  score all edges, and measure circuits of the best ones
    --text TEXT  explain one text; see --why and --lens in --help-all
    --limit COUNT  use at most this many pairs (default: all)
    --out FILE  draw the result (.svg, .png or .pdf)
    --overwrite  replace an earlier output of this command
    --json  print one JSON document instead of text

    one text (--text):
    --why HEAD  attribute the score of --query and --key in this head to embeddings, heads and MLPs
        before it, and with --tokens what it reads there
    --query INDEX  position of the query in the text
    --key INDEX  position of the key
    --baseline KIND  the score (zero) or its difference to the mean over all keys (mean)
    --lens  show what the model would predict after each attention and each block
    --tokens A,B  next tokens whose logit, or difference of two logits, --why and --lens follow

    details of the measurement:
    --position INDEX  token whose logits the metric reads (default: -1, the last; none for a model
        of masked tokens)
    --mlps KIND  MLPs on a path: free (computed again, as in the paper) or frozen
    --steps COUNT  runs between both texts whose gradients are averaged
    --exact COUNT  heads, or edges, that are also patched one by one
    --points COUNT  with --edges, sizes of circuits on the curves; 0 for none
    --draws COUNT  with --edges, random circuits of each size
    --budget MEMORY  with --edges, memory limit (default: 4 GB)
    --seed INT  random seed

    examples:
    headwise circuit path/to/model --pairs pairs.tsv --metric logit_difference
    headwise circuit MODEL --text TEXT --why L1H2 --key 3
    """

    command = "circuit"
    names = {"--path": "paths"}
    choices = {"mlps": "free frozen", "baseline": "zero mean"}
    needs = {
        "clean": "corrupt",
        "corrupt": "clean",
        "limit": "pairs",
        **dict.fromkeys(("points", "draws", "budget"), "edges"),
        "mlps": "paths",
        **dict.fromkeys(("edges", "paths", "steps", "exact", "target", "seed"), "metric"),
        **dict.fromkeys(("lens", "tokens"), "text"),
        **dict.fromkeys(("key", "query", "baseline"), "why"),
        "why": "text key",
    }
    excludes = (
        *("paths edges", "clean pairs", "paths out", "paths steps", "paths exact"),
        *("text clean", "text pairs", "text metric", "why lens", "why position"),
    )
    outputs = {"out": "util.output_paths:FIGURE_FILE"}
    model: str
    clean: str | None = None
    corrupt: str | None = None
    pairs: InputFile | None = None
    target: str | None = None
    metric: str | None = None
    paths: tuple[str, ...] = ()
    edges: bool = False
    text: str | None = None
    limit: Count | None = None
    out: str | None = None
    overwrite: bool = False
    json: bool = False
    why: str | None = None
    query: int = -1
    key: int | None = None
    baseline: str = "zero"
    lens: bool = False
    tokens: str | None = None
    position: int | None = None
    mlps: str = "free"
    steps: Count = 1
    exact: Natural = 20
    points: Natural = 8
    draws: Count = 3
    budget: str | None = None
    seed: int = 0

    @property
    def metric_name(self) -> str:
        """The metric with a position other than the last."""
        place = "" if self.position in (None, -1) else f" at position {self.position}"
        return f"{self.metric}{place}"

    def check(self) -> None:
        """Refuse impossible options before the model is loaded."""
        from ..observe.head_analysis.circuit_metrics import parse_metric
        from ..observe.head_names import parse_heads
        from ..report.plots import check_figure_path

        if self.out is not None:
            check_figure_path(self.out, self.existing)
        if self.text is not None:
            if self.why is None and not self.lens:
                raise UsageError(
                    "--text shows one of two things; add --why HEAD --key INDEX, or --lens"
                )
            parse_heads(self.why or "L0H0")
            self._check_model("use headwise.head_analysis.attribute_score in Python")
            return
        if self.metric is None:
            raise UsageError("missing --metric METRIC; add it, or --text TEXT for --why and --lens")
        if self.clean is None and self.pairs is None:
            raise UsageError("give a pair of texts: --clean TEXT --corrupt TEXT, or --pairs FILE")
        if self.out is not None and self.edges and not self.points:
            raise UsageError("--out draws the curves of circuits; give --points above 0")
        for path in self.paths:
            if ARROW not in path:
                raise UsageError(f"--path {path!r} is no path; write 'L0H3 -> L1H2.k'")
        if self.budget is not None:
            parse_bytes(self.budget)
        for pair in self.read_pairs():
            parse_metric(self.metric, *pair[2:])
        self._check_model("use headwise.head_analysis.patch_paths in Python")

    def _check_model(self, remedy: str) -> None:
        check_model_path("MODEL", self.model)
        check_text_model(self.model, "circuit", remedy)

    def read_pairs(self) -> list[tuple[Any, ...]]:
        """Return (clean, corrupt) or (clean, corrupt, tokens) for each pair."""
        if self.pairs is None:
            return [(self.clean, self.corrupt)]
        from ..observe.head_analysis.annotated_examples import read_lines

        pairs: list[tuple[Any, ...]] = []
        for number, line in enumerate(read_lines(self.pairs), 1):
            if not line.strip():
                continue
            columns = line.split("\t")
            if not MIN_COLUMNS <= len(columns) <= MAX_COLUMNS:
                fact = f"{self.pairs} line {number} has {pluralise(len(columns), 'column')}"
                raise UsageError(f"{fact}; write CLEAN, tab, CORRUPT, and perhaps tab and A,B")
            tokens = [tuple(one.split(",")) for one in columns[MIN_COLUMNS:]]
            pairs.append((*columns[:MIN_COLUMNS], *tokens))
        if not pairs:
            raise UsageError(f"{self.pairs} has no pair; give at least one line")
        return pairs[: self.limit]


def main(argv: list[str]) -> int:
    """Measure heads, paths or edges, print the result, and draw it if asked."""
    args = CircuitOptions.parse(argv)
    model = _load(args)
    result = _explain_text(model, args) if args.text is not None else _compare_pairs(model, args)
    if args.out is not None:
        from ..report.plots import save_figure

        save_figure(result.figure, Path(args.out), overwrite=args.overwrite)
        print_note(args.out)
    print_result(args, result)
    return 0


def _explain_text(model: nn.Module, args: CircuitOptions) -> Any:
    """Return the attribution of a score, and of the value that is read, or the logit lens."""
    from ..observe.head_analysis.logit_lens import logit_lens
    from ..observe.head_analysis.score_attribution import attribute_score, attribute_value

    tokens = tuple(args.tokens.split(",")) if args.tokens else ()
    if args.lens:
        position = -1 if args.position is None else args.position
        return logit_lens(model, args.text, tokens, position=position)
    head = args.why or ""
    places = [(args.text, args.query, args.key)]
    result = attribute_score(model, places, head, args.baseline)
    if not tokens:
        return result
    value = attribute_value(model, places, head, tokens)
    return replace(result, sides={**result.sides, **value.sides})


def _compare_pairs(model: nn.Module, args: CircuitOptions) -> Any:
    """Return the effects of heads, paths or edges on the metric."""
    from ..observe.head_analysis.circuit_metrics import parse_metric

    position = -1 if args.position is None else args.position
    # each pair has a metric of its own, with its tokens
    pairs: list[tuple[Any, ...]] = []
    for clean, corrupt, *tokens in args.read_pairs():
        inputs: list[Any] = [clean, corrupt]
        if args.target is not None:
            inputs = [{"source": text, "text": args.target} for text in inputs]
        metric = parse_metric(args.metric or "", *tokens)
        pairs.append((*inputs, replace(metric, position=position)))
    return _measure(model, pairs, args)


def _load(args: CircuitOptions) -> nn.Module:
    from ..hub.pretrained_models import load_original
    from ..observe.head_analysis.objectives import detect_head_objective
    from ..observe.inspect.model_inputs import is_encoder_decoder

    model = load_on_device(load_original, args.model, args).eval()
    if is_encoder_decoder(model) and args.target is None:
        fact = f"{args.model} is an encoder-decoder"
        if args.text is not None:
            remedy = "give --clean and --corrupt, with --target"
            raise UsageError(f"--text needs a model with one residual stream, but {fact}; {remedy}")
        raise UsageError(f"{fact}; add --target TEXT, which its decoder reads")
    if (
        args.why is None
        and args.position is None
        and detect_head_objective(model) == "masked-token"
    ):
        fact = f"{args.model} predicts masked tokens and no next one"
        raise UsageError(f"{fact}; give --position INDEX, the token that the metric reads")
    return attach_named_tokenizer(model, args)


def _measure(model: nn.Module, pairs: Any, args: CircuitOptions) -> Any:
    """Return the result that the options name."""
    report = ProgressReporter()
    if args.paths:
        from ..observe.head_analysis.path_patching import patch_paths

        paths: list[tuple[list[str], list[str]]] = []
        for path in args.paths:
            senders, _, receivers = path.partition(ARROW)
            paths.append((senders.strip().split("+"), receivers.strip().split("+")))
        result = patch_paths(model, pairs, args.metric_name, paths, mlps=args.mlps, seed=args.seed)
    elif args.edges:
        from ..observe.head_analysis.edge_attribution import EdgeOptions, attribute_edges

        budget = {"budget": parse_bytes(args.budget)} if args.budget else {}
        options = EdgeOptions(args.steps, args.exact, args.points, args.draws, args.seed, **budget)
        result = attribute_edges(model, pairs, args.metric_name, options=options, progress=report)
    else:
        from ..observe.head_analysis.attribution_patching import attribute_heads

        report("attributing the metric to heads")
        result = attribute_heads(model, pairs, args.metric_name, steps=args.steps, exact=args.exact)
    report("")
    return result
