"""The conversation between client and server, both halves.

No I/O and no clock: bytes and `now` go in, bytes and decisions come out.
"""

from envserve.session.attachment import attach_of
from envserve.session.client import ClientSession
from envserve.session.decisions import (
    Decision,
    EndPool,
    Reply,
    RunCall,
    RunReset,
    RunStep,
    SessionId,
    StartPool,
)
from envserve.session.policy import Health
from envserve.session.requests import Patience
from envserve.session.server import ServerSession
from envserve.session.states import ClientState

__all__ = [
    "ClientSession",
    "ClientState",
    "Decision",
    "EndPool",
    "Health",
    "Patience",
    "Reply",
    "RunCall",
    "RunReset",
    "RunStep",
    "ServerSession",
    "SessionId",
    "StartPool",
    "attach_of",
]
