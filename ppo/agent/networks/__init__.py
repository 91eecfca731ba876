"""Networks of an agent: perceptrons, convolutions, recurrent cores, custom models.

`build` creates the networks that a config describes.
"""
