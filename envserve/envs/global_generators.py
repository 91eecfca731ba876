"""Seeds for random generators that do not belong to an env.

Workers are forks of one process, so a generator that a module creates when it is
imported would draw the same numbers in all of them. Each worker therefore seeds the
global generators of `random`, NumPy and PyTorch, and the generators that it finds in
the user's modules: in globals, class attributes, default arguments and closures, also
within lists, dicts and objects of the user's classes.
"""

from __future__ import annotations

import contextlib
import random
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from types import BuiltinMethodType, CellType, FunctionType, MethodType
from typing import Any, Final

import numpy as np

from envserve.envs import registry

#: Maximum length of a list or dict to search, and number of objects to search.
_MAX_LENGTH: Final = 1000
_MAX_OBJECTS: Final = 50_000


def seed_global_generators(env_name: str, seed: int) -> None:
    """Seed all generators of this process that an env may use but does not own.

    Generators keep their identity, so other references to them see the new state.

    Args:
      env_name: Name of the worker's envs, whose module is imported if necessary.
      seed: Seed in [0, 2**32). A generator's seed also depends on its name.
    """
    # A failed import is reported when the env is built.
    with contextlib.suppress(BaseException):
        registry.preload(env_name)
    torch: Any = sys.modules.get("torch")
    torch_kind = getattr(torch, "Generator", random.Random)
    kinds = (np.random.Generator, np.random.BitGenerator, np.random.RandomState)
    modules = registry.user_modules(env_name)
    packages = {"gymnasium", *(name.partition(".")[0] for name in modules)}
    found: deque[tuple[str, Any]] = deque(
        (f"{name}.{key}", value)
        for name, module in modules.items()
        for key, value in list(vars(module).items())
    )
    seen: set[int] = set()
    while found and len(seen) < _MAX_OBJECTS:
        name, value = found.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        sequence = np.random.SeedSequence(seed, spawn_key=(zlib.crc32(name.encode()),))
        if isinstance(value, kinds):
            _seed_numpy(value, sequence)
        elif isinstance(value, random.Random):
            value.seed(int(sequence.generate_state(1)[0]))
        elif isinstance(value, torch_kind):
            value.manual_seed(int(sequence.generate_state(1)[0]))
        else:
            parts = _parts_of(value, packages)
            found += ((f"{name}.{key}", part) for key, part in parts)
    random.seed(seed)
    np.random.seed(seed)
    if hasattr(torch, "manual_seed"):
        torch.manual_seed(seed)


def _seed_numpy(value: Any, sequence: np.random.SeedSequence) -> None:
    """Replace the state of a Generator, BitGenerator or RandomState in place."""
    is_legacy = isinstance(value, np.random.RandomState)
    bits = getattr(value, "bit_generator", value)
    state = value.get_state(legacy=False) if is_legacy else bits.state
    kind = getattr(np.random, state["bit_generator"], None)
    if kind is None:  # of another library
        return
    state = kind(sequence).state
    if is_legacy:
        value.set_state(state)
    else:
        bits.state = state


def _parts_of(value: Any, packages: set[str]) -> Iterable[tuple[Any, Any]]:
    """Return the objects in which a value may hold generators, by name or number."""
    if isinstance(value, dict | list | tuple):
        if len(value) > _MAX_LENGTH:
            return ()
        return list(value.items() if isinstance(value, dict) else enumerate(value))
    if isinstance(value, partial):
        return enumerate((value.func, value.args, value.keywords))
    if isinstance(value, MethodType | BuiltinMethodType):  # such as `RNG.random`
        return [("self", value.__self__)]
    if isinstance(value, CellType):
        with contextlib.suppress(ValueError):  # the cell is empty
            return [("cell", value.cell_contents)]
        return ()
    kind = value if isinstance(value, type) else type(value)
    if isinstance(value, FunctionType):
        parts = (value.__defaults__, value.__kwdefaults__, value.__closure__)
        return enumerate(parts) if _is_in(value, packages) else ()
    if isinstance(value, staticmethod | classmethod):
        return [("function", value.__func__)]
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, Mapping) and _is_in(kind, packages):
        return list(attributes.items())
    return ()


def _is_in(value: Any, packages: set[str]) -> bool:
    return str(value.__module__).partition(".")[0] in packages
