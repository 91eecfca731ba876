"""The PPO update: improve an agent with a rollout.

`samples` arranges a rollout as samples, `returns` computes advantages and value
targets, `losses` defines the objective, `schedules` adapts the coefficients between
iterations, and `update` combines them.
"""
