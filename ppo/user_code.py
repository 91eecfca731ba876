"""Code of users that a config names: found, called, and blamed by its line.

A name is `package.module:NAME` or `path/to/file.py:NAME`, with a path relative to the
working directory. A file is loaded once, as a module is: what its functions share they
share; if it has changed since, it is loaded anew.
"""

import contextlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

from envserve.text import one_line
from ppo.errors import CallbackError, ConfigError, PpoError, suggestion

#: By path: which version of a file was loaded, and what it has become.
_loaded: dict[str, tuple[tuple[int, int], ModuleType]] = {}


def load_user_code(setting: str, name: str) -> Callable[..., Any]:
    """Return the function or class that a setting names.

    Raises:
        ConfigError: there is no such module, file or name, or it cannot be imported.
    """
    source, _, wanted = name.rpartition(":")
    path = os.path.abspath(source) if source.endswith(".py") else None
    with user_code_errors(f"{setting} {name}", path):
        module = _load_file(path) if path else importlib.import_module(source)
    if not callable(found := getattr(module, wanted, None)):
        names = [key for key, value in vars(module).items() if callable(value)]
        raise ConfigError(
            f"{setting}: expected a function {wanted} in {source}, found "
            f"{'none' if found is None else repr(found)}.{suggestion(wanted, names)}"
        )
    return found


def _load_file(path: str) -> ModuleType:
    version = (found := os.stat(path)).st_mtime_ns, found.st_size
    known, module = _loaded.get(path, (None, None))
    if module is None or known != version:
        loader = SourceFileLoader(path.replace(".", "_"), path)
        module = ModuleType(loader.name)
        module.__file__ = path
        sys.modules[loader.name] = module  # dataclasses look there
        loader.exec_module(module)
        _loaded[path] = version, module
    return module


@contextlib.contextmanager
def user_code_errors(
    what: str, own: Any, kind: type[PpoError] = ConfigError
) -> Iterator[None]:
    """Turn what a user's code raises within into one line with its file and line.

    `what` is the setting, and what it names; `own` the function or class, or a path. An
    error that is of this kind already stays as it is.
    """
    try:
        yield
    except kind:
        raise
    except (Exception, SystemExit) as error:
        text = one_line(" ".join(str(error).split()), 300)
        blame = kind(
            f"{what}: {source_location(own, error)}{type(error).__name__}: {text}"
        )
        # Else AutoGraph, where it traces such code, makes many lines of this one.
        blame.ag_pass_through = True  # type: ignore[attr-defined]
        raise blame from error


def source_location(own: Any, error: BaseException | None = None) -> str:
    """Return `FILE:LINE: ` of own code, or of the last line of it that an error met."""
    file, line = own if isinstance(own, str) else None, 0
    with contextlib.suppress(TypeError, OSError):
        file, line = inspect.getsourcefile(own), inspect.getsourcelines(own)[1]
    for frame in traceback.extract_tb(error.__traceback__ if error else None)[::-1]:
        is_ours = "importlib" in frame.filename or frame.filename == __file__
        if frame.filename == file or not (file or is_ours):
            return f"{frame.filename}:{frame.lineno}: "
    return f"{file}:{line}: " if line else ""


class Callbacks:
    """The callbacks of a config, in their order; classes are made here, once.

    Raises:
        ConfigError: there is no such function or class, it cannot be made, or it does
            not take run, metrics and rollout.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._callbacks: list[tuple[str, Any, Any]] = []
        for name in names:
            own = load_user_code("callbacks", name)
            with user_code_errors(f"callbacks {name}", own):
                called: Any = own() if inspect.isclass(own) else own
                inspect.signature(called).bind("run", "metrics", "rollout")
            self._callbacks.append((f"callbacks {name}", own, called))

    def __call__(self, run: Any, metrics: dict[str, float]) -> dict[str, float]:
        """Call them all; returns the numbers that they add, or raises CallbackError."""
        numbers, env = dict(metrics), run.env
        rows, resets = env.stats().rows, env.reset_infos
        for name, own, called in self._callbacks:
            with user_code_errors(name, own, CallbackError):
                numbers.update(called(run, numbers, run.rollout) or {})
                if env.stats().rows != rows or env.reset_infos is not resets:
                    raise ValueError(
                        "expected a callback that leaves steps and resets of run.env "
                        "to the training, whose next rollout goes on where its last "
                        "one ended; make a BatchEnv of your own"
                    )
                if odd := [key for key in numbers if not isinstance(key, str)]:
                    raise TypeError(f"expected numbers by name, got {odd[0]!r}")
                numbers = {key: float(value) for key, value in numbers.items()}
        own_names = numbers.keys() - {*metrics, "steps"}
        return {k: numbers[k] for k in own_names if not k.startswith("evaluation_")}
