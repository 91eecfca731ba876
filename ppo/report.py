"""When something that happens every so many steps is due."""

__all__ = ["is_due"]


def is_due(every: int, before: int, after: int) -> bool:
    """Whether a multiple of `every` steps was reached on the way; never if it is 0."""
    return every > 0 and before // every < after // every
