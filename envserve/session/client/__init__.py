"""The client half of a session."""
