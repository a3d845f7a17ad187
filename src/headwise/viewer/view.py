"""`hw.view` and `hw.view_attention`: show a model or a trace in a notebook, the browser, or one
file.
"""

from __future__ import annotations

import html
import os
import sys
import threading
import webbrowser
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..observe.traces import Trace, trace_from_weights
from ..util.escaping import escape_html, make_visible
from ..util.files import write_atomically
from ..util.output_paths import Existing, FileKind, FolderKind, check_output
from .export_files import TITLE_END, render_export
from .open_model import OpenModel
from .targets import Target, open_model, open_target

FRAME_HEIGHT = 720  # pixels of the frame in a notebook
# The view of the widget: notebooks that remove frames from HTML keep those that a script adds.
FRAME_SCRIPT = """
function render({ model, el }) {
  const frame = document.createElement("iframe");
  frame.setAttribute("sandbox", "allow-scripts allow-downloads");
  frame.style.cssText = "width:100%;border:0;height:" + model.get("height") + "px";
  frame.title = "heads of the model";
  frame.srcdoc = model.get("page");
  model.on("change:page", () => { frame.srcdoc = model.get("page"); });
  model.on("change:height", () => { frame.style.height = model.get("height") + "px"; });
  el.append(frame);
}
export default { render };
"""


# --- One HTML file --------------------------------------------------------------------------------


HTML_PAGE = FileKind("page", (f"{TITLE_END}</title>".encode(),))
MODELS_FOLDER = FolderKind("folder of models", ("*",))  # every model is a new folder inside


def write_export(opened: OpenModel, path: Path | str, existing: Existing = "refuse") -> None:
    """Measure the heads of a model if necessary, and write the page to one HTML file."""
    path = check_output(path, HTML_PAGE, existing)
    measure_heads_once(opened)
    write_atomically(path, render_export(opened).encode())


def measure_heads_once(opened: OpenModel) -> None:
    """Measure and classify the heads of a model over the open text and its other texts. If that
    fails, the page shows the reason as a warning.
    """
    if opened.shown_table is not None:
        return
    from .model_actions import measure
    from .model_worker import Job, JobProgress

    try:
        measure(opened, {}, JobProgress(Job("measure", {})))
        if opened.texts:
            measure(opened, {"texts": [*opened.texts]}, JobProgress(Job("measure", {})))
    except ValueError as error:
        opened.warnings.append(f"the heads are not measured: {error}")


# --- The server and the browser -------------------------------------------------------------------


def serve_page(
    opened: OpenModel,
    announce: Callable[[str], object],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    open_browser: bool = True,
    screen: str = "",
) -> None:
    """Serve the page until interrupted; port 0 is a free one. Calls `announce` with one line, the
    address, which ends in that of a `screen` if there is one.
    """
    from .export_files import load_assets
    from .server import ServerAddress, serve

    load_assets()  # a page that is not built is reported before anything starts

    def on_start(address: ServerAddress) -> None:
        url = f"{address.url}&{screen}" if screen else address.url
        announce(f"{opened.name}: {url}  (Ctrl+C stops it)")
        if open_browser and has_browser():  # the socket listens already
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

    serve(opened, host=host, port=port, allow_remote=True, on_start=on_start)


def has_browser() -> bool:
    """True if a graphical browser can be opened here; a terminal browser would hide the address."""
    if sys.platform.startswith("linux") and not any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    ):
        return False
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True


# --- Python and notebooks -------------------------------------------------------------------------


class View:
    """The page of a model or a trace. A notebook shows it; `save` writes it to a file, `serve`
    opens it live.

    In a notebook, the page is in a sandboxed frame without access to the notebook, and shows a
    snapshot. With anywidget installed it is a widget, so that it also appears where notebooks
    remove frames.
    """

    def __init__(self, opened: OpenModel) -> None:
        self.opened = opened
        self._html = ""

    @property
    def html(self) -> str:
        """Return the page as one HTML file."""
        if not self._html:
            measure_heads_once(self.opened)
            self._html = render_export(self.opened)
        return self._html

    def save(self, path: Path | str, *, overwrite: bool = False) -> None:
        """Write the page to one HTML file, which opens in any browser without a network.

        `overwrite` replaces an earlier page; anything else at this path is refused.
        """
        path = check_output(path, HTML_PAGE, "overwrite" if overwrite else "refuse")
        write_atomically(path, self.html.encode())

    def serve(self, *, port: int = 0, open_browser: bool = True) -> None:
        """Serve the live page on this computer until interrupted (Ctrl+C)."""
        serve_page(self.opened, print_address, port=port, open_browser=open_browser)

    def _repr_html_(self) -> str:
        return frame_html(self.html, self.opened.name)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """Return notebook content: a widget if anywidget is installed, else the frame."""
        if find_spec("anywidget") is None:
            return {"text/plain": repr(self), "text/html": self._repr_html_()}
        return make_widget(self.html)._repr_mimebundle_(**options)

    def __repr__(self) -> str:
        return (
            f"<page of {self.opened.name}: .save('page.html') writes it, .serve() opens it in "
            "the browser>"
        )


def make_widget(page: str, height: int = FRAME_HEIGHT) -> Any:
    """Make a widget with a page in a sandboxed frame; `page` and `height` can be changed later."""
    import anywidget  # pyright: ignore[reportMissingImports] - an extra, which `view` checks for
    import traitlets  # pyright: ignore[reportMissingImports] - comes with anywidget

    class PageWidget(anywidget.AnyWidget):
        """A page in a sandboxed frame."""

        _esm = FRAME_SCRIPT
        page = traitlets.Unicode("").tag(sync=True)
        height = traitlets.Int(FRAME_HEIGHT).tag(sync=True)

    return PageWidget(page=page, height=height)


def print_address(line: str) -> None:
    """Write one line to the terminal."""
    sys.stdout.write(make_visible(line) + "\n")
    sys.stdout.flush()


def frame_html(page: str, name: str) -> str:
    """Return a sandboxed frame with a page. Scripts can run and save files, but cannot access the
    parent document.

    >>> frame_html("<p>1</p>", "a")[:60]
    '<iframe title="heads of a" sandbox="allow-scripts allow-down'
    """
    style = f"width:100%;height:{FRAME_HEIGHT}px;border:0"
    return (
        f'<iframe title="heads of {escape_html(name)}" sandbox="allow-scripts allow-downloads" '
        f'srcdoc="{html.escape(page)}" style="{style}"></iframe>'
    )


def view(
    model_or_trace: Any = None,
    text: Any = None,
    *,
    source: str | None = None,
    image: Path | str | None = None,
    out: Path | str | None = None,
    tokenizer: object = None,
    row: int = 0,
) -> View:
    """Return the page of a model or a trace. A notebook shows it, `.serve()` opens it in the
    browser, `.save(path)` writes it.

    `model_or_trace` is a model or a name as in `hw.load`, a `Trace` or the path of its file, or
    None for the bundled sample. `text` is the input: a text, token ids or a mapping of the model's
    arguments; for an encoder-decoder, `source` is the input and `text` the output. `tokenizer` is
    needed for texts if the model has none. Of a batch, the page shows text `row`. A vision model
    takes `image`: an image, a folder of images or an .npy. `out` is the folder for models pruned on
    the page; without it the page writes no files.

    >>> import headwise as hw
    >>> hw.view()
    <page of dates: .save('page.html') writes it, .serve() opens it in the browser>
    """
    folder = None if out is None else Path(out)
    picture = "" if image is None else str(image)

    def prepare(model: Any) -> Any:
        from ..observe.inspect.model_tokenizer import with_tokenizer

        return model if tokenizer is None else with_tokenizer(model, tokenizer)

    if model_or_trace is None or isinstance(model_or_trace, (str, Path)):
        name = None if model_or_trace is None else str(model_or_trace)
        return View(open_target(Target(name, text, source, folder, image=picture, prepare=prepare)))
    if isinstance(model_or_trace, Trace):
        if text is not None or source is not None:
            raise ValueError(
                "text= needs a model, and a trace records one run; leave it out, or give the model"
            )
        return View(OpenModel(model_or_trace.select_row(row)))
    target = Target(None, text, source, folder, image=picture)
    opened = open_model(prepare(model_or_trace), target)
    opened.trace = opened.get_trace().select_row(row)
    return View(opened)


def view_attention(
    attention: Sequence[Any] = (),
    tokens: Sequence[str] = (),
    *,
    encoder_attention: Sequence[Any] = (),
    cross_attention: Sequence[Any] = (),
    encoder_tokens: Sequence[str] = (),
) -> View:
    """Return the page of external attention weights in BertViz format: [1, heads, T, S] per layer.

    `attention` is the self-attention of `tokens` (of the decoder, if there is an encoder),
    `encoder_attention` the self-attention of `encoder_tokens`, and `cross_attention` the attention
    from `tokens` to `encoder_tokens`.

    >>> import numpy as np
    >>> view_attention([np.eye(2)[None, None]], ["a", "b"])
    <page of weights: .save('page.html') writes it, .serve() opens it in the browser>
    """
    trace = trace_from_weights(
        attention,
        tokens,
        encoder_attention=encoder_attention,
        cross_attention=cross_attention,
        source=encoder_tokens,
    )
    return View(OpenModel(trace))
