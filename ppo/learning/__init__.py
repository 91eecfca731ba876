"""From a rollout to a better policy.

`samples` says how an agent looks at a rollout, `returns` has advantages and value
targets, `losses` the objective, `schedules` what changes from one iteration to the
next; `update` puts them together.
"""
