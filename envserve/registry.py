"""The env names that can be built, and how.

Only names that are registered when a server or pool starts can be asked for; a name
is never the path of something to import.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import gymnasium

from envserve.errors import EnvStartError, UnknownEnv
from envserve.text import did_you_mean
from envserve.wrappers import WrapperSpec
from envserve.wrappers.apply import wrap

__all__ = ["Registry", "import_env_modules", "make_env", "preload"]

Env = gymnasium.Env[Any, Any]

#: Longer names cannot be asked for.
_MAX_NAME: Final = 200


class Registry:
    """The env names on offer.

    Attributes:
      names: Sorted names.
    """

    def __init__(
        self, names: Sequence[str] | None = None, import_modules: Iterable[str] = ()
    ) -> None:
        """Imports the modules, then fixes the offer.

        Args:
          names: Names to offer; None for every env that is registered.
          import_modules: Modules that register envs when they are imported.

        Raises:
          UnknownEnv: One of the names is not registered.
          EnvStartError: A module cannot be imported.
        """
        import_env_modules(import_modules)
        known = tuple(sorted(n for n in gymnasium.registry if len(n) <= _MAX_NAME))
        for name in names or ():
            _check(name, known, "is registered")
        self.names = known if names is None else tuple(sorted(set(names)))

    def check(self, name: str) -> None:
        """Raises UnknownEnv if the name is not on offer.

        Near matches are for who asked to find, among the names that it was told: with
        many names that takes long, and servers have other things to do.
        """
        if name not in self.names:
            raise UnknownEnv(f"no env named {name!r} is offered")


def import_env_modules(modules: Iterable[str]) -> None:
    """Imports modules that register envs; raises EnvStartError naming the module."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise EnvStartError(
                f"expected a module of that name that registers envs; importing "
                f"{module!r} failed with {type(error).__name__}: {error}"
                f"{_remedy(error)}"
            ) from error


def _remedy(error: Exception) -> str:
    if not isinstance(error, ModuleNotFoundError):
        return ""
    if error.name == "ale_py":
        return "; pip install 'envserve[atari]' where the envs run"
    return "; it has to be installed or on PYTHONPATH where the envs run"


def make_env(
    name: str, kwargs: Mapping[str, Any], wrappers: Sequence[WrapperSpec] = ()
) -> Env:
    """Builds a registered env, in wrappers.

    Without Gymnasium's wrappers that check its use: here an env is always reset before
    it is stepped, and what it returns is checked as it is written.

    Raises:
      UnknownEnv: No env of that name is registered.
      WrapperError: A wrapper is not known, or an argument of it is wrong.
      EnvStartError: A wrapper does not take this env.
    """
    _check(name, tuple(gymnasium.registry), "is registered")
    spec = copy.copy(gymnasium.registry[name])
    spec.order_enforce = False
    return wrap(gymnasium.make(spec, disable_env_checker=True, **kwargs), wrappers)


def preload(name: str) -> None:
    """Imports the module of an env's class, so that forks of this process have it."""
    registered = gymnasium.registry.get(name)
    if registered is not None and isinstance(registered.entry_point, str):
        importlib.import_module(registered.entry_point.partition(":")[0])


def _check(name: str, known: Sequence[str], verb: str) -> None:
    if name in known:
        return
    raise UnknownEnv(f"no env named {name!r} {verb}{did_you_mean(name, known)}")
