"""The command line: `headwise VERB`, one file per verb, each a thin reading of the library.

Nothing heavy is imported before a verb runs, so that `headwise --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from .. import __version__
from ..errors import NoBackend, suggest
from .arguments import BAD_INPUT, UsageError, prepare_output

# In the order of the help: what each verb does, in a few words.
VERBS = {
    "demo": "a look around: soft look-up, one spec and all that follows from it",
    "spec": "show a spec or a model: parameters by name, cost, cache, mask",
    "cost": "what specs cost before they run, side by side, item by item",
    "walk": "every tensor operation of a layer, with shape, strides, copy or view",
    "train": "a model that learns a task or your data, left in a folder",
    "run": "what a trained model says of a text, an image, or each line of stdin",
    "sites": "every attention layer of a model, and what may be done to it",
    "heads": "what every head does over texts, and what it is called",
    "prune": "fewer heads: a smaller model in a new folder, and the proof of it",
    "convert": "MHA to GQA, MQA, latent and others: a new folder, and the proof of it",
    "trace": "capture a run into one file that opens without the model",
    "bench": "our paths beside those of others, and this machine's limits",
    "why": "which backend would run a spec, and why each other one refuses",
}
OUT_OF_MEMORY = "this does not fit into memory; make something smaller"
INTERRUPTED, PIPE_CLOSED = 130, 141


def usage() -> str:
    """What `headwise --help` says."""
    verbs = [f"  {verb:<6}{what}" for verb, what in VERBS.items()]
    head = ["headwise VERB [...]: the workbench for attention heads", ""]
    tail = ["", "headwise VERB --help says more; headwise --version says which one this is"]
    return "\n".join([*head, *verbs, *tail])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 when it did what was asked, 2 on bad input, 130 when interrupted."""
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison] - so it is when a shell closed it
        return _print_error("there is nowhere to write; open stdout")
    prepare_output()
    try:
        code = _run_verb(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone, as after `| head`. Python would complain once more when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (ValueError, OSError, OverflowError, NoBackend) as error:
        return _print_error(str(error))
    except MemoryError:
        return _print_error(OUT_OF_MEMORY)
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        return _print_error(OUT_OF_MEMORY)


def _print_error(said: str) -> int:
    print(f"headwise: {' '.join(said.split())}", file=sys.stderr)
    return BAD_INPUT


def _run_verb(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"headwise {__version__}")
        return 0
    if argv[0] not in VERBS:
        what = "option" if argv[0].startswith("-") else "verb"
        raise UsageError(f"there is no {what} {argv[0]!r}; {suggest(argv[0], [*VERBS, '--help', '--version'])}")
    return import_module(f"{__name__}.{argv[0]}").main(argv[1:])
