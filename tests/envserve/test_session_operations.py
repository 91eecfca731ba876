"""A client's operations on blocks, and what interrupts leave of them."""

from __future__ import annotations

import numpy as np
from gymnasium.spaces import Box, Discrete

from envserve.lane import Block
from envserve.session.operations import Operations
from envserve.session.requests import Outbox, Requests
from envserve.spec import EnvSpec
from envserve.wire import Message, MessageType


def test_an_answered_request_does_not_stand_for_a_later_submission() -> None:
    """As two interrupts leave it: one after an answer, one before the next request."""
    spec = EnvSpec("Any-v0", Box(-1.0, 1.0, (2,), np.float32), Discrete(3))
    operations = Operations("a server", spec, (Block(0, 0, 1, 0, 0),))
    requests = Requests(Outbox())
    draft = operations.step([0], 1)
    message = Message(type=draft.type, request=1, entries=draft.entries)
    requests.add(message, draft, 0.0)
    pending = requests.get(1)
    assert pending is not None
    assert not operations.has_ended(pending)
    operations.finish(
        pending,
        Message(type=MessageType.RESULT, entries=draft.entries, body=bytes(8 + 3 + 8)),
    )
    assert operations.has_ended(pending)
    operations.step([0], 2)
    operations.settle(requests)
    assert operations.busy == {}


def test_a_request_whose_end_was_cut_short_has_ended() -> None:
    spec = EnvSpec("Any-v0", Box(-1.0, 1.0, (2,), np.float32), Discrete(3))
    blocks = (Block(0, 0, 1, 0, 0), Block(1, 1, 2, 0, 0))
    operations = Operations("a server", spec, blocks)
    requests = Requests(Outbox())
    draft = operations.step([0, 1], 1)
    message = Message(type=draft.type, request=1, entries=draft.entries)
    requests.add(message, draft, 0.0)
    pending = requests.get(1)
    assert pending is not None
    del operations.busy[0]  # as far as the interrupt let it come
    assert operations.has_ended(pending)
    requests.remove(pending.id)
    operations.settle(requests)
    assert operations.busy == {}
