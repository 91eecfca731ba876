"""The wire: messages, their bodies, rows and reports, as bytes. No I/O, no clock.

All that comes from a peer is checked against limits before it is decoded; whatever is
wrong with it raises RemoteProtocolError, and nothing else. A module is loaded when
something of it is used: NumPy is not for everybody who greets a server.
"""

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from envserve.wire.bodies import (
        Attach,
        Building,
        CallBody,
        Drain,
        FrameRequest,
        FrameResult,
        Granted,
        Pong,
        ResetBody,
        pack_options,
    )
    from envserve.wire.constants import (
        MIN_VERSION,
        VERSION,
        ErrorCode,
        Executed,
        MessageType,
    )
    from envserve.wire.greetings import (
        ErrorBody,
        Hello,
        Join,
        Welcome,
        body_of,
        check_versions,
        exception_of,
    )
    from envserve.wire.message import (
        Buffer,
        Message,
        Peer,
        decode,
        encode,
        pack,
        peek,
        place_of,
        set_attempt,
    )
    from envserve.wire.report import Report
    from envserve.wire.rows import BlockParts, RowCodec, RowPart
    from envserve.wire.status import Histogram, LeaseStatus, ServerStatus

__all__ = [
    "MIN_VERSION",
    "VERSION",
    "Attach",
    "BlockParts",
    "Buffer",
    "Building",
    "CallBody",
    "Drain",
    "ErrorBody",
    "ErrorCode",
    "Executed",
    "FrameRequest",
    "FrameResult",
    "Granted",
    "Hello",
    "Histogram",
    "Join",
    "LeaseStatus",
    "Message",
    "MessageType",
    "Peer",
    "Pong",
    "Report",
    "ResetBody",
    "RowCodec",
    "RowPart",
    "ServerStatus",
    "Welcome",
    "body_of",
    "check_versions",
    "decode",
    "encode",
    "exception_of",
    "pack",
    "pack_options",
    "peek",
    "place_of",
    "set_attempt",
]

_LIGHT = ("constants", "greetings", "message", "status")
_OTHERS = ("bodies", "rows", "report")


def __getattr__(name: str) -> object:
    """Looks in modules that cost little first."""
    for module in (*_LIGHT, *_OTHERS) if name in __all__ else ():
        found = vars(importlib.import_module(f"{__name__}.{module}"))
        if name in found:
            return found[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
