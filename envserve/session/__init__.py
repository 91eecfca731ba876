"""The conversation between client and server, both halves.

No I/O and no clock: bytes and `now` go in, bytes and decisions come out.
"""
