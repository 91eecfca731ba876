"""User envs: "my_env.py:Walk", "my_package:Walk-v0", or the class Walk itself.

Only the user who starts envs on this host can give such a word, never a peer. A word
stands for two things: the plain name by which batches, servers and clients know the
env, and the module or file that workers import for it.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from envserve.errors import EnvStartError, UnknownEnv

__all__ = [
    "absolute",
    "check_files",
    "importing",
    "is_user_env",
    "name_and_imports",
    "name_of",
    "writable_by_others",
]

#: What this process imports just now, because it is named.
importing: Final[list[str]] = []


def is_user_env(word: str) -> bool:
    """Return whether a word names a module or file to import, not only an env."""
    return ":" in word or word.endswith(".py")


def absolute(word: str) -> str:
    """Returns a word whose file, if it is of one, is found from any folder."""
    place, colon, name = word.partition(":")
    return f"{os.path.abspath(place)}{colon}{name}" if place.endswith(".py") else word


def check_files(words: Iterable[str]) -> None:
    """Raises EnvStartError if a word names a file that is not there."""
    for place in (word.partition(":")[0] for word in words):
        if place.endswith(".py") and not os.path.isfile(place):
            raise EnvStartError(f"{place}: no such file")


def name_of(env: object) -> str:
    """Returns the plain name of an env: of "a/my_env.py:Walk" it is "my_env:Walk".

    Args:
      env: A registered name, a word, or a class or function that can be imported.

    Raises:
      TypeError: It is none of these.
      UnknownEnv: Workers cannot import the class or function.
    """
    if isinstance(env, str):
        place, colon, rest = env.partition(":")
        return f"{Path(place).stem}:{rest}" if colon and place.endswith(".py") else env
    module, name = getattr(env, "__module__", None), getattr(env, "__qualname__", None)
    if not callable(env) or not isinstance(module, str) or not isinstance(name, str):
        raise TypeError(
            f"expected the name of an env, or a class or function that makes one; got "
            f"{env!r:.200}"
        )
    if module == "__main__" or "<" in name:  # <lambda>, <locals>
        raise _not_importable(name)
    return f"{module}:{name}"


def name_and_imports(
    env: object, import_modules: Sequence[str] = ()
) -> tuple[str, tuple[str, ...]]:
    """Return the plain name of an env, and the modules that workers must import.

    Args:
      env: As of `name_of`. A name that this process has registered is registered by
        some module, and so the one of its class is imported, too.
      import_modules: What was asked for already.

    Raises:
      EnvStartError: A module that is about to be imported asks for it.
      TypeError: The env is no such thing, or the modules are no list.
      UnknownEnv: Workers cannot import it.
    """
    if importing:  # which would begin again in the workers of workers
        raise EnvStartError(
            f"expected {importing[-1]} to start no envs when workers import it; put "
            f"that below `if __name__ == '__main__':`"
        )
    if isinstance(import_modules, str):
        raise TypeError(
            f"import_modules: expected a list of modules; got {import_modules!r}"
        )
    name, word = name_of(env), env if isinstance(env, str) else name_of(env)
    if ":" not in name:
        if name.endswith(".py"):
            raise UnknownEnv(f"expected an env; got a file; name one: {name}:MyEnv")
        word = _module_of(name)
        tops = {Path(each).name.partition(".")[0] for each in import_modules}
        if word == "__main__" and not tops:
            raise _not_importable(name)
        if word.partition(".")[0] in {"gymnasium", "__main__", *tops}:
            word = ""
    words = filter(None, map(absolute, (*import_modules, word)))
    return name, tuple(dict.fromkeys(words))


def _module_of(name: str) -> str:
    """Returns where the class of an env is that this process has registered, or ""."""
    gymnasium: Any = sys.modules.get("gymnasium")
    entry = getattr(gymnasium and gymnasium.registry.get(name), "entry_point", "")
    if isinstance(entry, str):
        return entry.partition(":")[0]
    return str(getattr(entry, "__module__", ""))


def _not_importable(name: str) -> UnknownEnv:
    return UnknownEnv(
        f"expected an env that workers can import; got {name!r} of this script, which "
        f"they do not run; put it in a file of its own, and name that: "
        f'"my_env.py:MyEnv"'
    )


def writable_by_others(place: str) -> str:
    """Return the path by which other users can change a place; "" if there is none.

    That is the place itself, a link, or a folder above it that is not sticky, up to the
    home. The user's own group counts as the user.
    """
    home = os.path.expanduser("~")
    for top in dict.fromkeys((os.path.abspath(place), os.path.realpath(place))):
        for path in (top, *map(str, list(Path(top).parents)[:-1])):
            found = os.lstat(path)
            mode = 0 if stat.S_ISLNK(found.st_mode) else found.st_mode
            if path != top and mode & stat.S_ISVTX:  # there all keep to their own
                mode = 0
            is_by_group = mode & stat.S_IWGRP and found.st_gid != os.getegid()
            is_own = found.st_uid in (0, os.geteuid())
            if not is_own or is_by_group or mode & stat.S_IWOTH:
                return path
            if path == home:
                break
    return ""
