"""The server half of a session."""
