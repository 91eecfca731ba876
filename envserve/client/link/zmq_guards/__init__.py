"""Workarounds for limits of libzmq: host lookup, message sizes, causes of errors."""
