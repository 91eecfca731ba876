"""What a policy does: kinds of action spaces, their distributions, masks."""

__all__: list[str] = []
