"""The env names that can be built, and how.

Only names that are registered when a server or pool starts can be asked for. What is
imported for that is named by who starts it: a name that a peer says imports nothing.
"""

from __future__ import annotations

import copy
import functools
import os
import re
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.error import DependencyNotInstalled

from envserve.envs import user_envs
from envserve.envs.user_envs import is_user_env, writable_by_others
from envserve.errors import EnvStartError, UnknownEnv
from envserve.text import did_you_mean
from envserve.wrappers.apply import wrap
from envserve.wrappers.specs import WrapperSpec

__all__ = ["Registry", "import_env_modules", "make_env", "maker_of", "preload"]
__all__ += ["spec_of"]

Env = gymnasium.Env[Any, Any]

#: Longer names cannot be asked for.
_MAX_NAME: Final = 200
#: By what is missing where an env is built.
_EXTRAS: Final = {"ale_py": "atari"} | {x: x for x in ("mujoco", "box2d", "envpool")}
_ELSE: Final = "it has to be installed or on PYTHONPATH where the envs run"
_NOT_TAKEN: Final = re.compile(
    r"(__init__\(\) missing)|got an unexpected keyword argument '(\w+)'"
)
_BY_NAME: Final = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)

#: Which names came with each module or file that was imported.
_came_with: Final[dict[str, tuple[str, ...]]] = {}


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
          names: Names to offer, or words of `user_envs` for all that comes with them;
            None for every env that is registered.
          import_modules: Modules or files that register envs when they are imported.

        Raises:
          UnknownEnv: One of the names is not registered.
          EnvStartError: A module cannot be imported.
        """
        import_env_modules(import_modules)
        if names is None:
            _register_installed()
            names = [name for name in gymnasium.registry if len(name) <= _MAX_NAME]
        offered: set[str] = set()
        for name in names:
            came = import_env_modules([name]) if is_user_env(name) else (name,)
            if not came:
                raise UnknownEnv(
                    f"{name} registers no env; have it call gymnasium.register(), or "
                    f"name a class in it, like {name}:MyEnv"
                )
            offered.update(came)
        for name in offered:
            spec_of(name)
        self.names = tuple(sorted(offered))


def import_env_modules(words: Iterable[str]) -> tuple[str, ...]:
    """Imports what its own user names; returns the names of the envs that came.

    Args:
      words: Modules, files, or one of these with a colon and the name of a registered
        env, a class or a function in it; see `user_envs`.

    Raises:
      EnvStartError: A module or file cannot be imported.
      UnknownEnv: There is no env of that name in it.
    """
    came: list[str] = []
    for word in words:
        place, _, name = word.partition(":")
        if place == "envpool":  # whose own module registers nothing
            place, name = "envserve.envpool", f"envpool/{name}"
        before = set(gymnasium.registry)
        module = _import(place)
        new = tuple(each for each in gymnasium.registry if each not in before)
        _came_with.setdefault(place, new)
        came += [_register(word, module, name)] if name else _came_with[place]
    return tuple(came)


def _import(place: str) -> ModuleType:
    user_envs.check_files([place])
    user_envs.importing.append(place)
    try:
        return _import_file(place) if place.endswith(".py") else import_module(place)
    except Exception as error:
        places = [
            f"{frame.filename}:{frame.lineno}"
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename != __file__ and "importlib" not in frame.filename
        ]
        ends = dict.fromkeys([*places[:1], *places[-1:]])
        where = f" ({', '.join(ends)})" if ends else ""
        is_missing = isinstance(error, ModuleNotFoundError)
        hint = f"; {_install(error) or _ELSE}" if is_missing else ""
        raise EnvStartError(
            f"expected a module or file that registers envs; importing {place!r} "
            f"failed with {type(error).__name__}: {error}{where}{hint}"
        ) from error
    finally:
        user_envs.importing.pop()


def _import_file(place: str) -> ModuleType:
    """Imports a file by its name, as the script that it may be would find it."""
    path = Path(os.path.abspath(place))
    folder = str(path.parent)
    if not re.fullmatch(r"[\w-]+", path.stem):
        raise ValueError(f"expected a file of Python, named by one word; got {path}")
    if place := writable_by_others(folder) or writable_by_others(str(path)):
        raise ValueError(f"others can write to {place}; have a place of your own")
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that a file there hides nothing
    module = import_module(path.stem)
    if not os.path.samefile(module.__file__ or "/", path):
        raise ValueError(f"by that name {module.__file__} is found; rename the file")
    return module


def _register(word: str, module: ModuleType, name: str) -> str:
    """Registers an env by what it is called here; returns that."""
    plain = user_envs.name_of(word)
    spec = gymnasium.registry.get(name)
    if spec is None:
        make: Any = module
        for part in name.split("."):
            make = getattr(make, part, None)
        if not callable(make):
            makers = [word for word, it in vars(module).items() if callable(it)]
            raise UnknownEnv(
                f"expected {name!r} to be registered by {module.__name__}, or a class "
                f"or function in it that makes an env; got neither"
                f"{did_you_mean(name, [*gymnasium.registry, *makers])}"
            )
        spec = EnvSpec(plain, entry_point=make)
    gymnasium.registry[plain] = spec
    return plain


@functools.cache
def _register_installed() -> None:
    """Registers envs of installed packages: `NAME = "module:Class"`, or a module."""
    for entry in entry_points(group="envserve.envs"):
        if not entry.attr:
            import_env_modules([entry.module])
        elif entry.name not in gymnasium.registry:
            place = f"{entry.module}:{entry.attr}"  # imported when it is built
            gymnasium.registry[entry.name] = EnvSpec(entry.name, entry_point=place)


def _install(error: Exception) -> str:
    """Returns how to get what an error says is missing; "" if it is none of ours."""
    words = re.findall(r"\w+", str(error).lower())
    extra = next((_EXTRAS[word] for word in words if word in _EXTRAS), "")
    return extra and f"pip install 'envserve[{extra}]' where the envs run"


def make_env(
    name: str, kwargs: Mapping[str, Any], wrappers: Sequence[WrapperSpec] = ()
) -> Env:
    """Builds a registered env, in wrappers.

    Without Gymnasium's wrappers that check its use: here an env is always reset before
    it is stepped, and what it returns is checked as it is written.

    Raises:
      UnknownEnv: No env of that name is registered.
      WrapperError: A wrapper is not known, or an argument of it is wrong.
      EnvStartError: A wrapper does not take this env, its constructor does not take
        these arguments, or what it needs is not installed.
    """
    spec = copy.copy(spec_of(name))
    spec.order_enforce = False
    if spec.entry_point is None:
        raise EnvStartError(
            f"{name} exists only as a vector env; ask for vectorized=True, or start "
            f"the server with --vector {name}"
        )
    try:
        env = gymnasium.make(spec, disable_env_checker=True, **kwargs)
    except DependencyNotInstalled as error:
        if not (install := _install(error)):
            raise
        raise EnvStartError(f"{name} needs what is not there: {install}") from None
    except TypeError as error:
        _explain(error, spec, kwargs)
        raise
    return wrap(env, wrappers)


def _explain(error: TypeError, spec: EnvSpec, kwargs: Mapping[str, Any]) -> None:
    """Raises EnvStartError if it is about what a constructor takes."""
    make = maker_of(spec)
    inits = [kind.__init__ for kind in getattr(make, "__mro__", ())] or [make]
    each = [part for init in inits for part in signature(init).parameters.items()]
    takes = {name for name, part in each if part.kind in _BY_NAME} - {"self"}
    odd = _NOT_TAKEN.search(str(error))
    if odd and (odd[1] or (odd[2] in kwargs and odd[2] not in takes)):
        raise EnvStartError(
            f"env_kwargs: {error.__cause__}; {spec.id} takes "
            f"{', '.join(sorted(takes)) or 'none'}"
        ) from None


def maker_of(spec: EnvSpec) -> Any:
    """Returns the class or function that makes a registered env; None if none does."""
    entry = spec.entry_point
    return load_env_creator(entry) if isinstance(entry, str) else entry


def preload(name: str) -> None:
    """Imports the module of an env's class, so that forks of this process have it."""
    registered = gymnasium.registry.get(name)
    if registered is not None and isinstance(registered.entry_point, str):
        import_module(registered.entry_point.partition(":")[0])


def spec_of(name: str) -> EnvSpec:
    """Returns what is registered under a name; raises UnknownEnv, with a hint."""
    if name not in gymnasium.registry:
        _register_installed()
    if name in gymnasium.registry:
        return gymnasium.registry[name]
    hint = did_you_mean(name, gymnasium.registry)
    if not hint and (name.startswith("ALE/") or "NoFrameskip" in name):
        hint = "; Atari's games come with --import ale_py (import_modules=['ale_py'])"
    if not hint and _came_with:
        hint = "".join(
            f"; {word} registers {', '.join(names[:5]) or 'no env'}"
            for word, names in _came_with.items()
        )
    hint = hint or " (own envs: see --import, import_modules)"
    raise UnknownEnv(f"no env named {name!r} is registered{hint}")
