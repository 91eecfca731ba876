"""Keys as text: a prefix that says what it is, and base64url, which no shell eats.

A secret that stands in the wrong place is told by its prefix, and never repeated.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
from typing import Final

from envserve.errors import CodecError

__all__ = ["INVITATION", "PUBLIC", "SECRET", "decode", "encode", "fingerprint"]

PUBLIC: Final = "envserve-public-1."
SECRET: Final = "envserve-secret-1."
INVITATION: Final = "envserve-invite-1."


def encode(prefix: str, raw: bytes) -> str:
    """Returns bytes as text behind a prefix."""
    return prefix + base64.urlsafe_b64encode(raw).decode().rstrip("=")


def decode(prefix: str, text: str, num_bytes: int = 32) -> bytes:
    """Reads what `encode` wrote; raises CodecError, which repeats nothing of it."""
    raw = b""
    with contextlib.suppress(ValueError):  # its letters are compared below
        raw = base64.urlsafe_b64decode(text.removeprefix(prefix) + "==")
    if len(raw) == num_bytes and encode(prefix, raw) == text:
        return raw
    known = [p for p in (PUBLIC, SECRET, INVITATION) if text.startswith(p)]
    raise CodecError(
        f"expected {prefix} and {len(encode('', bytes(num_bytes)))} characters of "
        f"base64url; got {len(text)} characters that begin with "
        f"{known[0] if known else 'something else'}"
    )


def fingerprint(public: bytes) -> str:
    """Returns what people compare of a public key: "7QK2-M4XZ-...", 80 bits."""
    text = base64.b32encode(hashlib.sha256(public).digest()[:10]).decode()
    return "-".join(text[i : i + 4] for i in range(0, len(text), 4))
