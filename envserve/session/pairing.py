"""Pairs answers with the requests that they answer; nothing else passes for one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from envserve.session.attachment import Attachment
from envserve.session.requests import Pending, Requests
from envserve.session.sender import Sender
from envserve.session.translation import exception_of
from envserve.wire import ErrorBody, Executed, Message, MessageType, Pong, Report

__all__ = ["Pairing"]

_ANSWERS: Final[Mapping[MessageType | int, MessageType]] = {
    MessageType.STEP: MessageType.RESULT,
    MessageType.RESET: MessageType.RESULT,
    MessageType.CALL: MessageType.CALL_RESULT,
}


class Pairing:
    """Hands answers on to what was asked."""

    def __init__(self, attachment: Attachment, sender: Sender) -> None:
        """Takes the envs, and what is in flight."""
        self._attachment = attachment
        self._sender = sender
        self._requests: Requests = sender.requests

    def take_result(self, message: Message) -> bool:
        """Takes a RESULT or CALL_RESULT; tells whether anything waits for it.

        Raises:
          RemoteProtocolError: It is not what the operation can have for a result.
        """
        operations, away = self._attachment.operations, self._attachment.away
        pending = self._requests.get(message.request)
        if operations is None or pending is None:
            return False
        if not self._is_answer(message, pending):
            return False
        if away and pending.asked is not None:
            away.take(pending, message)
        else:
            operations.finish(pending, message)
            if away:
                away.note_ended(pending, has_failed=_has_errors(message))
        self._requests.remove(pending.id)
        return True

    def _is_answer(self, message: Message, pending: Pending) -> bool:
        return (
            message.type is _ANSWERS.get(pending.type)
            and message.entries == pending.entries
            and message.epoch == self._sender.epoch
        )

    def fail(self, pending: Pending, body: ErrorBody) -> None:
        """Takes an ERROR instead."""
        operations, away = self._attachment.operations, self._attachment.away
        if away and pending.asked is not None:
            error = exception_of(body, self._attachment.address)
            away.fail(pending, error, uses_seq=body.executed is not Executed.NO)
        elif operations is not None:
            operations.fail(pending, body)
            if away:
                away.note_ended(pending, has_failed=True)
        self._requests.remove(pending.id)

    def note_running(self, message: Message, now: float) -> None:
        """Takes a PONG: what the server works at need not be sent again soon."""
        running = Pong.decode(message.body).running
        for pending in self._requests:
            if any(block in running for block, _ in pending.entries):
                self._requests.postpone(pending, now)

    def settle(self) -> bool:
        """Mends what an interrupted call has left; see `ClientSession.settle`."""
        operations, away = self._attachment.operations, self._attachment.away
        if operations is None or away is None:
            return False
        for pending in [p for p in self._requests if p.entries]:
            if operations.has_ended(pending):  # else it is sent again for ever
                self._requests.remove(pending.id)
        if operations.busy:
            operations.settle(self._requests, set(away.waiting()))
        return bool(operations.busy) or operations.has_finished


def _has_errors(message: Message) -> bool:
    return bool(message.report) and bool(Report.decode(message.report).errors)
