"""The conversation between client and server, both halves.

No I/O and no clock: bytes and `now` go in, bytes and decisions come out.
"""

from envserve.session.admission import Offer
from envserve.session.client import ClientSession, ClientState
from envserve.session.decisions import (
    Decision,
    EndPool,
    Reply,
    RunCall,
    RunReset,
    RunStep,
    StartPool,
)
from envserve.session.policy import Policy
from envserve.session.server import ServerSession

__all__ = [
    "ClientSession",
    "ClientState",
    "Decision",
    "EndPool",
    "Offer",
    "Policy",
    "Reply",
    "RunCall",
    "RunReset",
    "RunStep",
    "ServerSession",
    "StartPool",
]
