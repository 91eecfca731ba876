"""The algorithms: each creates an agent, and trains it on rollouts.

`algorithm` defines the base class, and `load` loads the class that a config names.
"""
