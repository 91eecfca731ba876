"""Whether a server, of any make, keeps to docs/protocol.md: for `envserve check`."""
