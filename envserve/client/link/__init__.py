"""The link to one server: the remote lane, its session and its connection."""
