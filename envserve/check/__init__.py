"""`envserve check`: test whether a server, in any language, follows the protocol."""
