"""The protocol between client and server, without I/O; `states` explains it.

Methods take messages and the current time, and return messages and decisions.
"""
