"""Numbers of the protocol: message types, error codes, flags and limits.

Every limit stands here, and is checked before the bytes it bounds are decoded.
"""

from __future__ import annotations

import enum
from typing import Final

MAGIC: Final = b"ENVS"
#: Highest and lowest protocol version that this code speaks.
VERSION: Final = 2
MIN_VERSION: Final = 2

#: Prefix with body, rows, report.
MAX_FRAMES: Final = 3
#: Blocks that one message may list.
MAX_ENTRIES: Final = 4096
#: With prefix and entries, below the 1 MiB that servers accept by default.
MAX_BODY_BYTES: Final = (1 << 20) - (64 << 10)
#: What is decoded into Python's values costs time by their number, not by their bytes
#: (docs/decisions.md: "No message occupies the server for more than 2 ms").
MAX_ATTACH_BYTES: Final = 4 << 10
MAX_ATTACH_VALUES: Final = 256
MAX_CALL_BYTES: Final = 64 << 10
MAX_CALL_VALUES: Final = 4096
#: Of a RESET: for the whole of it, and for each row of the blocks that it lists.
RESET_BYTES: Final = 64
RESET_ROW_BYTES: Final = 24
#: Of a RESET besides: its options.
MAX_OPTIONS_BYTES: Final = 16 << 10
MAX_OPTIONS_VALUES: Final = 1024
#: Blocks of a CALL, or of a RESET with options: what it says is told to each.
MAX_TOLD_BLOCKS: Final = 64
#: Arguments of a CALL, each time that they are told.
MAX_TOLD_BYTES: Final = 1 << 20
#: Rows that may stand in a body; longer ones have a frame of their own.
MAX_INLINE_BYTES: Final = 64 << 10
#: Infos, faults and errors of one result; and values of the infos.
MAX_REPORT_BYTES: Final = 1 << 20
MAX_REPORT_VALUES: Final = 1 << 17
#: Rows of one result: the longest frame that clients accept.
MAX_RESULT_BYTES: Final = 1 << 30
MAX_STATUS_BYTES: Final = 64 << 10
#: Pictures of a FRAME_RESULT, beside 64 texts; rows of a FRAME; a flight record.
MAX_FRAMES_BYTES: Final = 640 << 10
MAX_FRAME_ROWS: Final = 64
MAX_RECORD_BYTES: Final = 16 << 20
MAX_TEXT_BYTES: Final = 4 << 10
MAX_TRACEBACK_BYTES: Final = 16 << 10
MAX_NAMES: Final = 1000


#: The body of an ASK_DRAIN, which nobody sends by chance.
DRAIN_WORD: Final = b"drain"


class MessageType(enum.IntEnum):
    """What a message is; from 128 on, it comes from a server."""

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
    """Why a request failed. The set is closed.

    A new code needs a new version, or a request that only newer clients make.
    """

    BAD_MESSAGE = 1
    UNSUPPORTED = 2
    VERSION_MISMATCH = 3
    UNKNOWN_ENV = 4
    ENVS_BUSY = 5
    REFUSED = 6  # the server's operator has not allowed what was asked for
    ENV_START_FAILED = 7
    LEASE_LOST = 8
    FENCED = 9  # the epoch or boot id is not the server's
    GAP = 10
    INVALID_ACTION = 11
    CALL_FAILED = 12
    ENV_FAILED = 13
    INTERNAL = 14
    BAD_WRAPPER = 15  # only to who has asked for wrappers


class Executed(enum.IntEnum):
    """Whether envs have seen the request that an ERROR answers."""

    NO = 0
    YES = 1
    UNKNOWN = 2


#: How long the body of a message may be, in bytes.
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
