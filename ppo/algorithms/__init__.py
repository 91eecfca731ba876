"""The algorithms: each creates an agent, and trains it on rollouts.

`algorithm` defines the base class, and `load` finds the class that a config names.
"""
