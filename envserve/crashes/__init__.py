"""What an env went through: kept in shared memory, and as a file when it fails."""

__all__: list[str] = []
