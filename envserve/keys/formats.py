"""Keys as text: a prefix that identifies the kind of key, then base64url.

Keys need no quoting in a shell. Because of the prefix, a secret that is in the wrong
place is recognised, and error messages do not repeat it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
from typing import Final

from envserve.errors import CodecError

PUBLIC: Final = "envserve-public-1."
SECRET: Final = "envserve-secret-1."
INVITATION: Final = "envserve-invite-1."


def encode(prefix: str, raw: bytes) -> str:
    """Return a prefix, followed by bytes as base64url without padding."""
    return prefix + base64.urlsafe_b64encode(raw).decode().rstrip("=")


def decode(prefix: str, text: str, num_bytes: int = 32) -> bytes:
    """Decode the output of `encode`, which must contain `num_bytes` bytes.

    Raises:
      CodecError: The text is not valid. The message does not repeat it, because it may
        be a secret.
    """
    raw = b""
    with contextlib.suppress(ValueError):  # invalid text is rejected below
        raw = base64.urlsafe_b64decode(text.removeprefix(prefix) + "==")
    if len(raw) == num_bytes and encode(prefix, raw) == text:
        return raw
    known = [p for p in (PUBLIC, SECRET, INVITATION) if text.startswith(p)]
    raise CodecError(
        f"expected {prefix} and {len(encode('', bytes(num_bytes)))} characters of "
        f"base64url; got {len(text)} characters that begin with "
        f"{known[0] if known else 'another prefix'}"
    )


def fingerprint(public: bytes) -> str:
    """Return the 80-bit fingerprint of a public key, for people to compare.

    It consists of four groups of letters and digits: "7QK2-M4XZ-...".
    """
    text = base64.b32encode(hashlib.sha256(public).digest()[:10]).decode()
    return "-".join(text[i : i + 4] for i in range(0, len(text), 4))
