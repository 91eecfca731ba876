"""Faults made on purpose: a network that fails, between a client and a server."""
