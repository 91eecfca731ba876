"""Action spaces, action masks and action distributions."""

__all__: list[str] = []
