"""Code of the user's process that the workers of the same host cannot import.

A script may define env classes, register envs, and pass functions that create envs, as
for Gymnasium's `AsyncVectorEnv`. The client pickles them with cloudpickle, and the pool
sends them to each of its workers in BUILD, over their socket pair. No message on the
network has a field for pickled code: an `EnvRequest` has none, so a server never passes
any to its workers.
"""

from __future__ import annotations

import functools
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, Self

import gymnasium
from gymnasium.envs.registration import EnvSpec, WrapperSpec, load_env_creator

from envserve.envs import user_envs
from envserve.errors import EnvStartError, WrapperError
from envserve.spaces import codec
from envserve.wrappers.registry import WRAPPERS, RegisteredWrapper
from envserve.wrappers.specs import table_of

Env = gymnasium.Env[Any, Any]

#: Maximum size of the pickled code; a message to a worker may have 64 MiB.
_MAX_BYTES: Final = 32 << 20


@dataclass(frozen=True)
class UserCode:
    """The code that workers need in addition to the modules that they import.

    Attributes:
      specs: Envs to register in each worker, by name.
      env_fns: Functions that create the env of each row; empty if the envs are created
        by name.
      wrappers: Classes and functions to register as wrappers in each worker, by name.
      kwargs: Arguments of the env's constructor that have no plain form.
    """

    specs: Mapping[str, EnvSpec] = field(default_factory=dict)
    env_fns: Sequence[Callable[[], Env]] = ()
    wrappers: dict[str, Callable[..., Env]] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, env: object) -> tuple[Any, Self]:
        """Return a reference to an env, as for `name_and_imports`, and its code.

        Args:
          env: As for `BatchEnv.local`.

        Raises:
          TypeError: An element of a list is not a function.
          ValueError: The list is empty.
        """
        if isinstance(env, str):
            spec = gymnasium.registry.get(env)
            return env, cls({env: spec} if spec else {})
        if isinstance(env, EnvSpec):
            return env.id, cls({env.id: env})
        if isinstance(env, Sequence):
            if not env:
                raise ValueError(
                    "env: expected at least one function; got an empty list"
                )
            for index, function in enumerate(env):
                if not callable(function):
                    raise TypeError(
                        f"env[{index}]: expected a function that creates an env; got "
                        f"{function!r:.200}"
                    )
            names = [*dict.fromkeys(map(user_envs.name_of_code, env))]
            return (names[0] + "(...)" * (len(names) > 1))[:200], cls({}, env)
        if not callable(env):
            return env, cls()  # `name_and_imports` raises the error
        name = user_envs.name_of_code(env)[:200]
        return name, cls({name: EnvSpec(re.sub(r"[^\w:.]", "", name), env)})

    def take_kwargs(self, kwargs: Any) -> Any:
        """Store the arguments that have no plain form; return the others."""
        if not isinstance(kwargs, Mapping):
            return kwargs
        plain = {}
        for name, value in kwargs.items():
            try:
                codec.encode(value)
            except codec.CodecError:
                self.kwargs[name] = value
            else:
                plain[name] = value
        return plain

    def name_wrappers(self, wrappers: Any) -> Any:
        """Replace classes and functions among wrappers by the names of their code.

        Registered classes keep their own name, so that crashes can be replayed.
        """
        if not isinstance(wrappers, Sequence) or isinstance(wrappers, str):
            return wrappers  # `parse_wrappers` raises the error
        named = []
        for position, wrapper in enumerate(wrappers):
            if isinstance(wrapper, WrapperSpec):
                wrapper = functools.partial(_apply_recorded, wrapper)
            table = table_of(wrapper)
            if callable(table):
                name = user_envs.name_of_code(wrapper)[:180]
                table = {"name": f"<{name} {position}>"}  # not the name of a module
                self.wrappers[table["name"]] = wrapper
            named.append(table)
        return named

    def dumps(self) -> bytes:
        """Pickle the code; b"" if there is none.

        Raises:
          EnvStartError: Some of the code cannot be pickled, or is too large.
        """
        if not (self.specs or self.env_fns or self.wrappers or self.kwargs):
            return b""
        # One pickle, so that the functions of a worker share what their closures share.
        try:
            pickled = _pickle(self)
        except Exception:
            functions = {f"env[{n}]": each for n, each in enumerate(self.env_fns)}
            parts = self.specs, self.wrappers, self.kwargs, functions
            for name, part in chain.from_iterable(each.items() for each in parts):
                _check_part(name, part)
            raise
        if len(pickled) > _MAX_BYTES:
            raise EnvStartError(
                f"expected functions and classes that refer to at most "
                f"{_MAX_BYTES >> 20} MiB of data; got {len(pickled) >> 20} MiB; load "
                f"the data inside the functions"
            )
        return pickled

    @classmethod
    def loads(cls, pickled: bytes) -> Self:
        """Unpickle the code that the pool of the same user has sent.

        Raises:
          EnvStartError: A worker cannot load the code.
        """
        if not pickled:
            return cls()
        # Otherwise, a script that starts envs while it is imported would do so in each
        # worker, endlessly.
        user_envs.modules_being_imported.append("the module of a function or class")
        try:
            code: Self = pickle.loads(pickled)
        except Exception as error:
            raise EnvStartError(
                f"workers cannot load the functions or classes of this process: "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            user_envs.modules_being_imported.pop()
        for name, spec in code.specs.items():
            if str(spec.vector_entry_point).startswith("envserve.gym:"):
                # Set by importing `envserve.gym`, which workers do not do.
                known = gymnasium.registry.get(name)
                spec.vector_entry_point = known.vector_entry_point if known else None
            gymnasium.registry[name] = spec
        for name, wrapper in code.wrappers.items():
            WRAPPERS[name] = RegisteredWrapper(wrapper, {}, is_limited=False)
        return code

    @property
    def roots(self) -> list[Callable[..., Any]]:
        """The functions and classes, except those that workers import by name."""
        points = [spec.entry_point for spec in self.specs.values()]
        named = [each for each in points if callable(each)]
        return [*self.env_fns, *self.wrappers.values(), *named]


def _apply_recorded(spec: WrapperSpec, env: Env) -> Env:
    """Apply a wrapper with the arguments that Gymnasium has recorded."""
    if spec.kwargs is None:
        raise WrapperError(
            f"{spec.name}: expected a wrapper that records its arguments with "
            f"RecordConstructorArgs; pass its class instead"
        )
    make: Any = load_env_creator(spec.entry_point)
    wrapped: Env = make(env, **spec.kwargs)
    return wrapped


def _pickle(value: object) -> bytes:
    import cloudpickle  # type: ignore[import-untyped]

    pickled: bytes = cloudpickle.dumps(value)
    return pickled


def _check_part(name: str, part: object) -> None:
    """Raise EnvStartError if a part of the code cannot be pickled."""
    try:
        _pickle(part)
    except Exception as error:
        raise EnvStartError(
            f"{name}: expected code that workers can receive; it refers to an object "
            f"that cannot be pickled ({type(error).__name__}: {error}); create that "
            f"object inside the function"
        ) from error
