"""Writes the audit log: a JSON line for each lease, rejection, new key and revoked key.

If a user is rejected repeatedly within a second, the log gets two lines: the first
rejection, and the last one with a count. A write error is logged and has no other
effect.
"""

from __future__ import annotations

import asyncio
import datetime
import errno
import json
import logging
import os
import stat
from collections.abc import Callable
from typing import Any, Final

from envserve.errors import ServerError
from envserve.session.server.decisions import Audit

_LOGGER: Final = logging.getLogger(__name__)
#: Events that are counted, instead of logged one by one, if a user causes them again
#: within `_REPEAT_SECONDS`.
_REPEATING_EVENTS: Final = frozenset({"refused", "over quota"})
_REPEAT_SECONDS: Final = 1.0
_MAX_TEXT_CHARS: Final = 300


class AuditLog:
    """Appends events to a file."""

    def __init__(
        self,
        path: str,
        describe: Callable[[str], tuple[str, str]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Open or create the file, and make it accessible to this user only.

        Args:
          path: Path of the file.
          describe: Returns a user's key fingerprint and address, each "" if unknown.
          loop: Event loop whose timer writes the counts of repeated rejections.

        Raises:
          ServerError: The file cannot be opened.
        """
        self._describe = describe
        self._loop = loop
        self._flush_timer: asyncio.TimerHandle | None = None
        # By event and user: the latest repetition, not written yet; None if the event
        # has not been repeated.
        self._repeated: dict[tuple[str, str], dict[str, Any] | None] = {}
        self._descriptions: dict[str, tuple[str, str]] = {}
        self._has_failed = False
        self._unwritten = b""  # the rest of a line that was written only in part
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        flags |= os.O_NONBLOCK  # do not wait for the reader of a pipe
        try:
            self._file = os.open(path, flags, 0o600)
            # Reject devices such as /dev/null, because chmod would affect other users.
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                os.close(self._file)
                raise OSError(errno.EINVAL, "it is not a regular file")
            os.fchmod(self._file, 0o600)
        except OSError as error:
            raise ServerError(
                f"--audit: cannot write {path}: {error.strerror}; choose a file that "
                f"you own, in an existing directory"
            ) from None

    def close(self) -> None:
        """Write the pending counts, and close the file."""
        self._write_repeated()
        os.close(self._file)

    def write(self, event: Audit) -> None:
        """Append an event, or only count it if it is repeated within a second."""
        user = event.user
        described = self._describe(user) if user else ("", "")
        fingerprint, address = described
        if fingerprint:
            self._descriptions[user] = described
        else:  # a revoked key has only an old description
            fingerprint, address = self._descriptions.get(user, described)
        time = datetime.datetime.now(datetime.UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds"),
            "event": event.event,
            "name": user,
            "fingerprint": event.fingerprint or fingerprint,
            "address": event.address or address,
            "env": event.env_name[:_MAX_TEXT_CHARS],
            "count": event.num_envs,
            "reason": event.reason[:_MAX_TEXT_CHARS],
            "times": 1,
        }
        key = event.event, user
        if event.event not in _REPEATING_EVENTS:
            self._write(line)
        elif key not in self._repeated:
            self._repeated[key] = None
            self._write(line)
            if self._flush_timer is None:
                delay = _REPEAT_SECONDS
                self._flush_timer = self._loop.call_later(delay, self._write_repeated)
        else:
            previous = self._repeated[key]
            line["times"] = 1 if previous is None else previous["times"] + 1
            self._repeated[key] = line

    def _write_repeated(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self._flush_timer = None
        lines, self._repeated = self._repeated, {}
        for line in filter(None, lines.values()):
            self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        # `json` escapes control characters, which could otherwise affect a terminal.
        data = self._unwritten + json.dumps(line).encode() + b"\n"
        try:
            # If the disk is almost full, only a part is written.
            self._unwritten = data[os.write(self._file, data) :]
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                _LOGGER.error("cannot write the audit log: %s", error)
            self._has_failed = True
