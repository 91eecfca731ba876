"""What a step of a batch gives, and how it is copied out of the lanes' rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from envserve.slab import Rows, Status
from envserve.spec import EnvSpec, flatten, unflatten

__all__ = ["StepResult", "gather_result", "write_result"]

Array = np.ndarray[Any, Any]


class StepResult(NamedTuple):
    """What a step of all envs gave. Observations are nested as their space.

    Attributes:
      observation: `[num_envs, ...]`, in the dtypes of the observation space. Where an
        episode ended, the first observation of the next one.
      reward: float64 `[num_envs]`.
      terminated: bool `[num_envs]`; the episode reached an end of its own.
      truncated: bool `[num_envs]`; the episode was cut off.
      valid: bool `[num_envs]`; False for a transition that was made up because the
        env, its worker or its server failed. Such a row is also `truncated`.
      final_observation: `[num_envs, ...]`; the last observation of an episode that
        ended in this step, zero (with `out`: untouched) in all other rows.
      infos: Info dict by env index, as far as there are any: by default those of
        steps that end an episode. Faults stand under the key "fault".
    """

    observation: Any
    reward: Array
    terminated: Array
    truncated: Array
    valid: Array
    final_observation: Any
    infos: Mapping[int, Mapping[str, Any]]


def gather_result(spec: EnvSpec, lanes: Sequence[Rows]) -> StepResult:
    """Returns the rows of all lanes in new arrays, which are the caller's to keep."""
    space = spec.observation_space
    terminated = np.concatenate([rows.terminated for rows in lanes])
    truncated = np.concatenate([rows.truncated for rows in lanes])
    observation = [
        np.concatenate(leaves)
        for leaves in zip(*(rows.observation for rows in lanes), strict=True)
    ]
    final_observation = [np.zeros_like(leaf) for leaf in observation]
    if (terminated | truncated).any():
        start = 0
        for rows in lanes:
            _copy_final(rows, start, final_observation)
            start += len(rows.reward)
    return StepResult(
        observation=unflatten(space, observation),
        reward=np.concatenate([rows.reward for rows in lanes]),
        terminated=terminated,
        truncated=truncated,
        valid=np.concatenate([rows.status for rows in lanes]) == Status.OK,
        final_observation=unflatten(space, final_observation),
        infos={},
    )


def write_result(spec: EnvSpec, lanes: Sequence[Rows], out: StepResult) -> None:
    """Copies the rows of all lanes into arrays that there are."""
    space = spec.observation_space
    observation = flatten(space, out.observation)
    final_observation = flatten(space, out.final_observation)
    start = 0
    for rows in lanes:
        part = slice(start, start + len(rows.reward))
        for target, source in zip(observation, rows.observation, strict=True):
            target[part] = source
        out.reward[part] = rows.reward
        out.terminated[part] = rows.terminated
        out.truncated[part] = rows.truncated
        np.equal(rows.status, Status.OK, out=out.valid[part])
        _copy_final(rows, start, final_observation)
        start = part.stop


def _copy_final(rows: Rows, start: int, targets: Sequence[Array]) -> None:
    """Copies the final observations of rows whose episode has ended."""
    (ended,) = (rows.terminated | rows.truncated).nonzero()
    if ended.size:
        for target, source in zip(targets, rows.final_observation, strict=True):
            target[start + ended] = source[ended]
