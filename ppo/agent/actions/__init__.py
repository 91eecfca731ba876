"""Action spaces, action masks and action distributions."""
