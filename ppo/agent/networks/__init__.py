"""Networks of an agent: perceptrons, convolutions, recurrent cores, custom models.

`build` creates the networks of a config.
"""
