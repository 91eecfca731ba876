"""References to user envs: "my_env.py:Walk", "my_package:Walk-v0", or a class.

A reference determines the plain name of the env, which batches, servers and clients
use, and the module or file that workers import for the env. References come from the
user of this process, never from a peer.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from envserve.errors import EnvStartError, UnknownEnv

#: Env modules whose import is in progress in this process, the innermost last.
modules_being_imported: Final[list[str]] = []


def is_user_env(reference: str) -> bool:
    """Return whether a reference includes a module or file to import.

    True for "my_package:Walk-v0" and "my_env.py"; False for a plain env name.
    """
    return ":" in reference or reference.endswith(".py")


def split_reference(reference: str) -> tuple[str, str]:
    """Return the module or file of a reference, and the name in it or "".

    A file ends with ".py", and its folders may contain colons.
    """
    stem, end, name = f"{reference}:".rpartition(".py:")
    if end:
        return f"{stem}.py", name.removesuffix(":")
    module, _, name = reference.partition(":")
    return module, name


def packages_of(references: Iterable[str]) -> set[str]:
    """Return the top-level package of each reference's module, or its file's name."""
    modules = (Path(split_reference(reference)[0]).name for reference in references)
    return {module.partition(".")[0] for module in modules}


def with_absolute_path(reference: str) -> str:
    """Make the file path in a reference absolute; leave module names unchanged."""
    module, _ = split_reference(reference)
    if not module.endswith(".py"):
        return reference
    try:
        return f"{os.path.abspath(module)}{reference.removeprefix(module)}"
    except FileNotFoundError:  # the working directory was deleted
        return reference


def check_files_exist(references: Iterable[str]) -> None:
    """Raise EnvStartError if a reference names a file that does not exist."""
    for module in (split_reference(reference)[0] for reference in references):
        if module.endswith(".py") and not os.path.isfile(module):
            raise EnvStartError(f"{module}: no such file")


def env_name_of(env: object) -> str:
    """Return the plain name of an env: "my_env:Walk" for "a/my_env.py:Walk".

    Args:
      env: A registered name, a reference, or an importable class or function.

    Raises:
      TypeError: The argument is none of these.
      UnknownEnv: Servers cannot import the class or function.
    """
    if isinstance(env, str):
        file, attribute = split_reference(env)
        is_in_file = attribute and file.endswith(".py")
        return f"{Path(file).stem}:{attribute}" if is_in_file else env
    module, name = getattr(env, "__module__", None), getattr(env, "__qualname__", None)
    if not callable(env) or not isinstance(module, str) or not isinstance(name, str):
        raise TypeError(
            f"expected the name of an env, or a class or function that creates one; "
            f"got {env!r:.200}"
        )
    if not is_importable(f"{module}:{name}"):
        raise UnknownEnv(
            f"expected an env that servers can import; got {name!r} of this script; "
            f"move it to a separate file, start the servers with `envserve start "
            f'my_env.py:MyEnv`, and pass the name "my_env.py:MyEnv"'
        )
    return f"{module}:{name}"


def name_of_code(code: Any) -> str:
    """Return "module:name" of a class or function; "module:name(...)" of a partial."""
    end = "" if hasattr(code, "__qualname__") else "(...)"
    while isinstance(code, functools.partial):
        code = code.func
    owner = code if hasattr(code, "__qualname__") else type(code)
    return f"{owner.__module__}:{owner.__qualname__}{end}"


def is_importable(name: str) -> bool:
    """Return whether other processes can import the class or function of this name."""
    # The names of lambdas and local functions contain "<"; those of partials, "(". The
    # modules of files that `ppo` has loaded are named after their paths.
    module = name.rpartition(":")[0]
    return not (module == "__main__" or "/" in module or {*"<("} & {*name})


def name_and_imports(
    env: object, import_modules: Sequence[str] = ()
) -> tuple[str, tuple[str, ...]]:
    """Return the plain name of an env, and the modules that workers must import.

    Args:
      env: A registered name, a reference, an importable class or function, or the name
        of a pickled class or function. If this process has registered the name itself,
        workers also import the module of the env's class.
      import_modules: Modules and files that the user asked to import.

    Raises:
      EnvStartError: A module starts envs while it is being imported.
      TypeError: The env or `import_modules` has the wrong type.
      UnknownEnv: The env is a file without the name of an env in it.
    """
    # Workers that import the module would start further workers, endlessly.
    if modules_being_imported:
        raise EnvStartError(
            f"{modules_being_imported[-1]} starts envs when workers import it; move "
            f"that code below `if __name__ == '__main__':`"
        )
    is_list = not isinstance(import_modules, str | ModuleType)
    if not is_list or not all(isinstance(each, str) for each in import_modules):
        raise TypeError(
            f"import_modules: expected the names of modules in a list; got "
            f"{import_modules!r:.200}"
        )
    name = env_name_of(env)
    module = env if isinstance(env, str) else name
    if name.endswith(".py"):
        raise UnknownEnv(
            f"expected an env, got the file {name}; name an env in it: {name}:MyEnv"
        )
    if ":" not in name:
        module = module_of(name)
        packages = {"gymnasium", "__main__", *packages_of(import_modules)}
        if module.partition(".")[0] in packages:
            # Workers import `import_modules` and gymnasium anyway, and cannot import
            # the module `__main__`.
            module = ""
    elif not is_importable(name):
        module = ""
    modules = filter(None, map(with_absolute_path, (*import_modules, module)))
    return name, tuple(dict.fromkeys(modules))


def module_of(name: str) -> str:
    """Return the module that defines a registered env's class; "" if there is none."""
    gymnasium: Any = sys.modules.get("gymnasium")
    entry = getattr(gymnasium and gymnasium.registry.get(name), "entry_point", "")
    if isinstance(entry, str):
        return entry.partition(":")[0]
    name = name_of_code(entry)
    return name.partition(":")[0] if is_importable(name) else ""


@contextlib.contextmanager
def sibling_imports(file: str) -> Iterator[None]:
    """Let a user's file, executed in this context, import modules in its folder.

    The folder of the file remains in `sys.path`. It is not added if other users can
    write to it; a ModuleNotFoundError then states this.
    """
    folder = os.path.dirname(os.path.abspath(file))
    writable = writable_by_others(folder)
    if not writable and folder not in sys.path:
        sys.path.append(folder)  # last, so that its files shadow no other module
    try:
        yield
    except ModuleNotFoundError as error:
        if writable:
            error.msg += (
                f"; modules in the folder of {file} are not imported, because other "
                f"users can write to {writable}"
            )
        raise


def working_directory() -> str:
    """Return the working directory; "" if it was deleted or is not accessible.

    After `sudo -u USER`, for example, it may be below the home folder of another user.
    """
    try:
        folder = os.getcwd()
        os.lstat(folder)
    except OSError:
        return ""
    return folder


def writable_by_others(path: str) -> str:
    """Return the path through which other users can change a file or folder, or "".

    The result is the path itself, the target of a symbolic link, or a parent folder, up
    to the home folder. Sticky parent folders are skipped, because users cannot replace
    each other's files there. Members of the user's group are trusted.
    """
    home = os.path.expanduser("~")
    for start in dict.fromkeys((os.path.abspath(path), os.path.realpath(path))):
        for folder in (start, *map(str, list(Path(start).parents)[:-1])):
            stat_result = os.lstat(folder)
            mode = 0 if stat.S_ISLNK(stat_result.st_mode) else stat_result.st_mode
            if folder != start and mode & stat.S_ISVTX:
                mode = 0
            is_by_group = mode & stat.S_IWGRP and stat_result.st_gid != os.getegid()
            is_trusted = stat_result.st_uid in (0, os.geteuid())
            if not is_trusted or is_by_group or mode & stat.S_IWOTH:
                return folder
            if folder == home:
                break
    return ""
