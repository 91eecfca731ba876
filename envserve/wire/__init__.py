"""The wire: messages, their bodies, rows and reports, as bytes. No I/O, no clock.

All that comes from a peer is checked against limits before it is decoded; whatever is
wrong with it raises RemoteProtocolError, and nothing else.
"""

from envserve.wire.bodies import (
    Attach,
    Building,
    CallBody,
    Drain,
    Granted,
    Hello,
    Join,
    Pong,
    ResetBody,
    Welcome,
)
from envserve.wire.constants import (
    MIN_VERSION,
    VERSION,
    ErrorCode,
    Executed,
    Flag,
    MessageType,
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
from envserve.wire.report import ErrorBody, Report
from envserve.wire.rows import (
    BlockParts,
    RowCodec,
    RowPart,
)

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
    "Flag",
    "Granted",
    "Hello",
    "Join",
    "Message",
    "MessageType",
    "Peer",
    "Pong",
    "Report",
    "ResetBody",
    "RowCodec",
    "RowPart",
    "Welcome",
    "decode",
    "encode",
    "pack",
    "peek",
    "place_of",
    "set_attempt",
]
