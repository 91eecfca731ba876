"""What an agent thinks with: perceptrons, convolutions, memories, models of one's own.

`choice` makes those that a config asks for.
"""

__all__: list[str] = []
