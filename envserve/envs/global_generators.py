"""Seeds for random generators that do not belong to an env.

Workers are forks of one process, so a generator that a module creates when it is
imported would draw the same numbers in all workers. Therefore, each worker seeds the
global generators of `random`, NumPy and PyTorch, and every generator that it can reach
from the globals of the user's modules and functions: through default arguments,
closures, the user's classes and functions, and objects whose class belongs to the user
or to the standard library. All modules that are not installed belong to the user.
"""

from __future__ import annotations

import contextlib
import gc
import random
import re
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

import gymnasium
import numpy as np

from envserve.envs import registry, user_envs

#: Maximum size of a container whose elements are searched.
_MAX_ELEMENTS: Final = 2000
#: Maximum number of objects to search.
_MAX_OBJECTS: Final = 20_000
#: Ids of types whose objects refer to no generator, and do not count as elements or
#: objects. This is no set of types, because classes of users may be unhashable.
_PLAIN_IDS: Final = frozenset(
    map(id, (type(None), bool, int, float, complex, str, bytes, CodeType))
)
_NUMPY: Final = (
    np.random.Generator,
    np.random.BitGenerator,
    np.random.RandomState,
    np.random.SeedSequence,
)


def seed_global_generators(
    env_name: str, seed: int, functions: Sequence[Callable[..., Any]] = ()
) -> None:
    """Seed all random generators of this process that an env may use but does not own.

    Generators are reseeded in place, so the new state applies to all references to
    them.

    Args:
      env_name: Name of the worker's envs; its module is imported if necessary.
      seed: Seed in [0, 2**32).
      functions: Functions and classes that create envs but belong to no imported
        module.
    """
    # If the import fails, the error is reported when the env is built.
    with contextlib.suppress(BaseException):
        registry.preload(env_name)
    torch = user_envs.globals_of(sys.modules.get("torch"))
    torch_kind: Any = torch.get("Generator")
    has_torch = isinstance(torch_kind, type)  # False if torch is a mock
    sequence = np.random.SeedSequence(seed)
    for value in _objects_of(registry.user_modules(env_name), functions):
        kind = type(value)  # `isinstance` would make a lazy proxy load its object
        is_torch = has_torch and issubclass(kind, torch_kind)
        if not (is_torch or issubclass(kind, (*_NUMPY, random.Random))):
            continue
        (child,) = sequence.spawn(1)
        with contextlib.suppress(Exception):  # the user's class may reject seeds
            if issubclass(kind, _NUMPY):
                _seed_numpy(value, child)
            else:
                set_seed = value.manual_seed if is_torch else value.seed
                set_seed(int(child.generate_state(1)[0]))
    random.seed(seed)
    np.random.seed(seed)
    if has_torch and "manual_seed" in torch:
        torch["manual_seed"](seed)


def _objects_of(
    groups: Iterable[dict[str, registry.Globals]],
    functions: Sequence[Callable[..., Any]],
) -> Iterator[Any]:
    """Yield the objects to which functions and modules refer, in a constant order."""
    names = [*chain(*groups), *map(user_envs.name_of_code, functions)]
    packages = {re.split("[.:]", name)[0] for name in names}
    seen = set[int]()
    for modules in groups:
        roots = (modules[name].values() for name in sorted(modules))
        yield from _referents(chain(functions, *roots), packages, seen)


def _referents(
    roots: Iterable[Any], packages: Collection[str], seen: set[int]
) -> Iterator[Any]:
    """Yield objects and the objects to which they refer; add their ids to `seen`."""
    queue = deque(roots)
    while queue and len(seen) < _MAX_OBJECTS:
        value = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        kind = type(value)
        owner = value if issubclass(kind, (type, FunctionType)) else kind
        package = str(owner.__module__).partition(".")[0]
        # The class of the value is Python's, such as a list, a closure or an iterator.
        is_standard = owner is kind and package in sys.stdlib_module_names
        if (
            package in packages
            or (is_standard and not issubclass(kind, ModuleType))
            or issubclass(kind, gymnasium.Space)
        ):
            parts = gc.get_referents(value)
            parts = [part for part in parts if id(type(part)) not in _PLAIN_IDS]
            queue += parts if len(parts) <= _MAX_ELEMENTS else ()


def _seed_numpy(value: Any, sequence: np.random.SeedSequence) -> None:
    """Replace the state of a NumPy random generator or SeedSequence in place."""
    bits = getattr(value, "bit_generator", value)
    seeds = getattr(bits, "seed_seq", bits)  # the source of seeds for `spawn`
    if isinstance(seeds, np.random.SeedSequence):
        options: Any = {"spawn_key": sequence.spawn_key, "pool_size": seeds.pool_size}
        np.random.SeedSequence.__init__(seeds, sequence.entropy, **options)
    if isinstance(value, np.random.SeedSequence):
        return
    is_legacy = isinstance(value, np.random.RandomState)
    state = value.get_state(legacy=False) if is_legacy else bits.state
    kind = getattr(np.random, state["bit_generator"], None)
    if kind is None:  # a bit generator of another library
        return
    if is_legacy:
        value.set_state(kind(sequence).state)
    else:
        bits.state = kind(sequence).state
