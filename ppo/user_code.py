"""Load and call user code that a config names: algorithms, networks, losses, callbacks.

A name is `package.module:NAME` or `path/to/file.py:NAME`, with a path relative to the
working directory; `ppo train` stores absolute paths in the run. Each file is loaded
once, like a module, so the functions of a file share its global variables. A file is
loaded again only if it has changed on disk. A file can import modules in its folder.
Errors in user code are reported with the file and line at which they were raised.
"""

import contextlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

import numpy as np

from envserve.envs.user_envs import sibling_imports, split_reference
from envserve.text import message_of, one_line
from ppo.errors import CallbackError, ConfigError, PpoError, TrainingStopped, suggestion

#: Maps paths of loaded files to their versions (modification time, size) and modules.
_loaded: dict[str, tuple[tuple[int, int], ModuleType]] = {}


def load_user_code(setting: str, name: str) -> Callable[..., Any]:
    """Return the function or class that a setting names.

    Args:
      setting: The key of the setting, for error messages.
      name: `package.module:NAME` or `path/to/file.py:NAME`.

    Raises:
      ConfigError: The module, the file or the name in it does not exist, or the
        import fails.
    """
    source, attribute = split_reference(name)
    path = os.path.abspath(source) if source.endswith(".py") else None
    with user_code_errors(f"{setting} {name}", path):
        module = _load_file(path) if path else importlib.import_module(source)
    if not callable(found := getattr(module, attribute, None)):
        names = [key for key, value in vars(module).items() if callable(value)]
        raise ConfigError(
            f"{setting}: expected a function {attribute} in {source}, found "
            f"{'none' if found is None else repr(found)}.{suggestion(attribute, names)}"
        )
    return found


def _load_file(path: str) -> ModuleType:
    found = os.stat(path)
    version = found.st_mtime_ns, found.st_size
    loaded_version, module = _loaded.get(path, (None, None))
    if module is None or loaded_version != version:
        loader = SourceFileLoader(path.replace(".", "_"), path)
        module = ModuleType(loader.name)
        module.__file__ = path
        sys.modules[loader.name] = module  # dataclasses look up their module there
        with sibling_imports(path):
            loader.exec_module(module)
        _loaded[path] = version, module
    return module


@contextlib.contextmanager
def user_code_errors(
    what: str, code: Any, kind: type[PpoError] = ConfigError
) -> Iterator[None]:
    """Turn exceptions of user code into one-line errors with the file and line.

    Args:
      what: The setting and its value, with which the message begins.
      code: The user's function or class, or the path of the user's file.
      kind: Type of the new exception; exceptions of this type and TrainingStopped
        are re-raised unchanged.
    """
    try:
        yield
    except (kind, TrainingStopped):
        raise
    except (Exception, SystemExit) as error:
        text = one_line(" ".join(message_of(error).split()), 300)
        located_error = kind(
            f"{what}: {source_location(code, error)}{type(error).__name__}: {text}"
        )
        # Without this flag, AutoGraph would expand the message to many lines if the
        # code raises while it is traced.
        located_error.ag_pass_through = True  # type: ignore[attr-defined]
        raise located_error from error


def source_location(code: Any, error: BaseException | None = None) -> str:
    """Return `FILE:LINE: ` of user code, or an empty string if it is not known.

    The line is the innermost line of the user's file in the traceback of `error`, or
    the definition of `code` if there is no such line.

    Args:
      code: A function, a class, or the path of a file.
      error: An exception that the code raised.
    """
    file, line = code if isinstance(code, str) else None, 0
    with contextlib.suppress(Exception):  # SyntaxError if the file was edited since
        file = inspect.getsourcefile(code)
        line = inspect.getsourcelines(code)[1]
    for frame in traceback.extract_tb(error.__traceback__ if error else None)[::-1]:
        is_loader = "importlib" in frame.filename or frame.filename == __file__
        if frame.filename == file or not (file or is_loader):
            return f"{frame.filename}:{frame.lineno}: "
    return f"{file}:{line}: " if line else ""


def check_metric_names(names: Iterable[Any]) -> None:
    """Check that names of metrics can be written to files.

    Raises:
      TypeError: A name is not a string.
      UnicodeEncodeError: A name contains a surrogate, which UTF-8 cannot encode.
    """
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"expected names of metrics, got {name!r}")
        name.encode()


class Callbacks:
    """The callbacks of a config, called in the order of the config.

    Classes are instantiated once, when this object is created.

    Raises:
      ConfigError: A function or class does not exist, a class cannot be instantiated,
        a callback does not accept the arguments run, metrics and rollout, or an
        instance of a class has neither `__call__` nor `before_update`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        # The setting with its value, the user's code, and the function to call.
        self._after_iteration: list[tuple[str, Any, Any]] = []
        self._before_update: list[tuple[str, Any, Any]] = []
        for name in names:
            label, code = f"callbacks {name}", load_user_code("callbacks", name)
            with user_code_errors(label, code):
                callback: Any = code() if inspect.isclass(code) else code
                if (method := getattr(callback, "before_update", None)) is not None:
                    inspect.signature(method).bind("run", "rollout")
                    self._before_update.append((label, code, method))
                if callable(callback) or method is None:
                    inspect.signature(callback).bind("run", "metrics", "rollout")
                    self._after_iteration.append((label, code, callback))

    def __call__(self, run: Any, metrics: dict[str, float]) -> dict[str, float]:
        """Call all callbacks and return the metrics that they add.

        Raises:
          CallbackError: A callback raised an exception, stepped or reset the training
            envs, or did not return a dict from names to numbers.
        """
        return self._call(self._after_iteration, run, metrics)

    def before_update(self, run: Any) -> dict[str, float]:
        """Call the method `before_update` of all callbacks that have one.

        The method takes the run and the rollout, and may change the rollout's rewards.

        Raises:
          CallbackError: As in `__call__`, or a reward is not finite afterwards.
        """
        numbers = self._call(self._before_update, run, None)
        # Numbers must not replace metrics of the iteration that have the same name.
        reserved = run.statistics() if numbers else ()
        return {name: numbers[name] for name in numbers if name not in reserved}

    def _call(
        self, callbacks: list[Any], run: Any, metrics: dict[str, float] | None
    ) -> dict[str, float]:
        """Call callbacks; without `metrics`, pass only the run and the rollout."""
        numbers, env = dict(metrics or {}), run.env
        rows, resets = env.stats().rows, env.reset_infos
        for label, code, function in callbacks:
            with user_code_errors(label, code, CallbackError):
                shown = () if metrics is None else (numbers,)
                added = function(run, *shown, run.rollout) or {}
                if env.is_closed:
                    raise ValueError(
                        "a callback must not close run.env; call run.stop() to end "
                        "training"
                    )
                if not isinstance(added, Mapping):
                    raise TypeError(f"expected a dict or None, got {added!r:.100}")
                numbers.update(added)
                if not np.isfinite(run.rollout.reward).all():
                    raise ValueError("expected finite rewards in the rollout")
                if env.stats().rows != rows or env.reset_infos is not resets:
                    raise ValueError(
                        "a callback must not step or reset run.env, "
                        "because the next rollout continues this rollout's episodes; "
                        "create a separate BatchEnv instead"
                    )
                check_metric_names(numbers)
                numbers = {key: float(value) for key, value in numbers.items()}
        reserved = {*(metrics or ()), "steps"}
        return {
            name: number
            for name, number in numbers.items()
            if name not in reserved and not name.startswith("evaluation_")
        }
