"""Videos of what an agent does."""

__all__: list[str] = []
