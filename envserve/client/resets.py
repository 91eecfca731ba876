"""How a batch's envs are reset: at once, or started now and waited for later."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final

import numpy as np

from envserve.client.lane_group import LaneGroup
from envserve.client.row_set import check_rows
from envserve.envs.seeding import MAX_ROOT_SEED
from envserve.errors import EnvserveError, EnvTimeout, LocalProtocolError
from envserve.lane import Lane
from envserve.slab import Status
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.leaves import unflatten
from envserve.spaces.variable_length import decode_observation
from envserve.wire.bodies import pack_options

__all__ = ["Resets"]

Array = np.ndarray[Any, Any]

_OK: Final = int(Status.OK)


class Resets:
    """What `BatchEnv` has for them.

    Attributes:
      num_envs: Number of rows.
      reset_infos: Info dict by row of the last reset, with `infos="all"`.
    """

    num_envs: int
    lanes: tuple[Lane, ...]
    spec: EnvSpec
    reset_infos: Mapping[int, Mapping[str, Any]]
    _group: LaneGroup
    _ended: Array
    _has_reset: bool
    #: Rows and blocks of a reset that was started; and whether all are reset then.
    _resetting: tuple[Array, Set[int], bool] | None

    _begin: Callable[[], None]

    def reset(
        self,
        env_indices: Sequence[int] | Array | None = None,
        seeds: Sequence[int | None] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Resets envs and returns their first observations.

        Args:
          env_indices: Rows to reset; None for all.
          seeds: A seed per row, or None, which that env gets then. By default an env's
            first reset uses the seed that follows from the root seed, if the envs are
            `seeded`, and later ones go on with its random numbers.
          options: Plain values for each of these envs, at most 16 KiB in all.

        Returns:
          Observations `[len(env_indices), ...]`, in the order of `env_indices`.

        Raises:
          CodecError: The options are not plain, or too many; nothing was reset.
          EnvError: An env has not taken its seed or the options; it was reset without
            them. All envs have to be reset before the next step.
          ServerError: A server was lost.
        """
        self.send_reset(env_indices, seeds, options=options)
        try:
            return self.recv_reset()
        finally:
            self.give_up_reset()

    def give_up_reset(self) -> None:
        """Has nobody wait for what `send_reset` has started, such as after Ctrl-C."""
        self._resetting = None

    def send_reset(
        self,
        env_indices: Sequence[int] | Array | None = None,
        seeds: Sequence[int | None] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts what `reset` does; until `recv_reset` nothing else can be asked for.

        Raises:
          CodecError: As for `reset`.
          ValueError: A seed is no int in [0, 2**63).
        """
        encoded = pack_options(options)
        indices = check_rows(env_indices, self.num_envs)
        if seeds is not None and len(seeds) != len(indices):
            raise ValueError(f"expected {len(indices)} seeds; got {len(seeds)}")
        for seed in () if seeds is None else seeds:
            is_int = isinstance(seed, int | np.integer)
            if seed is not None and not (is_int and 0 <= seed <= MAX_ROOT_SEED):
                raise ValueError(f"seed: expected an int in [0, 2**63); got {seed!r}")
        self._begin()
        has_reset, self._has_reset = self._has_reset, False  # if it is cut short
        try:
            positions = self._group.start_reset(indices, seeds, encoded)
        except LocalProtocolError:  # it was refused, and nothing was changed
            self._has_reset = has_reset
            raise
        self._resetting = indices, positions, has_reset or env_indices is None

    def recv_reset(self, timeout: float | None = None) -> Any:
        """Waits for what `send_reset` has started, and returns what `reset` does.

        Args:
          timeout: Seconds to wait; by default as long as it takes.

        Raises:
          EnvTimeout: It takes longer; the next call gets it.
          EnvError: As for `reset`.
          LocalProtocolError: Nothing was started.
          ServerError: A server was lost.
        """
        if self._resetting is None:
            raise LocalProtocolError("expected send_reset() before recv_reset()")
        indices, positions, has_reset = self._resetting
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        try:
            self.reset_infos = self._group.finish_reset(positions, deadline)
        except EnvserveError as error:
            if not isinstance(error, EnvTimeout):
                self._resetting = None
            raise
        self._resetting = None
        self._has_reset = has_reset
        self._ended[indices] = False
        return self.last_observation(indices)

    def last_observation(self, env_indices: Array | None = None) -> Any:
        """Returns what rows showed last, `[len(env_indices), ...]`; None for all."""
        indices = np.arange(self.num_envs) if env_indices is None else env_indices
        every = [lane.rows for lane in self.lanes]
        ended = self._group.inbox.outcomes.keys()
        is_shown = self._group.absence.shown_rows(self.num_envs, ended)
        leaves = _joined([rows.observation for rows in every])
        if not is_shown.all():
            finals = _joined([rows.final_observation for rows in every])
            for leaf, final in zip(leaves, finals, strict=True):
                leaf[~is_shown] = final[~is_shown]
        observation = unflatten(
            self.spec.observation_space, [leaf[indices] for leaf in leaves]
        )
        is_whole = is_shown & (np.concatenate([rows.status for rows in every]) == _OK)
        return decode_observation(
            self.spec, indices, observation, is_whole=is_whole[indices]
        )


def _joined(parts: Sequence[Sequence[Array]]) -> list[Array]:
    return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
