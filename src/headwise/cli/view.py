"""`headwise view`: every head of a model or a trace in the browser, or in one HTML file."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..util.output_paths import check_output
from .arguments import (
    TokenizerOptions,
    announce_placement,
    attach_named_tokenizer,
    check_input_file,
    check_model_path,
    print_note,
    print_page,
)
from .options import UsageError, options

if TYPE_CHECKING:
    from ..learn.view_links import ViewLink

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
LARGEST_PORT = 65535
TRACE_SUFFIX = ".trace"
HTML_SUFFIXES = (".html", ".htm")


@options
class ViewOptions(TokenizerOptions):
    """Show every head of a model in the browser: what each one attends to, its class, what changes
    without it, and what can be pruned. Without an argument it opens a small trained translator.
    Everything stays on this machine: the page is served to this computer only and loads nothing
    from elsewhere.

    MODEL|TRACE  a folder, a Hub id (org/name, org/name@revision), FILE.py:FACTORY, or a .trace file
    --text TEXT  the text that the model reads; the page can change it
    --source TEXT  source text of an encoder-decoder; --text is then the target it writes
    --image FILE  the image that a vision model reads: a file, a folder, or an .npy
    --compare MODEL|TRACE  another model or trace, for the screen Diff
    --learn ENTRY  open the screen, head and token of the sample that show an entry of
        `headwise learn`
    --export FILE  write the page to one .html file instead of serving it
    --overwrite  replace an earlier output of this command
    --no-browser  print the address only
    --port PORT  port of the page; 0 takes a free one
    --read-only  the page writes no files
    --out DIR  folder for models that are pruned on the page

    access from other computers:
    --host ADDRESS  address to listen on
    --allow-remote  let --host be an address that others can reach; the token in the address is
        the only protection

    examples:
    headwise view path/to/model --text 'The cat sat on the mat.'
    headwise view dates.trace --export dates.html
    """

    command = "view"
    names = {"MODEL|TRACE": "target"}
    needs = {"overwrite": "export"}
    excludes = ("export compare", "image text", "image source")
    excludes += tuple(f"learn {name}" for name in ("target", "text", "source", "image", "export"))
    outputs = {"export": "viewer.view:HTML_PAGE"}
    target: str | None = None
    text: str | None = None
    source: str | None = None
    image: str | None = None
    compare: str | None = None
    learn: str | None = None
    export: str | None = None
    overwrite: bool = False
    no_browser: bool = False
    port: int = 0
    read_only: bool = False
    out: str = "runs/view"
    host: str = LOOPBACK_HOSTS[0]
    allow_remote: bool = False

    def check(self) -> None:
        """Refuse impossible options before anything is loaded."""
        if not 0 <= self.port <= LARGEST_PORT:
            raise UsageError(
                f"--port {self.port} is not a port; give 1 to {LARGEST_PORT}, or 0 for a free one"
            )
        if self.host not in LOOPBACK_HOSTS and not self.allow_remote:
            raise UsageError(
                f"--host {self.host} can be reached from other computers; add --allow-remote if "
                "they may see the model"
            )
        if self.text is not None and not self.text.strip():
            raise UsageError("--text is empty; give at least one word")
        is_trace = self.target is not None and self.target.endswith(TRACE_SUFFIX)
        needs_model = [] if self.compare else ["device", "dtype"]
        for name in ("text", "source", "tokenizer", *needs_model) if is_trace else ():
            if name in self.options_set:
                raise UsageError(
                    f"--{name} needs a model, and {self.target} is a trace of one run; give the "
                    "model instead"
                )
        if self.export is not None and Path(self.export).suffix.lower() not in HTML_SUFFIXES:
            raise UsageError(f"--export {self.export} is not an HTML file; end the name in .html")
        if self.image is not None and not Path(self.image).exists():
            remedy = "give an image, a folder of images, or an .npy"
            raise UsageError(f"--image {self.image} does not exist; {remedy}")
        if self.image is not None and (self.target is None or is_trace):
            raise UsageError("--image needs a vision model; give its folder")
        if self.compare is not None:
            is_other_trace = self.compare.endswith(TRACE_SUFFIX)
            check = check_input_file if is_other_trace else check_model_path
            check("--compare", self.compare)
        if not self.read_only:
            from ..viewer.view import MODELS_FOLDER

            check_output(self.out, MODELS_FOLDER, "continue")
        if self.target is not None:
            check = check_input_file if is_trace else check_model_path
            check("MODEL", self.target)


def main(argv: list[str]) -> int:
    """Open the page in the browser and serve it until interrupted, or write it to a file."""
    args = ViewOptions.parse(argv)
    from ..viewer import view
    from ..viewer.open_model import LoadingPlace

    out = None if args.read_only else Path(args.out)
    loading = LoadingPlace(**args.loading)
    link = None if args.learn is None else _find_link(args.learn)
    texts = (args.target, args.text, args.source)
    if link is not None and link.source:
        texts = (None, link.text, link.source)
    is_sample = texts == (None, None, None)
    # A trace opens without torch. The sample is one whose model is loaded when it is needed.
    if not is_sample and not (args.target or "").endswith(TRACE_SUFFIX):
        announce_placement(args.target or "the sample", args)
    prepare = partial(attach_named_tokenizer, args=args)
    target = view.Target(*texts, out, args.compare or "", args.image or "", loading, prepare)
    opened = view.open_target(target)
    if args.export is not None:
        view.write_export(opened, args.export, args.existing)
        print_page(f"{args.export} shows {opened.name}; it opens in any browser, without a network")
        return 0
    if args.host not in LOOPBACK_HOSTS:
        print_note(
            f"headwise: anyone who can reach {args.host} and has the address can see this model"
        )
    with suppress(KeyboardInterrupt):  # the usual end of a server
        view.serve_page(
            opened,
            screen="" if link is None else link.address(opened.get_trace().layers),
            announce=print_page,
            host=args.host,
            port=args.port,
            open_browser=not args.no_browser,
        )
    return 0


def _find_link(name: str) -> ViewLink:
    """The link of the one entry of this name that has one."""
    from ..learn.catalogue import find_entries

    links = [entry.view for entry in find_entries(name) if entry.id == name]
    if len(links) != 1 or links[0] is None:
        remedy = "headwise learn names the screen of each entry that has one, such as 003-2.2"
        raise UsageError(f"--learn {name} is not an entry with a screen; {remedy}")
    return links[0]
