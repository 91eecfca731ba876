"""Losses, advantages and minibatches, for use by algorithms.

`returns` computes advantages and value targets, `losses` computes losses and means over
valid rows, and `samples` arranges a rollout as minibatches.
"""
