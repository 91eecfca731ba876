"""The state of an env's own random generator, as Gymnasium's envs have it.

Four numbers of 64 bits and what is left of a draw; read and set without pickle.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["GeneratorState", "read_generator", "restore_generator"]

#: State and increment of a PCG64, high and low half each; has_uint32; uinteger.
GeneratorState = tuple[int, int, int, int, int, int]

_KIND: Final = "PCG64"
_LOW: Final = (1 << 64) - 1
#: What Gymnasium says of a generator that the env has set itself.
_SET_BY_ENV: Final = -1


def read_generator(env: Any, seed: int | None) -> GeneratorState | None:
    """Returns the state of an env's `np_random`.

    Args:
      env: The env without its wrappers.
      seed: What it was last seeded with.

    Returns:
      The state; None for an env without a PCG64, or whose generator does not come
      from that seed: such an env must have its luck from elsewhere.
    """
    try:
        if env.np_random_seed not in (seed, _SET_BY_ENV):
            return None
        state = env.np_random.bit_generator.state
        if state["bit_generator"] != _KIND:
            return None
        inner = state["state"]
        value, increment = inner["state"], inner["inc"]
        return (
            *(value >> 64, value & _LOW, increment >> 64, increment & _LOW),
            *(state["has_uint32"], state["uinteger"]),
        )
    except Exception:  # an env's attribute may be anything, and do anything
        return None


def restore_generator(env: Any, state: GeneratorState) -> None:
    """Sets the state of an env's `np_random`, which `reset` must have made."""
    high, low, increment_high, increment_low, has_uint32, uinteger = state
    env.np_random.bit_generator.state = {
        "bit_generator": _KIND,
        "state": {
            "state": (high << 64) | low,
            "inc": (increment_high << 64) | increment_low,
        },
        "has_uint32": has_uint32,
        "uinteger": uinteger,
    }
