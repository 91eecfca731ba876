"""A pair of CURVE keys. Its secret is in no repr and no pickle."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import NoReturn, Self

from envserve.errors import KeyFileError

__all__ = ["KeyPair", "Keys"]


@dataclass(frozen=True)
class KeyPair:
    """Raw keys, 32 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def make(cls) -> Self:
        """Makes a new pair; any 32 bytes are a secret of Curve25519."""
        return cls.of(os.urandom(32))

    @classmethod
    def of(cls, secret: bytes) -> Self:
        """Returns the pair of a secret; raises KeyFileError if ZeroMQ has no CURVE."""
        # Here, since commands that need no keys are quicker without.
        import zmq
        from zmq.utils import z85

        try:
            return cls(z85.decode(zmq.curve_public(z85.encode(secret))), secret)
        except zmq.ZMQError as error:
            raise KeyFileError(
                f"ZeroMQ has no CURVE here, so there are no keys: {error.strerror}; "
                f"install pyzmq as a wheel"
            ) from None

    def __reduce__(self) -> NoReturn:
        """Refuses to be pickled or copied: a secret stays where it was read."""
        raise TypeError("a pair of keys cannot be pickled; read it where it is needed")


#: What a client needs: the server's public key, and an own pair.
Keys = tuple[bytes, KeyPair]
