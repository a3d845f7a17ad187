"""Texts of the options of `headwise` itself: all versions (`--version --json`), scripts of
`--completion SHELL`.

The scripts of the shells ask headwise itself, so they never grow stale: `headwise --list-options`
prints the commands, and `headwise COMMAND --list-options` the options of a command, which
`CommandParser` answers from its own arguments.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from importlib import metadata, resources
from typing import Any

from .. import __version__

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


REQUIREMENT = re.compile(r"^([\w.-]+)(?:\[([\w,-]+)\])?[^;]*(?:;.*extra == ['\"]([\w-]+)['\"])?")
OWN_NAME = "headwise"


def describe_environment() -> dict[str, Any]:
    """Versions, platform and built parts of this installation; nothing that takes long to import is
    imported.

    >>> describe_environment()["headwise"] == __version__
    True
    """
    return {
        "headwise": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "packages": _package_versions(),
        "page": resources.files("headwise.viewer").joinpath("static").is_dir(),
    }


def _package_versions() -> dict[str, dict[str, str | None]]:
    """The installed version of each dependency, None if it is missing; those of no extra are under
    "base".
    """
    versions: dict[str, dict[str, str | None]] = {}
    for name, extra in parse_requirements(metadata.requires(OWN_NAME) or ()):
        versions.setdefault(extra, {})[name] = _installed_version(name)
    return versions


def parse_requirements(lines: Iterable[str]) -> list[tuple[str, str]]:
    """The name and the extra ("base" for none) of each requirement; requirements on headwise itself
    are left out.

    >>> parse_requirements(
    ...     ["torch>=2.10", "transformers>=5.3; extra == 'hf'", "headwise[mt]; extra == 'dev'"]
    ... )
    [('torch', 'base'), ('transformers', 'hf')]
    """
    matches = [match for line in lines if (match := REQUIREMENT.match(line))]
    return [(match[1], match[3] or "base") for match in matches if match[1] != OWN_NAME]


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
