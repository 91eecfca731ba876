"""CURVE key pairs. The secret key does not appear in reprs, pickles or copies."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import NoReturn, Self

from envserve.errors import KeyFileError


@dataclass(frozen=True)
class KeyPair:
    """A public and a secret key, of 32 raw bytes each."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> Self:
        """Return a new key pair. Any 32 bytes are a valid secret key of Curve25519."""
        return cls.from_secret(os.urandom(32))

    @classmethod
    def from_secret(cls, secret: bytes) -> Self:
        """Return the key pair that belongs to a secret key.

        Raises:
          KeyFileError: The installed ZeroMQ does not support CURVE.
        """
        # Imported lazily, so that commands that do not use keys start faster.
        import zmq
        from zmq.utils import z85

        try:
            return cls(z85.decode(zmq.curve_public(z85.encode(secret))), secret)
        except zmq.ZMQError as error:
            raise KeyFileError(
                f"the installed ZeroMQ does not support CURVE, so keys cannot be used: "
                f"{error.strerror}; install pyzmq from a wheel"
            ) from None

    def __reduce__(self) -> NoReturn:
        """Reject pickling and copying, so that the secret stays where it was read."""
        raise TypeError("a key pair cannot be pickled; read it where it is needed")


#: Keys of a client's connection: the server's public key, and the client's key pair.
CurveKeys = tuple[bytes, KeyPair]
