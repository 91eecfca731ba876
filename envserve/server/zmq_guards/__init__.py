"""Bounds, closes and authenticates connections, which libzmq alone cannot do."""
