"""Wrappers by name: which there are, with what arguments, and how they are applied.

Specs and their checks load no Gymnasium, so that configs and the wire can use them;
`envserve.wrappers.apply` builds, in the worker.
"""

from envserve.wrappers.specs import (
    MAX_WRAPPERS,
    Wrappers,
    WrapperSpec,
    check_wrappers,
    parse_wrappers,
    plain_wrappers,
    wrappers_from_plain,
)
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
    "MAX_WRAPPERS",
    "Boolean",
    "Choice",
    "Integer",
    "Integers",
    "Keys",
    "Number",
    "WrapperSpec",
    "Wrappers",
    "check_wrappers",
    "parse_wrappers",
    "plain_wrappers",
    "register_wrapper",
    "wrappers_from_plain",
]
