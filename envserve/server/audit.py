"""An audit: a line of JSON for whatever users were given, denied, or lost.

What one user is refused again within a second is one more line, with how often. A file
that cannot be written is said in the log, and costs nobody anything else.
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
from envserve.session.server.quotas import AUDIT

__all__ = ["Audit"]

_LOGGER: Final = logging.getLogger(__name__)
_OFTEN: Final = frozenset({"refused", "over quota"})
_OFTEN_SECONDS: Final = 1.0
_MAX_TEXT: Final = 300


class Audit(logging.Handler):
    """Appends to a file what `session.quotas.tell` says, until it is closed."""

    def __init__(
        self,
        path: str,
        describe: Callable[[str], tuple[str, str]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Opens the file, for this user alone; makes it if there is none.

        `describe` returns a user's fingerprint, and address.

        Raises:
          ServerError: It cannot be opened.
        """
        self._describe = describe
        self._loop = loop
        self._flush_timer: asyncio.TimerHandle | None = None
        #: What came again within a second, by event and user.
        self._again: dict[tuple[str, str], dict[str, Any] | None] = {}
        self._described: dict[str, tuple[str, str]] = {}
        self._has_failed = False
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags, 0o600)
            if not stat.S_ISREG(os.fstat(self._file).st_mode):  # never chmod a device
                os.close(self._file)
                raise OSError(errno.EINVAL, "it is no regular file")
            os.fchmod(self._file, 0o600)
        except OSError as error:
            raise ServerError(
                f"--audit {path} cannot be written: {error.strerror}; name a file of "
                f"your own, in a folder that exists"
            ) from None
        super().__init__()  # from now on it is closed when the process ends
        AUDIT.addHandler(self)
        AUDIT.setLevel(logging.DEBUG)
        AUDIT.propagate = False

    def close(self) -> None:
        """Writes what is left."""
        AUDIT.removeHandler(self)
        AUDIT.setLevel(logging.NOTSET)
        AUDIT.propagate = True
        self._write_again()
        os.close(self._file)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Takes what `session.quotas.tell` has said."""
        assert isinstance(record.args, tuple)
        event, user, env, count, reason = record.args
        fingerprint, address = described = self._describe(str(user))
        if fingerprint:
            self._described[str(user)] = described
        else:  # a key that was taken away
            fingerprint, address = self._described.get(str(user), described)
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds"),
            "event": event,
            "name": user,
            "fingerprint": fingerprint,
            "address": address,
            "env": str(env)[:_MAX_TEXT],
            "count": count,
            "reason": str(reason)[:_MAX_TEXT],
            "times": 1,
        }
        key = str(event), str(user)
        if event not in _OFTEN:
            self._write(line)
        elif key not in self._again:
            self._again[key] = None
            self._write(line)
            if self._flush_timer is None:
                wait = _OFTEN_SECONDS
                self._flush_timer = self._loop.call_later(wait, self._write_again)
        else:
            before = self._again[key]
            line["times"] = 1 if before is None else before["times"] + 1
            self._again[key] = line

    def _write_again(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self._flush_timer = None
        again, self._again = self._again, {}
        for line in filter(None, again.values()):
            self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        # JSON of ASCII only: no text of a peer's gets to a terminal as it is.
        data = json.dumps(line).encode() + b"\n"
        try:
            os.write(self._file, data)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                _LOGGER.error("the audit cannot be written: %s", error)
            self._has_failed = True
