"""The trace that the page shows, and its model if one is open."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ..observe.traces.attention_trace import THUMBNAIL_SIZE, TokenGrouping, Trace, group_tokens
from ..observe.traces.trace_comparison import TraceComparison
from ..util.errors import SpecError
from .weight_summaries import (
    Cells,
    HeadReader,
    compute_marginals,
    describe_measures,
    describe_trace,
    enlarge_picture,
    estimate_memory,
    find_peak,
    list_heads,
    make_edges,
    make_file_stem,
    pool_weights,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..models import Transformer
    from ..observe.head_analysis.head_table import HeadTable
    from ..observe.inspect.model_inputs import ModelInputs
    from ..observe.inspect.site import Site

ONLY_TRACE = "only a trace is open; start `headwise view` with the model"
MAX_TOKENS = 8192  # longest text that the page captures
MAX_TILE_CELLS = 1024  # cells on each side of a tile
CAPTURE_BUDGET = 2 * 10**9  # bytes of one trace
LENSES = ("weight", "value", "effect")
ABLATION_MODES = ("zero", "mean", "resample", "noise")
# Packages that a model and the actions need; the parts of each import one another.
LIBRARIES = (
    "torch",
    *(f"headwise.{name}" for name in ("models", "costs", "models.generation", "surgery", "hub")),
)
_importing = threading.Lock()
FloatArray = NDArray[np.float32]
Progress = Callable[[int, int, str], object]


def import_libraries() -> None:
    """Import what a model and the actions need, in one thread at a time.

    Two threads that first import parts of the same package at once can break Python's import.
    """
    with _importing:
        for name in LIBRARIES:
            import_module(name)


class AblatedHead(NamedTuple):
    """An ablated or scaled head: site, number, mode of `hw.ablate`, and scale."""

    site: str
    head: int
    mode: str = "zero"
    scale: float = 0.0


class TileRange(NamedTuple):
    """A range of queries and keys, and the maximum number of cells (rows, columns) to show."""

    queries: slice
    keys: slice
    size: tuple[int, int] = (MAX_TILE_CELLS, MAX_TILE_CELLS)


class Tile(NamedTuple):
    """A picture of a range of weights: 8-bit weights, a mask (1 where no key of a cell is allowed),
    and the weight shown as 255.
    """

    weights: NDArray[np.uint8]
    masked: NDArray[np.uint8]
    scale: float


class LoadingPlace(NamedTuple):
    """Device and dtype of models that are loaded, by name; None is the saved dtype."""

    device: str = "cpu"
    dtype: str | None = None


ON_CPU = LoadingPlace()
KEPT_BY_SERVER = ("first", "folders", "revision", "window", "opened_by")  # whatever is opened


@dataclass
class OpenModel:
    """A trace with its measures and, if available, its model.

    `load_model` loads the model when it is first needed, so that the trace shows immediately.
    `revision` grows whenever another trace is shown, so that a window of the page is not answered
    about the text that another window opened: `window` is the one whose job runs, `opened_by` the
    one that opened the present revision. `table` holds the measures over several texts,
    `own_table` over the open text alone. `output_folder` is where pruned and converted models may
    be written; None forbids writing. `target` is the model folder as named on the command line, ""
    for other models. `texts` are the initial lines of screens that need several texts. `pruned`
    lists the heads removed earlier from each site, by their original numbers. `other` is the model
    or trace to compare with ("" for none), and `comparison` the last comparison; `loading` is where
    models are loaded. If `grouping` merges or leaves out tokens, `trace` is that view of
    `recorded`. `folders` hold the other models and traces that the page may open; `opened_name` is
    the one that is open ("" is the first, which `first` keeps), and `first_trace` the run that it
    was opened with.
    """

    trace: Trace | None = None
    model: nn.Module | None = None
    load_model: Callable[[], nn.Module] | None = None
    table: HeadTable | None = None
    own_table: HeadTable | None = None
    read_only: bool = False
    output_folder: Path | None = None
    target: str = ""
    texts: tuple[str, ...] = ()
    max_tokens: int = MAX_TOKENS
    revision: int = 0
    window: str = ""
    opened_by: str = ""
    warnings: list[str] = field(default_factory=list[str])
    pruned: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    other: str = ""
    loading: LoadingPlace = ON_CPU
    comparison: TraceComparison | None = None
    grouping: TokenGrouping = field(default_factory=TokenGrouping)
    recorded: Trace | None = None
    folders: tuple[Path, ...] = ()
    opened_name: str = ""
    first: OpenModel | None = None
    first_trace: Trace | None = None
    _changing: threading.Lock = field(
        default_factory=threading.Lock, init=False, repr=False, compare=False
    )
    _loading: threading.Lock = field(
        default_factory=threading.Lock, init=False, repr=False, compare=False
    )
    _origin: OpenModel | None = field(default=None, init=False, repr=False, compare=False)

    # --- what is open -----------------------------------------------------------------------------

    def __post_init__(self) -> None:
        self.first_trace = self.trace

    def snapshot(self) -> OpenModel:
        """Return a copy with a fixed trace, measures and revision.

        Requests answer from a snapshot, so that a new text cannot mix two traces.
        """
        with self._changing:
            view = copy.copy(self)
        view._origin = self._origin or self
        return view

    @property
    def name(self) -> str:
        """Model name for titles."""
        return "headwise" if self.trace is None else str(self.trace.model.get("name", "headwise"))

    @property
    def has_model(self) -> bool:
        """True if the model is open or can be loaded."""
        return self.model is not None or self.load_model is not None

    def get_model(self) -> nn.Module:
        """Return the open model, loading it if necessary. Raises ValueError if only a trace is
        open.
        """
        if self.model is None and self._origin is not None:
            self.model = self._origin.get_model()
        if not self.has_model:
            raise ValueError(ONLY_TRACE)
        import_libraries()
        if self.model is None:
            with self._loading:  # several requests may need the model at once
                if self.model is None:
                    assert self.load_model is not None, "has_model was checked"
                    self.model = self.load_model().eval()
        return self.model

    @property
    def sites(self) -> dict[str, Site]:
        """Return the attention layers of the model by name; empty if no model is loaded."""
        if self.model is None:
            return {}
        from ..observe.inspect.attention_sites import sites

        return {site.name: site for site in sites(self.model)}

    def describe(self) -> dict[str, Any]:
        """Describe the open model for the page."""
        trace = self.trace if self.trace is not None else Trace({}, {}, ())
        reasons = dict.fromkeys(("text", "measure", "ablate", "write"), "")
        if not self.has_model:
            reasons = dict.fromkeys(reasons, ONLY_TRACE)
        elif self.output_folder is None or self.read_only:
            reasons["write"] = "started without --out, or with --read-only"
        return describe_trace(
            trace, self.sites, is_loadable=self.load_model is not None, pruned=self.pruned
        ) | {
            "kind": "model" if self.has_model else "trace",
            "revision": self.revision,
            "readOnly": self.read_only,
            "warnings": list(self.warnings),
            "measures": describe_measures(self.shown_table),
            "maxTokens": self.max_tokens,
            "fileStem": make_file_stem(self.name),
            "texts": list(self.texts),
            "other": Path(self.other).name,
            "openable": list(list_openable(self.folders)),
            "opened": self.opened_name,
            "isFirstText": (self.recorded or trace).streams is (self.first_trace or trace).streams,
            "grouping": asdict(self.grouping),
            "capabilities": {
                name: {"possible": not why, "reason": why} for name, why in reasons.items()
            },
            "memory": estimate_memory(trace, self.model, self.max_tokens),
        }

    @property
    def shown_table(self) -> HeadTable | None:
        """The measures over several texts, or over the open text if there are no others."""
        return self.table or self.own_table

    @property
    def heads(self) -> list[tuple[str, int]]:
        """List all heads of the trace as (site, head), in page order."""
        return [] if self.trace is None else list_heads(self.trace)

    def get_trace(self) -> Trace:
        """Return the open trace. Raises ValueError if no text was captured yet."""
        if self.trace is None:
            raise ValueError("no text has been captured yet; enter a text first")
        return self.trace

    def get_recorded(self) -> Trace:
        """Return the open trace with the model's tokens, ignoring any grouping."""
        return self.get_trace() if self.recorded is None else self.recorded

    def site_name(self, number: int) -> str:
        """Return the name of the site with this number. Raises ValueError for an unknown number."""
        layers = self.get_trace().layers
        if not 0 <= number < len(layers):
            raise ValueError(
                f"there is no site {number}: the trace has {len(layers)}; give 0 to "
                f"{len(layers) - 1}"
            )
        return layers[number].name

    # --- weights ----------------------------------------------------------------------------------

    def weights(self, site: str, head: int, queries: slice, lens: str = "weight") -> FloatArray:
        """Return weights of one head for a range of queries, [queries, keys], through a lens.

        "weight" gives the attention weights. "value" multiplies them by the norm of each value
        vector, "effect" by its norm after the head's output projection (2004.10102).
        """
        return self.head_reader(site, head, lens).weights(queries)

    def head_reader(self, site: str, head: int, lens: str = "weight") -> HeadReader:
        """Return a reader of one head's weights through a lens, and its mask, by query range."""
        trace = self.get_trace()
        layer = trace.get_layer(site)
        # once, because the output projection takes long to read
        norms = self._value_norms(site, head, lens)

        def read_weights(queries: slice) -> FloatArray:
            weights = trace.head_weights(site, head, queries).astype(np.float32, copy=False)
            return weights if norms is None else weights * norms[: weights.shape[1]]

        def read_mask(queries: slice) -> NDArray[np.bool_]:
            return trace.head_mask(site, head, queries)

        return HeadReader(read_weights, read_mask, layer.num_queries, layer.num_keys)

    def _value_norms(self, site: str, head: int, lens: str) -> FloatArray | None:
        """Return a lens's factor for every key; None for the plain weights."""
        layer = self.get_trace().get_layer(site)
        if lens not in LENSES:
            raise ValueError(f"unknown lens {lens!r}; use one of {', '.join(LENSES)}")
        if lens == "weight":
            return None
        if "v" not in layer.arrays:
            raise ValueError(
                f"the values of {site} were not recorded; record the trace with --record v"
            )
        values = layer.arrays["v"][0, :, layer.kv_head_of_query[head]].astype(np.float32)
        if lens == "effect":
            values = values @ self._output_matrix(site, head)
        return np.linalg.norm(values, axis=-1).astype(np.float32)

    def _output_matrix(self, site: str, head: int) -> FloatArray:
        """Return the output projection of one head, [head_dim, model]."""
        net = self.get_model()
        from ..observe.head_analysis.head_circuits import (
            get_circuits,  # after the model, which imports torch in one thread
        )

        circuits = get_circuits(net)
        if site not in circuits:
            raise ValueError(
                f"the output projection of {site} cannot be read; use the lens weight or value"
            )
        return np.asarray(circuits[site].output_map(head).float().cpu().numpy(), np.float32)

    def tile(self, site: str, head: int, part: TileRange, lens: str = "weight") -> Tile:
        """Return a picture of a range of weights; each cell shows its largest weight."""
        layer = self.get_trace().get_layer(site)
        start, stop, _ = part.queries.indices(layer.num_queries)
        left, right, _ = part.keys.indices(layer.num_keys)
        if stop <= start or right <= left:
            raise ValueError("the tile is empty; give at least one query and one key")
        sides = [min(side, MAX_TILE_CELLS) for side in part.size]
        cells = Cells(make_edges(start, stop, sides[0]), make_edges(left, right, sides[1]))
        values, masked = pool_weights(self.head_reader(site, head, lens), cells)
        scale = 1.0 if lens == "weight" else float(values.max(initial=0.0)) or 1.0
        pixels = np.round(values * (255 / scale)).clip(0, 255).astype(np.uint8)
        return Tile(pixels, masked, scale)

    def thumbnails(self) -> NDArray[np.uint8]:
        """Return thumbnails of all heads, [heads, 64, 64], in the order of `heads`."""
        trace = self.get_trace()
        if not trace.thumbnails:
            with_thumbnails = trace.with_thumbnails(THUMBNAIL_SIZE)
            for holder in (self,) if self._origin is None else (self, self._origin):
                with holder._changing:
                    if holder.trace is trace:
                        holder.trace = with_thumbnails
            trace = with_thumbnails
        atlas = np.zeros((len(self.heads), THUMBNAIL_SIZE, THUMBNAIL_SIZE), np.uint8)
        for number, (site, head) in enumerate(self.heads):
            atlas[number] = enlarge_picture(trace.thumbnail(site, head))
        return atlas

    def marginals(self, site: str, head: int, lens: str = "weight") -> dict[str, FloatArray]:
        """Compute the weight on each key, the entropy and maximum of each query, and the mean
        weight at each distance.

        The entropy and the means by distance ignore the lens.
        """
        return compute_marginals(self.head_reader(site, head), self._value_norms(site, head, lens))

    def peak(
        self, site: str, head: int, part: TileRange, lens: str = "weight"
    ) -> tuple[int, int, float]:
        """Find the largest weight in a range of queries and keys."""
        return find_peak(self.head_reader(site, head, lens).weights, part.queries, part.keys)

    # --- changes ----------------------------------------------------------------------------------

    def check_ablated(self, heads: Sequence[AblatedHead]) -> None:
        """Raise ValueError for heads that do not exist or cannot be ablated."""
        self.get_model()
        sites = self.sites
        for ablated in heads:
            site = sites.get(ablated.site)
            if site is None or not 0 <= ablated.head < site.heads:
                raise ValueError(f"there is no head {ablated.head} at {ablated.site!r} to ablate")
            if not site.ablate.possible:
                raise ValueError(f"cannot ablate heads of {ablated.site}: {site.ablate.reason}")

    def _open_revision(self) -> None:
        self.revision += 1
        self.opened_by = self.window

    def is_other_window(self, window: str, revision: int | None) -> bool:
        """True if `window` ("" if unnamed) shows another revision than the open one, which it did
        not open itself.
        """
        is_own = window != "" and window == self.opened_by
        return revision not in (None, self.revision) and not is_own

    def show(self, other: OpenModel) -> None:
        """Show another model or trace in place of this one, which a running server keeps."""
        with self._changing:
            if not self.opened_name:
                self.first = copy.copy(self)
            self._open_revision()
            own = {name: getattr(self, name) for name in KEPT_BY_SERVER}
            for item in fields(self):
                if item.init:
                    setattr(self, item.name, own.get(item.name, getattr(other, item.name)))

    def set_trace(self, trace: Trace) -> None:
        """Show another trace and drop its own measures and the comparison.

        Head classes set by the user and measures over several texts belong to the model and stay.
        """
        with self._changing:
            if self.trace is not None and self.trace.classes and not trace.classes:
                heads = set(list_heads(trace))
                classes = {head: name for head, name in self.trace.classes.items() if head in heads}
                trace = replace(trace, classes=classes)
            self.trace = trace
            self.own_table = None
            self.comparison = None
            self.grouping = TokenGrouping()
            self.recorded = None
            self._open_revision()

    def set_classes(self, classes: Mapping[tuple[str, int], str]) -> None:
        """Store the user's head classes in the saved and the shown trace."""
        heads = set(self.heads)
        wrong = [place for place in classes if place not in heads]
        if wrong:
            raise ValueError(f"there is no head {wrong[0][1]} of {wrong[0][0]!r} to name")
        with self._changing:
            if self.trace is not None:
                self.trace = replace(self.trace, classes=dict(classes))
            if self.recorded is not None:
                self.recorded = replace(self.recorded, classes=dict(classes))

    def set_grouping(self, grouping: TokenGrouping) -> None:
        """Merge or leave out tokens in everything shown. Measures and jobs still use the recorded
        tokens.
        """
        recorded = self.get_recorded()
        shown = (
            group_tokens(recorded, grouping).with_thumbnails()
            if grouping.changes_anything
            else recorded
        )
        with self._changing:
            if recorded is not (self.recorded or self.trace):
                raise ValueError("another text was opened meanwhile; try again")
            self.trace = shown
            self.grouping = grouping
            self.recorded = recorded if grouping.changes_anything else None
            self._open_revision()

    def set_comparison(self, comparison: TraceComparison, trace: Trace) -> None:
        """Store a comparison of the open trace. Raises ValueError if another trace was opened
        meanwhile.
        """
        with self._changing:
            if self.get_recorded().layers is not trace.layers:
                raise ValueError("another text was opened meanwhile; compare again")
            self.comparison = comparison

    def get_comparison(self) -> TraceComparison:
        """Return the last comparison of the open trace. Raises ValueError if there is none."""
        if self.comparison is None:
            raise ValueError(
                "nothing was compared with the open text yet; compare on the screen Diff first"
            )
        return self.comparison

    def set_tables(self, table: HeadTable | None = None, own: HeadTable | None = None) -> None:
        """Show these measures over several texts, or over the open text alone."""
        with self._changing:
            self.table = table or self.table
            self.own_table = own or self.own_table


MAX_OPENABLE = 200  # models and traces that the page lists


def list_openable(folders: Sequence[Path]) -> dict[str, Path]:
    """Map a name to each model folder and trace in some folders; links may lead elsewhere, so they
    are left out.
    """
    openable: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            is_model = any((path / name).is_file() for name in ("headwise.toml", "config.json"))
            if (is_model or is_trace(path.name)) and path.name[0] != "." and not path.is_symlink():
                openable[f"{folder.name}/{path.name}"] = path
    return dict(list(openable.items())[:MAX_OPENABLE])


TRACE_SUFFIX = ".trace"


def is_trace(name: str) -> bool:
    """True for the name of a trace file.

    >>> is_trace("a.trace"), is_trace("model")
    (True, False)
    """
    return name.endswith(TRACE_SUFFIX)


def load_target(what: Path | str | nn.Module, loading: LoadingPlace = ON_CPU) -> nn.Module:
    """Load a model by its name, with its weights, in eval mode."""
    from ..hub.pretrained_models import load_original

    model = load_original(what, **loading._asdict()).eval()
    if any(tensor.is_meta for tensor in model.parameters()):
        raise SpecError(f"{what} has no weights; give a folder with model.safetensors")
    return model


def read_pruned_heads(folder: str) -> dict[str, list[int]]:
    """Return the heads that `headwise prune` removed from a model folder, by site; empty for other
    models.
    """
    from ..models.model_spec.serialization import RECORD_FILE, SurgeryRecord

    path = Path(folder) / RECORD_FILE
    if not folder or not path.is_file():
        return {}
    change = SurgeryRecord.from_file(path).change
    if change.get("operation") != "prune":
        return {}
    return {
        site: sorted(set(range(count)) - set(change["keep"][site]))
        for site, count in change["head_counts"].items()
    }


# --- The recorded token ids, as inputs of a model -------------------------------------------------

MAX_COPIED_PARAMS = 300_000_000
# headwise copies of transformers models
_copies: WeakKeyDictionary[nn.Module, Transformer] = WeakKeyDictionary()


def id_arguments(net: nn.Module) -> dict[str, str]:
    """Map each stream to the model argument that takes its token ids."""
    from ..models import Transformer
    from ..observe.inspect.model_inputs import is_encoder_decoder

    if isinstance(net, Transformer):
        return {"text": "x", "source": "source"}
    if is_encoder_decoder(net):
        return {"text": "decoder_input_ids", "source": "input_ids"}
    return {"text": "input_ids"}


def id_rows(net: nn.Module, trace: Trace) -> dict[str, list[int]]:
    """Return the recorded token ids of a trace by model argument."""
    names = id_arguments(net)
    streams = trace.streams.items()
    return {names[name]: list(rows[0].ids) for name, rows in streams if rows and name in names}


def id_inputs(net: nn.Module, trace: Trace) -> dict[str, Tensor]:
    """Return the recorded token ids of a trace as model arguments, [1, T]."""
    import torch

    from ..observe.inspect.model_inputs import get_device

    ids = id_rows(net, trace)
    if not ids:
        raise ValueError("the open text has no token ids; capture a text on the page first")
    return {name: torch.tensor([row], device=get_device(net)) for name, row in ids.items()}


def get_native_copy(model: nn.Module) -> Transformer:
    """Return the model as a headwise model; a transformers model is copied once."""
    from ..models import Transformer
    from ..observe.head_analysis.head_circuits import as_native_model

    if isinstance(model, Transformer):
        return model
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > MAX_COPIED_PARAMS:
        fact = f"{type(model).__name__} has {count / 1e6:,.0f} M parameters, and only models up to"
        remedy = "open it as a headwise model: hw.view(hw.load(FOLDER), TEXT)"
        raise ValueError(
            f"{fact} {MAX_COPIED_PARAMS / 1e6:,.0f} M are copied for their steps; {remedy}"
        )
    if model not in _copies:
        _copies[model] = as_native_model(model).eval()
    return _copies[model]


def open_inputs(model: OpenModel) -> ModelInputs:
    """Return the inputs of the open text, from its recorded token ids."""
    from ..observe.inspect.model_inputs import prepare_inputs

    net = model.get_model()
    return prepare_inputs(net, id_inputs(net, model.get_recorded()), 0)
