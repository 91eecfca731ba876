"""Named wrappers, and the functions with which modules register their own wrappers.

`registry` contains all known wrappers, and `specs` parses the wrappers that a request
names. Neither imports Gymnasium, so configs and the wire format can use them; `apply`
wraps the env in the worker.
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
