"""References to user envs: "my_env.py:Walk", "my_package:Walk-v0", or a class.

A reference determines the plain name of the env, which batches, servers and clients
use, and the module or file that workers import for the env. References come from the
user of this process, never from a peer.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import MethodType
from typing import Any, Final

from envserve.errors import EnvStartError, UnknownEnv

#: Env modules whose import is in progress in this process, the innermost last.
modules_being_imported: Final[list[str]] = []


def is_user_env(reference: str) -> bool:
    """Return whether a reference includes a module or file to import.

    True for "my_package:Walk-v0" and "my_env.py"; False for a plain env name.
    """
    return ":" in reference or reference.endswith(".py")


def is_file(reference: str) -> bool:
    """Return whether a reference names a file, such as "my_env.py:Walk"."""
    return split_reference(reference)[0].endswith(".py")


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
    """Return "module:name" of a class or function.

    If the module has no such object of this name, return "module:name(...)": for a
    partial, for example, or a class that `type` or `exec` has created.
    """
    named = code
    while isinstance(named, functools.partial):
        named = named.func
    if not hasattr(named, "__qualname__"):
        named = type(named)
    name = f"{named.__module__}:{named.__qualname__}"
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    is_method = isinstance(found, MethodType) and found == code
    is_in_script = named is code and not is_importable(name)
    return name if found is code or is_method or is_in_script else f"{name}(...)"


def is_importable(name: str) -> bool:
    """Return whether other processes can import the class or function of this name."""
    # The names of lambdas and local functions contain "<"; those of partials, "(".
    module = name.rpartition(":")[0]
    if module == "__main__" or {*"<("} & {*name}:
        return False
    return not is_loaded_by_path(module)


def is_loaded_by_path(name: str) -> bool:
    """Return whether this process has loaded a file as a module that imports miss.

    Examples are modules of plugin systems, test modules that pytest loads with
    `--import-mode=importlib`, and the script in a process that multiprocessing has
    spawned (`__mp_main__`).
    """
    if "/" in name:  # a file that `ppo` has loaded; its module is named after its path
        return True
    file, package = file_of(sys.modules.get(name)), name.partition(".")[0]
    is_installed = "-packages/" in file or package in sys.stdlib_module_names
    if is_installed or not file.endswith(".py"):
        return False
    # Python ignores finders of the old kind, too, in version 3.12 and later.
    finders = [item for item in sys.meta_path if hasattr(item, "find_spec")]
    folders: Any = None
    for part in itertools.accumulate(name.split("."), "{}.{}".format):
        specs = (finder.find_spec(part, folders, None) for finder in finders)
        try:
            spec = next(filter(None, specs), None)
        except Exception:  # Python's KeyError, if a namespace package is not loaded
            return False
        if spec is None:
            return True
        if (folders := spec.submodule_search_locations) is None:
            break  # not a package, so the import of this module adds the others
        loaded = sys.modules.get(part)
        if file_of(loaded) == spec.origin:  # the package may have extended its path
            folders = globals_of(loaded).get("__path__", folders)
    return False


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
      TypeError: The env has the wrong type, or `import_modules` is not a list of str.
      UnknownEnv: The env is a file without the name of an env in it.
    """
    # Workers that import the module would start further workers, endlessly.
    if modules_being_imported:
        raise EnvStartError(
            f"{modules_being_imported[-1]} starts envs when workers import it; move "
            f"that code below `if __name__ == '__main__':`"
        )
    is_text = isinstance(import_modules, str)
    is_list = isinstance(import_modules, Iterable) and not is_text
    if not is_list or not all(isinstance(each, str) for each in import_modules):
        raise TypeError(
            f"import_modules: expected a list of modules and files, each a str; "
            f"got {import_modules!r:.200}"
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
    elif not is_file(module):
        # A file in `import_modules` may already define the env.
        is_imported = name in map(env_name_of, import_modules)
        module = "" if is_imported or not is_importable(name) else module
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


def globals_of(module: object) -> dict[str, Any]:
    """Return the globals of a module, without running code of the module.

    `sys.modules` may contain mocks of missing packages, whose attributes have any type
    or raise, and lazy modules, which are imported when an attribute is read.
    """
    try:
        attributes: dict[str, Any] = object.__getattribute__(module, "__dict__")
    except AttributeError:  # None, or an object without a dict
        return {}
    return attributes


def file_of(module: object) -> str:
    """Return the file of a module; "" if it has none. See `globals_of`."""
    file = globals_of(module).get("__file__")
    return file if isinstance(file, str) else ""


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
