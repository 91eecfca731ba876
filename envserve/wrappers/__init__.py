"""Wrappers by name, and the classes that modules need to register their own.

`registry` has all known wrappers, and `specs` the wrappers that an env is requested
with. Neither imports Gymnasium, so that configs and the wire format can use them;
`apply` wraps the env in the worker.
"""

from envserve.wrappers.registry import (
    Boolean,
    Choice,
    Integer,
    Integers,
    Keys,
    Number,
    register_wrapper,
)

__all__ = [
    "Boolean",
    "Choice",
    "Integer",
    "Integers",
    "Keys",
    "Number",
    "register_wrapper",
]
