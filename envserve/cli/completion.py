"""Shell completion: the shell runs the program to get the possible words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from envserve.cli.terminal import fail

#: Code that enables completion. {0} is the name of the program, {1} the environment
#: variable that requests completion; COMP_LINE is the command line to complete.
_COMPLETE: Final = "complete -o default -C '{1}=1 {0}' {0}"
_AS_BASH: Final = "autoload -Uz compinit bashcompinit && compinit && bashcompinit"
_FISH: Final = "complete -c {0} -a '({1}=1 COMP_LINE=(commandline -cp) {0})'"
#: The startup file of each shell, and the code to add to it.
_SHELLS: Final = {
    "bash": ("~/.bashrc", _COMPLETE),
    "zsh": ("~/.zshrc", f"{_AS_BASH} && {_COMPLETE}"),
    "fish": ("~/.config/fish/completions/{0}.fish", _FISH),
}


def line_to_complete(name: str) -> str | None:
    """Return the command line to complete, up to the cursor; None for a normal run."""
    if _variable(name) not in os.environ:
        return None
    line = os.environ.get("COMP_LINE", "")
    return line[: int(os.environ.get("COMP_POINT", len(line)))]


def completion_code(name: str) -> str:
    """Return the code that enables completion of a program in the user's shell."""
    return _shell_settings(name)[1]


def install_completion(name: str) -> str:
    """Add the completion code to the user's shell startup file; return a message."""
    file, code = _shell_settings(name)
    path = Path(file).expanduser()
    try:
        content = path.read_bytes() if path.exists() else b""
        if code.encode() not in content:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Append: a file that is replaced would be lost if the disk is full.
            with path.open("a") as startup_file:
                startup_file.write("" if content[-1:] in b"\n" else "\n")
                startup_file.write(f"{code}\n")
    except OSError as error:
        fail(f"{path} cannot be changed: {error.strerror}; add to it: {code}")
    return f"{path}: new shells will complete {name}"


def _shell_settings(name: str) -> tuple[str, str]:
    shell = os.path.basename(os.environ.get("SHELL", ""))
    if shell not in _SHELLS:
        fail(f"SHELL: expected the path of {', '.join(_SHELLS)}; got {shell!r}", 2)
    file, code = (template.format(name, _variable(name)) for template in _SHELLS[shell])
    return file, code


def _variable(name: str) -> str:
    return f"_{name.upper()}_COMPLETE"
