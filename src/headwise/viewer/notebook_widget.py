"""The page as a widget of anywidget, for notebooks that remove frames from HTML."""

from __future__ import annotations

from typing import Any

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


def make_widget(page: str, height: int = 720) -> Any:
    """A widget that shows a page in a sandboxed frame; `page` and `height` can be changed afterwards."""
    import anywidget  # pyright: ignore[reportMissingImports] - an extra, which `view` checks for
    import traitlets  # pyright: ignore[reportMissingImports] - comes with anywidget

    class PageWidget(anywidget.AnyWidget):
        """A page in a sandboxed frame."""

        _esm = FRAME_SCRIPT
        page = traitlets.Unicode("").tag(sync=True)
        height = traitlets.Int(720).tag(sync=True)

    return PageWidget(page=page, height=height)
