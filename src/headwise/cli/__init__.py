"""The command line, `headwise COMMAND`: each command is one module, a thin layer over the library.

The commands `view`, `cost`, `train`, `study`, `heads`, `circuit`, `trace`, `prune` and `learn` are
modules with the same names, and `run` is a package. `prune` also contains `convert`, `learn`
contains `demo`, and `describe` contains `spec`, `walk`, `sites` and `why`.

The options of a command are a frozen dataclass, from which `options` generates the command line and
its help. `exit_status` turns every error into one line and an exit code. `arguments` parses shared
arguments: specs, presets, model folders, `--set KEY=VALUE`, and the device and dtype of models. It
refuses bad files before a model is loaded. `text_arguments` has the options for texts and for
writing models to a folder.

Commands import heavy modules such as torch inside `main`, so that `headwise --help` is fast.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from .. import __version__
from ..report.text import wrap
from ..util.errors import suggest
from ..util.python_processes import safe_import_path
from .exit_status import open_closed_streams, print_error, run_guarded
from .options import LIST_OPTIONS, UsageError

# One line per command, in the order of the help.
COMMANDS = {
    "demo": "tour of a trained translator: its heads, ablation, pruning",
    "learn": "five documents on attention: every formula and claim is run",
    "view": "every head of a model in the browser, or in one HTML file",
    "spec": "show a spec or a model: parameters by name, cost, cache, mask",
    "cost": "parameters, FLOPs, memory and time of specs and models",
    "walk": "the numbered steps of a layer, or every tensor operation",
    "train": "train a model on a built-in task or your data",
    "study": "train variants on tasks over seeds; report which differences are real",
    "run": "run a trained model on a text, an image, or each line of stdin",
    "sites": "every attention layer of a model and what it supports",
    "heads": "measure and classify every head of a model over texts",
    "circuit": "which heads, paths and edges make a model answer as it does",
    "prune": "remove heads: write a smaller model, and verify it",
    "convert": "convert MHA to GQA, MQA, latent and others, and verify the result",
    "trace": "record queries, keys and values of a run in one file",
    "why": "which backend would run a spec, and why the others refuse",
}
# Commands in a module with another name; their functions are named NAME_main.
MODULES = {
    **dict.fromkeys(("spec", "walk", "sites", "why"), "describe"),
    "demo": "learn",
    "convert": "prune",
}


EXAMPLES = (
    "headwise spec gqa --set heads.kv=4",
    "headwise cost gqa mla --context 32768 --batch 16",
)


def usage() -> str:
    """Return the text of `headwise --help`."""
    commands = [f"  {command:<9}{summary}" for command, summary in COMMANDS.items()]
    examples = [f"  {example}" for example in EXAMPLES]
    head = [
        "usage: headwise COMMAND [OPTIONS]",
        "",
        "The workbench for attention heads.",
        "",
    ]
    tail = wrap(
        "headwise --version [--json] prints versions, headwise --completion SHELL a script that "
        "completes words in "
        "bash, zsh or fish. headwise COMMAND --help lists the everyday options of a command, "
        "headwise COMMAND "
        "--help-all every option."
    )
    return "\n".join([*head, "commands:", *commands, "", "examples:", *examples, "", *tail])


def _print_version(argv: Sequence[str]) -> int:
    """Print `headwise --version`, or with --json the versions of all installed packages."""
    if argv == ["--json"]:
        print(json.dumps(describe_environment(), indent=1))
        return 0
    if argv:
        raise UsageError(f"--version takes nothing but --json, got {argv[0]!r}; leave it out")
    print(f"headwise {__version__}")
    return 0


def _print_completion(argv: Sequence[str]) -> int:
    """Print `headwise --completion SHELL`: the completion script for a shell."""
    if len(argv) != 1 or argv[0] not in SCRIPTS:
        got = repr(" ".join(argv)) if argv else "nothing"
        raise UsageError(
            f"--completion needs one of {', '.join(SCRIPTS)}, got {got}; write --completion bash"
        )
    print(SCRIPTS[argv[0]], end="")
    return 0


def _list_commands(_: Sequence[str]) -> int:
    """Print `headwise --list-options`: the words that may follow headwise, one per line."""
    print("\n".join([*COMMANDS, "--help", "--version", "--completion"]))
    return 0


GLOBAL_OPTIONS: Mapping[str, Callable[[list[str]], int]] = {
    "--version": _print_version,
    "-V": _print_version,
    "--completion": _print_completion,
    LIST_OPTIONS: _list_commands,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 on success, 2 on bad input, or a code of
    `exit_status`.
    """
    is_closed = sys.stdout is None  # pyright: ignore[reportUnnecessaryComparison] - by the shell
    open_closed_streams()
    if is_closed:
        return print_error("cannot write: stdout is closed; open it")
    argv = sys.argv[1:] if argv is None else argv
    with safe_import_path():
        return run_guarded(_run_command, argv)


def _run_command(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "--help-all"):
        print(usage())
        return 0
    if argv[0] in GLOBAL_OPTIONS:
        return GLOBAL_OPTIONS[argv[0]](argv[1:])
    if argv[0] not in COMMANDS:
        kind = "option" if argv[0].startswith("-") else "command"
        raise UsageError(
            f"there is no {kind} {argv[0]!r}; "
            f"{suggest(argv[0], [*COMMANDS, *GLOBAL_OPTIONS, '--help'])}"
        )
    module = import_module(f"{__name__}.{MODULES.get(argv[0], argv[0])}")
    main_of_command = f"{argv[0]}_main" if argv[0] in MODULES else "main"
    return getattr(module, main_of_command)(argv[1:])


BASH = """\
# Completion of headwise in bash: eval "$(headwise --completion bash)"
_headwise() {
    local word="${COMP_WORDS[COMP_CWORD]}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="$(headwise --list-options 2>/dev/null)"
    elif [[ "$word" == -* ]]; then
        words="$(headwise "${COMP_WORDS[1]}" --list-options 2>/dev/null)"
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -o bashdefault -F _headwise headwise
"""

ZSH = """\
# Completion of headwise in zsh: eval "$(headwise --completion zsh)"
autoload -Uz compinit bashcompinit && compinit && bashcompinit
""" + BASH.partition("\n")[2]

FISH = """\
# Completion of headwise in fish: headwise --completion fish | source
function __headwise_words
    set -l words (commandline -opc)
    if test (count $words) -eq 1
        headwise --list-options 2>/dev/null
    else if string match -q -- '-*' (commandline -ct)
        headwise $words[2] --list-options 2>/dev/null
    end
end
complete -c headwise -a '(__headwise_words)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}

# A requirement of this package: its name, and the extra that it belongs to.
REQUIREMENT = re.compile(r"^([\w.-]+)(?:\[[\w,-]+\])?[^;]*(?:;.*extra == ['\"]([\w-]+)['\"])?")


def describe_environment() -> dict[str, Any]:
    """Return versions, platform and compiled parts of this installation. Imports nothing slow.

    Packages without an extra are under "base"; a missing package has the version None.

    >>> describe_environment()["headwise"] == __version__
    True
    """
    from importlib import metadata, resources

    packages = metadata.distributions()
    installed = {one.name.lower().replace("_", "-"): one.version for one in packages}
    versions: dict[str, dict[str, str | None]] = {}
    for line in metadata.requires("headwise") or ():
        match = REQUIREMENT.match(line)
        if match and match[1] != "headwise":
            versions.setdefault(match[2] or "base", {})[match[1]] = installed.get(match[1])
    return {
        "headwise": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "packages": versions,
        "page": resources.files("headwise.viewer").joinpath("static").is_dir(),
    }
