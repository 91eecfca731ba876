"""Constants of the protocol: message types, error codes and limits.

Every limit of the wire format is defined here, and is checked before the bytes that it
limits are decoded.
"""

from __future__ import annotations

import enum
from typing import Final

MAGIC: Final = b"ENVS"
#: Highest and lowest protocol version that this release supports.
VERSION: Final = 2
MIN_VERSION: Final = 2

#: Maximum number of frames in a message: prefix with body, rows, report.
MAX_FRAMES: Final = 3
#: Maximum number of blocks in one message.
MAX_ENTRIES: Final = 4096
#: Maximum size of a body. Together with the prefix and the entries, it stays below the
#: 1 MiB that servers accept by default.
MAX_BODY_BYTES: Final = (1 << 20) - (64 << 10)
#: Limits on the bodies of ATTACH and CALL: size and number of values. The number is
#: limited because it determines the time to decode the values; see the decision "No
#: message occupies the server for more than 2 ms".
MAX_ATTACH_BYTES: Final = 4 << 10
MAX_ATTACH_VALUES: Final = 256
MAX_CALL_BYTES: Final = 64 << 10
MAX_CALL_VALUES: Final = 4096
#: The maximum size of a RESET without options is RESET_BYTES, plus RESET_ROW_BYTES for
#: each row of its blocks.
RESET_BYTES: Final = 64
RESET_ROW_BYTES: Final = 24
#: Limits on the options of a RESET. The options do not count towards RESET_BYTES.
MAX_OPTIONS_BYTES: Final = 16 << 10
MAX_OPTIONS_VALUES: Final = 1024
#: Maximum number of blocks in a CALL, or in a RESET with options; limited because the
#: server sends a copy of the arguments or options to the worker of each block.
MAX_ARGUMENT_BLOCKS: Final = 64
#: Maximum total size of the arguments of a CALL, over all its blocks.
MAX_ARGUMENT_BYTES: Final = 1 << 20
#: Maximum size of the rows' fields in a body; fields that do not fit are sent in a
#: separate frame.
MAX_INLINE_BYTES: Final = 64 << 10
#: Limits of the report that accompanies a result (infos, faults, errors): its size, and
#: the number of values in it.
MAX_REPORT_BYTES: Final = 1 << 20
MAX_REPORT_VALUES: Final = 1 << 17
#: Maximum size of the rows of one result. Clients reject frames that are longer.
MAX_RESULT_BYTES: Final = 1 << 30
MAX_STATUS_BYTES: Final = 64 << 10
#: Maximum total size of the JPEG images in a FRAME_RESULT.
MAX_FRAMES_BYTES: Final = 640 << 10
#: Maximum number of rows in a FRAME_RESULT.
MAX_FRAME_ROWS: Final = 64
#: Maximum size of a flight record in a FRAME_RESULT.
MAX_RECORD_BYTES: Final = 16 << 20
#: Limits of the texts in an ERROR.
MAX_TEXT_BYTES: Final = 4 << 10
MAX_TRACEBACK_BYTES: Final = 16 << 10
#: Maximum number of env names in a WELCOME.
MAX_NAMES: Final = 1000


#: Required body of an ASK_DRAIN, so that a client cannot send one by mistake.
DRAIN_WORD: Final = b"drain"


class MessageType(enum.IntEnum):
    """Type of a message; servers send types above 127, clients send all others."""

    HELLO = 1
    ATTACH = 2
    STEP = 3
    RESET = 4
    CALL = 5
    PING = 6
    DETACH = 7
    JOIN = 8
    STATUS = 9
    FRAME = 10
    ASK_DRAIN = 11
    WELCOME = 129
    GRANTED = 130
    BUILDING = 131
    RESULT = 132
    CALL_RESULT = 133
    PONG = 134
    DETACHED = 135
    DRAIN = 136
    ABSENT = 137
    JOINED = 138
    STATUS_RESULT = 139
    FRAME_RESULT = 140
    ERROR = 143


class ErrorCode(enum.IntEnum):
    """Reason why a request failed.

    The codes of a protocol version are fixed. A new code requires a new version, unless
    it is sent only in reply to requests that older clients never make.
    """

    BAD_MESSAGE = 1
    UNSUPPORTED = 2
    VERSION_MISMATCH = 3
    UNKNOWN_ENV = 4
    ENVS_BUSY = 5
    REFUSED = 6
    """The operator of the server does not allow the request."""
    ENV_START_FAILED = 7
    LEASE_LOST = 8
    FENCED = 9
    """The epoch or boot id does not match the server's."""
    GAP = 10
    INVALID_ACTION = 11
    CALL_FAILED = 12
    ENV_FAILED = 13
    INTERNAL = 14
    BAD_WRAPPER = 15
    """A wrapper is not valid; sent only in reply to requests with wrappers."""


class Executed(enum.IntEnum):
    """Whether envs have received the request that an ERROR replies to."""

    NO = 0
    YES = 1
    UNKNOWN = 2


#: Maps message types to the maximum size of a body in bytes.
BODY_LIMITS: Final = {
    **dict.fromkeys(MessageType, 4 << 10),
    MessageType.CALL_RESULT: 0,
    MessageType.STEP: MAX_INLINE_BYTES,
    MessageType.RESULT: MAX_INLINE_BYTES,
    MessageType.ATTACH: MAX_ATTACH_BYTES,
    MessageType.RESET: MAX_BODY_BYTES,
    MessageType.CALL: MAX_CALL_BYTES,
    MessageType.WELCOME: MAX_BODY_BYTES,
    MessageType.STATUS_RESULT: MAX_STATUS_BYTES,
    MessageType.FRAME_RESULT: MAX_BODY_BYTES,
    MessageType.GRANTED: MAX_BODY_BYTES,
    MessageType.PONG: MAX_BODY_BYTES,
    MessageType.ERROR: MAX_BODY_BYTES,
}
