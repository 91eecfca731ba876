"""The wire: messages, their bodies, rows and reports, as bytes. No I/O, no clock.

All that comes from a peer is checked against limits before it is decoded; whatever is
wrong with it raises RemoteProtocolError, and nothing else. NumPy is not for everybody
who greets a server: `greetings`, `message` and `status` do without.
"""

__all__: list[str] = []
