"""Completion in shells: they ask the program itself for the possible words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from envserve.cli.terminal import fail

#: The file that each shell reads, and the code in it. {0} is the name of the program,
#: {1} a variable that marks a question; the line to be completed is in COMP_LINE.
_COMPLETE: Final = "complete -o default -C '{1}=1 {0}' {0}"
_AS_BASH: Final = "autoload -Uz compinit bashcompinit && compinit && bashcompinit"
_FISH: Final = "complete -c {0} -a '({1}=1 COMP_LINE=(commandline -cp) {0})'"
_SHELLS: Final = {
    "bash": ("~/.bashrc", _COMPLETE),
    "zsh": ("~/.zshrc", f"{_AS_BASH} && {_COMPLETE}"),
    "fish": ("~/.config/fish/completions/{0}.fish", _FISH),
}


def asked_line(name: str) -> str | None:
    """Return the command line that a shell wants to complete, if this is a question."""
    line = os.environ.get("COMP_LINE", "")
    is_question = _variable(name) in os.environ
    return line[: int(os.environ.get("COMP_POINT", len(line)))] if is_question else None


def completion_code(name: str) -> str:
    """Return the code with which the user's shell completes a program's words."""
    return _of_shell(name)[1]


def install_completion(name: str) -> str:
    """Add that code to the file that the user's shell reads; return what was done."""
    place, code = _of_shell(name)
    path = Path(place).expanduser()
    before = path.read_text() if path.exists() else ""
    if code not in before:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{before.rstrip()}\n{code}\n".lstrip())
    return f"{path}: completes {name} in shells started from now on"


def _of_shell(name: str) -> tuple[str, str]:
    shell = os.path.basename(os.environ.get("SHELL", ""))
    if shell not in _SHELLS:
        fail(f"SHELL: expected the path of {', '.join(_SHELLS)}; got {shell!r}", 2)
    place, code = (each.format(name, _variable(name)) for each in _SHELLS[shell])
    return place, code


def _variable(name: str) -> str:
    return f"_{name.upper()}_COMPLETE"
