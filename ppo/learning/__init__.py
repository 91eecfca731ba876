"""From a rollout to a better policy.

`returns` has advantages and value targets, `losses` the objective, `schedules` what
changes from one iteration to the next; `update` puts them together, and looks at a
rollout as `steps` or, with a memory, as `sequences`.
"""

__all__: list[str] = []
