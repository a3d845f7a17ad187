"""`headwise --completion SHELL`: a script that completes commands and options in bash, zsh or fish.

The scripts ask headwise itself, so they never grow stale: `headwise --list-options` prints the commands, and
`headwise COMMAND --list-options` the options of a command, which `CommandParser` answers from its own arguments.
"""

from __future__ import annotations

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
