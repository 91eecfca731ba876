"""The wire format: messages, their bodies, rows and reports, as bytes.

Everything from a peer is checked against limits before it is decoded; a violation
raises RemoteProtocolError. `handshake`, `message` and `status` do not import NumPy, so
that a health probe starts fast.
"""
