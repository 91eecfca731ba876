"""Record which code and servers the user trusts, of those that runs and configs name.

A run folder or config file looks like data, but it names code: an env's file, modules,
an algorithm, a network, a loss, callbacks. This code is loaded without confirmation
only if the user has typed its name, has trained with it, or has agreed to it before.

Trust is recorded as a file in the user's key folder, where other users cannot write.
The name of the file is a digest of the settings that name code. The digest does not
depend on the path of the run, so a run can be copied. The digest includes absolute
paths, because a file of the same name in another folder is different code. It also
includes the contents of code files in the run folder, which are copied with the run.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from envserve.envs.user_envs import is_user_env, split_reference
from envserve.errors import KeyFileError
from envserve.keys import private_files
from envserve.keys.key_folder import KeyFolder
from envserve.regular_file import open_regular
from envserve.text import one_line
from ppo.config.config import CODE_SETTINGS, Config

_LOGGER = logging.getLogger("envserve")
#: Packages that are safe to import, although calling their functions may not be.
_INSTALLED = ("envserve", "gymnasium", "ppo")
#: Prefix of the envs of `envserve.gym`, whose arguments name another env and servers.
_PROXY_PREFIX = "envserve/"
_CODE_SUFFIXES = (".py", ".pyc", ".so")
_MAX_CODE_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvSource:
    """The source of a run's envs; stored in the run folder."""

    addresses: tuple[str, ...] = ()
    """Addresses of env servers; if empty, envs run in worker processes on this host."""
    import_modules: tuple[str, ...] = ()
    """Modules or Python files that local worker processes import."""


LOCAL = EnvSource()


def code_names(config: Config, source: EnvSource = LOCAL) -> dict[str, list[str]]:
    """Return a dict from settings to the code and servers that they name."""
    modules = [*config.import_modules, *source.import_modules]
    # An env name may begin with the module that registers the env.
    is_proxy = config.env_name.rpartition(":")[2].startswith(_PROXY_PREFIX)
    names = {
        "env_name": [config.env_name] if is_user_env(config.env_name) else [],
        "env_kwargs": [
            text
            for text in _strings_in(config.env_kwargs)
            if is_proxy or is_user_env(text)
        ],
        "import_modules": [
            name
            for name in modules
            if is_user_env(name) or name.partition(".")[0] not in _INSTALLED
        ],
        **{
            setting: [name] if ":" in (name := getattr(config, setting)) else []
            for setting in CODE_SETTINGS
        },
        "callbacks": [*config.callbacks],
        "connect": [*source.addresses],
    }
    return {setting: values for setting, values in names.items() if values}


def _strings_in(value: Any) -> Iterator[str]:
    """Yield all strings in the lists and dicts of a value, except keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | Sequence):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _strings_in(item)


def describe_code(
    config: Config, source: EnvSource, entered: Collection[str] = ()
) -> str:
    """Return one line that lists the code and servers of a run; empty if none.

    Args:
      config: The config of the run.
      source: The source of its envs.
      entered: Names, files and addresses that the user has entered; omitted.
    """
    parts = []
    for setting, names in code_names(config, source).items():
        shown = [n for n in names if not {n, split_reference(n)[0]} & {*entered}]
        suffix = " without keys" if setting == "connect" and config.insecure else ""
        parts += [f"{', '.join(shown)} ({setting}{suffix})"] if shown else []
    return one_line("; ".join(parts))


def is_trusted(config: Config, source: EnvSource, folder: Path | None) -> bool:
    """Return whether the user trusts all code and servers that a run names."""
    if not code_names(config, source):
        return True
    try:
        path = _record_path(config, source, folder)
        return private_files.read_private(path) is not None
    except (KeyFileError, OSError) as error:
        _warn_once(f"cannot check whether the code was trusted before: {error}")
        return False


def keep_folder_unchanged(config: Config, source: EnvSource, folder: Path) -> None:
    """Do not cache the bytecode of code in the run folder, if the run names any.

    The cached files would change the digest of the run, so that it would no longer be
    trusted. The setting applies to this process and to processes that it starts.
    """
    try:
        is_in_folder = _is_any_in_folder(_resolved_names(config, source, folder))
    except OSError:  # for example, because the working directory was removed
        is_in_folder = True
    if is_in_folder:
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def trust_code(config: Config, source: EnvSource, folder: Path | None) -> None:
    """Record that the user trusts the code of a run; log a warning if that fails."""
    if not code_names(config, source):
        return
    try:
        path = _record_path(config, source, folder)
        private_files.make_folder(path.parent.parent)
        private_files.make_folder(path.parent)
        private_files.write_private(path, f"{describe_code(config, source)}\n")
    except (KeyFileError, OSError) as error:
        _warn_once(
            f"cannot record that this code is trusted, so later commands will ask "
            f"again or need --trust: {error}"
        )


@functools.cache
def _warn_once(text: str) -> None:
    _LOGGER.warning("%s", text)


def _record_path(config: Config, source: EnvSource, folder: Path | None) -> Path:
    """Return the file that records trust; its name is a digest of settings and code."""
    names = _resolved_names(config, source, folder)
    content: dict[str, str] = {}
    if folder and _is_any_in_folder(names):
        files = [file for file in folder.rglob("*") if file.suffix in _CODE_SUFFIXES]
        for file in filter(Path.is_file, files):
            with open_regular(file, _MAX_CODE_BYTES) as code:
                digest = hashlib.file_digest(code, "sha256").hexdigest()
            content[str(file.relative_to(folder))] = digest
    env_name = "" if is_user_env(config.env_name) else config.env_name
    rest = env_name, config.env_kwargs, config.wrappers, config.insecure
    text = json.dumps([names, content, rest], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return KeyFolder().path / "trusted" / digest


def _resolved_names(
    config: Config, source: EnvSource, folder: Path | None
) -> dict[str, list[str]]:
    """Return `code_names` with the paths of the code's files; see `_resolve`."""
    names = code_names(config, source)
    for setting in names.keys() - {"connect"}:
        names[setting] = [_resolve(name, folder) for name in names[setting]]
    return names


def _is_any_in_folder(names: Mapping[str, Sequence[str]]) -> bool:
    return any(name[:2] == "./" for found in names.values() for name in found)


def _resolve(name: str, folder: Path | None) -> str:
    """Return the name of code with the path of its file.

    The path is relative, `./...`, if the file is in the run folder, and otherwise
    absolute. Names of modules that are not in the working directory are returned
    unchanged.
    """
    source = split_reference(name)[0]
    top = source.partition(".")[0]
    found = next(filter(os.path.exists, (top, f"{top}.py")), "")
    if source.endswith(".py"):
        found = source  # even if it was removed, so that the digest is the same
    if not found or "\0" in found:
        return name
    # Unlike `Path.resolve`, `realpath` accepts a link to itself.
    path, shown = Path(os.path.realpath(found)), name.removeprefix(found)
    root = None if folder is None else os.path.realpath(folder)
    if root is not None and path.is_relative_to(root):
        return f"./{path.relative_to(root)} {shown}"
    return f"{path} {shown}"
