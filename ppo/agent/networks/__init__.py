"""What an agent thinks with: perceptrons, convolutions, memories, custom models.

`build` makes those that a config asks for.
"""
