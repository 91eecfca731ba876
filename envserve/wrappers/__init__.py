"""Wrappers by name: what modules that register their own need.

`table` has all that are known, `specs` what is asked for. Neither loads Gymnasium, so
that configs and the wire can use them; `apply` builds, in the worker.
"""

from envserve.wrappers.table import (
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
