"""Limits, closes and authenticates connections where libzmq alone cannot."""
