"""Invitations: a key for one JOIN and the server's public key, in one line.

envserve-invite-1.<server's public key, secret>.trainer-1@sim1:5555,10.0.0.7:5555
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Self

from envserve.address import is_local_address
from envserve.errors import CodecError
from envserve.keys import formats

_LINE: Final = re.compile(
    r"(?P<keys>envserve-invite-1\.[\w-]*)\.(?P<name>[\w.-]+)@(?P<hosts>[\w.:,\[\]%-]+)",
    re.ASCII,
)


@dataclass(frozen=True)
class Invitation:
    """An invitation, as `envserve invite` prints it and `envserve join` reads it."""

    server_public: bytes
    """Raw public key of the server."""
    secret: bytes = field(repr=False)
    """Raw secret key of the invitation."""
    name: str
    """Name of the invited client."""
    addresses: tuple[str, ...]
    """tcp:// addresses of the server."""

    @property
    def line(self) -> str:
        """The invitation as one line of text; keep it secret."""
        keys = formats.encode(formats.INVITATION, self.server_public + self.secret)
        hosts = ",".join(address.removeprefix("tcp://") for address in self.addresses)
        return f"{keys}.{self.name}@{hosts}"

    @classmethod
    def parse(cls, line: str) -> Self:
        """Parse a line.

        Raises:
          CodecError: The line is not valid. The message does not repeat it, because it
            may be a secret.
        """
        line = line.strip()
        match = _LINE.fullmatch(line)
        if match is None:
            found_text = f"{len(line)} other characters" if line else "an empty line"
            if line.startswith(formats.INVITATION):
                found_text = f"a line of {len(line)} characters, which is incomplete"
            raise CodecError(
                f"expected the line that envserve invite printed, which starts with "
                f"{formats.INVITATION}; got {found_text}"
            )
        raw = formats.decode(formats.INVITATION, match["keys"], 64)
        addresses = tuple(f"tcp://{host}" for host in match["hosts"].split(","))
        for address in addresses:
            try:
                is_local_address(address)
            except ValueError as error:
                raise CodecError(str(error)) from None
        return cls(raw[:32], raw[32:], match["name"], addresses)
