"""Losses, advantages and minibatches, which algorithms share.

`returns` computes advantages and value targets, `losses` has losses and means over
valid rows, and `samples` arranges a rollout as minibatches.
"""
