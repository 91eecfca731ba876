"""Blocks that are one `gymnasium.vector.VectorEnv` each, stepped by one call.

An env's `vector_entry_point` makes it. What is checked of single envs is checked here
of a whole block, and a fault ends the episodes of all its rows: it is built anew.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array

from envserve.crashes.action_ring import ActionRing
from envserve.envs.registry import spec_of
from envserve.envs.seeding import env_seed
from envserve.errors import EnvStartError, UnknownEnv
from envserve.lane import Fault
from envserve.slab import Rows, Status, next_beat
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.infos import snapshot
from envserve.spaces.leaves import unflatten
from envserve.worker import step_timings
from envserve.worker.attribute_calls import CallTask, answer_call_of_all
from envserve.worker.channel import BuildMessage
from envserve.worker.env_checks import (
    EnvChecks,
    SpaceViolation,
    label_of,
    leaf_array,
    leaf_values,
)
from envserve.worker.rendering import render
from envserve.worker.worker_report import encode_report, fault_of

__all__ = ["VectorBlock"]

Array = np.ndarray[Any, Any]
_Infos = Mapping[str, Any]
_Seeds = Sequence[int | None]

_COLUMNS: Final = ("reward", "terminated", "truncated")
_NO_INFOS: Final[_Infos] = {}
#: What is said of a fault in all rows but the first.
_MAX_BRIEF: Final = 96
#: Where a SAME_STEP env tells of the episodes that have ended.
_FINAL: Final = frozenset({"final_obs", "final_info", "_final_obs", "_final_info"})


class VectorBlock:
    """The rows of a block, and the vector env that steps all of them in one call.

    Attributes:
      rows: Rows of the pool.
    """

    def __init__(self, config: BuildMessage, rows: range, checks: EnvChecks) -> None:
        """Store the arguments; `build` makes the vector env."""
        self.rows = rows
        self._config = config
        self._checks = checks
        self._report = partial(encode_report, len(rows), config.max_infos_kib)
        self._all = np.ones(len(rows), np.bool_)
        self._incarnation = config.incarnations[rows.start]
        self._beat = 0

    @property
    def _seeds(self) -> list[int | None]:
        root, first = self._config.seed, self._config.first_env_index
        return [env_seed(root, first + n, self._incarnation) for n in self.rows]

    def build(self) -> Iterator[tuple[int, EnvSpec]]:
        """Make the vector env; yield the index and the spaces of its first env."""
        yield self._config.first_env_index + self.rows.start, self._make_env()

    def _make_env(self) -> EnvSpec:
        """Make the vector env; its first reset will use the incarnation's seeds."""
        name, autoreset = self._config.env_name, self._config.autoreset
        env = self._env = _make(self._config, len(self.rows))
        mode = AutoresetMode(env.metadata.get("autoreset_mode"))
        self._takes_mask = env.metadata.get("reset_mask", mode.name == "DISABLED")
        self._has_final = mode.name == "SAME_STEP"
        own = {"same_step", "disabled"} if self._takes_mask else set()
        possible = sorted(own | {mode.name.lower()})
        if autoreset not in possible:
            raise EnvStartError(
                f"expected autoreset={' or '.join(possible)}, since the vector env of "
                f"{name} resets in mode {mode.name}; got {autoreset}"
            )
        self._resets_ended = autoreset == "same_step" and not self._has_final
        seed = inspect.signature(env.reset).parameters["seed"]
        self._takes_seeds = "list" in str(seed.annotation).lower()
        self._is_fresh = True
        spaces = env.single_observation_space, env.single_action_space
        spec = self._spec = EnvSpec(name, *spaces)
        leaves = spec.observation_leaves + spec.action_leaves
        if any(leaf.is_encoded for leaf in leaves):
            raise EnvStartError(f"expected a vector env of arrays; got {spec}")
        return spec

    def attach(self, rows: Rows, heartbeat: memoryview, ring: ActionRing) -> None:
        """Sets where to write."""
        start, stop = self.rows.start, self.rows.stop
        block = self._block = rows.at(slice(start, stop))
        self._observed = [*zip(block.final_observation, block.observation, strict=True)]
        self._heartbeat = heartbeat
        self._note_step = partial(ring.note_step, rows.action, start, stop)
        self._records = [ring.row(number) for number in self.rows]

    def close(self) -> None:
        """Closes the env; what it raises then is of no use."""
        with contextlib.suppress(Exception):
            self._env.close()

    def step(self) -> bytes:
        """Steps all rows with the actions in the slab; returns the report."""
        began_at = step_timings.begin(self._heartbeat)
        self._note_step()
        self._block.status[...] = Status.OK
        faults, infos = [], {}
        try:
            infos = self._step()
        except Exception as error:
            faults = self._recover(error)
        step_timings.note_step(self._heartbeat, began_at, len(self.rows))
        return self._report(faults, infos, self._checks.take_notes())

    def _step(self) -> dict[int, _Infos]:
        rows, spec = self._block, self._spec
        actions = [array.copy() for array in rows.action]  # envs may keep them
        self._note_call(is_slow=False)
        results = self._env.step(unflatten(spec.action_space, actions))
        observation, rewards, terminated, truncated, infos = results
        self._write(rows.observation, observation)
        columns = rows.reward, rows.terminated, rows.truncated
        given = rewards, terminated, truncated
        for name, target, value in zip(_COLUMNS, columns, given, strict=True):
            array = np.asarray(value)
            if array.shape != target.shape:
                text = f"expected {name} {[*target.shape]}; got {[*array.shape]}"
                raise SpaceViolation(text)
            self._put(name, target, array)
        ended = rows.terminated | rows.truncated
        begun = _NO_INFOS
        if ended.any():
            if self._has_final:
                finals = infos["final_obs"]
                if isinstance(finals, np.ndarray) and finals.dtype.hasobject:
                    space, chosen = spec.observation_space, finals[ended]
                    batch: Any = create_empty_array(space, len(chosen))
                    finals = concatenate(space, chosen, batch)
                self._write(rows.final_observation, finals, ended)
            else:
                for final, last in self._observed:
                    final[ended] = last[ended]
            if self._resets_ended:
                infos = snapshot(infos)
                begun = self._reset(None, ended)
            else:
                self._note_resets(ended)
        return self._infos_by_row(infos, ended, begun) if infos or begun else {}

    def _infos_by_row(
        self, infos: _Infos, ended: Array, begun: _Infos
    ) -> dict[int, _Infos]:
        """Takes apart the infos that are asked for: of a step, of resets in it."""
        wanted = {"all": self._all, "episode_end": ended}.get(self._config.infos)
        finals, size = infos.get("final_info", {}), len(self.rows)
        infos = {key: infos[key] for key in infos if key not in _FINAL}
        by_row: dict[int, _Infos] = {}
        for row in [] if wanted is None else wanted.nonzero()[0].tolist():
            info, reset_info = _info_of(infos, row, size), _info_of(begun, row, size)
            if self._has_final and ended[row]:
                info, reset_info = _info_of(finals, row, size), info
            if ended[row] and (reset_info or "reset_info" in info):
                info["reset_info"] = reset_info
            if info:
                by_row[self.rows[row]] = info
        return by_row

    def reset(self, payload: bytes) -> bytes:
        """Resets some rows, or all; returns the report."""
        request = codec.decode(payload) if payload else {}
        numbers = request.get("rows") or [*self.rows]
        given, options = request.get("seeds"), request.get("options", b"")
        known = dict(zip(numbers, given or [None] * len(numbers), strict=True))
        seeds = [known.get(n) for n in self.rows] if given else None
        mask = np.isin(self.rows, numbers)
        rows, faults, infos = self._block, [], _NO_INFOS
        try:
            infos = self._reset(seeds, mask, options)
        except Exception as error:
            if mask.all() and not given and not options:
                raise  # it cannot be reset at all
            faults, mask = self._recover(error), self._all
        rows.reward[mask] = 0.0
        rows.terminated[mask] = rows.truncated[mask] = False
        rows.status[mask] = Status.OK
        start, size = self.rows.start, len(self.rows)
        reported = numbers if infos and self._config.infos == "all" else ()
        each = ((row, _info_of(infos, row - start, size)) for row in reported)
        by_row = {row: info for row, info in each if info}
        return self._report(faults, by_row, self._checks.take_notes())

    def _reset(self, seeds: _Seeds | None, mask: Array, options: bytes = b"") -> _Infos:
        """Resets some rows and writes their first observations; returns the infos.

        Args:
          seeds: A seed or None for each row of the block.
          mask: Which rows. An env that is new is reset as a whole.
          options: See `lane.Reset`.
        """
        if self._is_fresh:
            if self._config.seeded:
                triples = zip(mask, seeds or self._seeds, self._seeds, strict=True)
                seeds = [given if chosen else own for chosen, given, own in triples]
            mask = self._all
        is_whole = bool(mask.all())
        if not is_whole and not self._takes_mask:
            raise EnvStartError(
                f"expected a reset of a whole block of {len(mask)} rows, since their "
                f"vector env takes no reset_mask; got one of {mask.sum()}"
            )
        self._is_fresh = False
        self._note_call(is_slow=True)
        self._note_resets(mask, seeds, options)
        seed: Any = seeds
        if seeds is not None and not self._takes_seeds:
            seed = next((seed for seed in seeds if seed is not None), None)
        own_options = codec.decode(options) if options else {}
        if not is_whole:
            own_options["reset_mask"] = mask
        began_at = step_timings.begin()
        result = self._env.reset(seed=seed, options=own_options or None)
        step_timings.note_resets(self._heartbeat, began_at, int(mask.sum()))
        self._write(self._block.observation, result[0], mask)
        self._heartbeat[1] = 0
        infos: _Infos = result[1]
        return infos

    def _note_resets(
        self, mask: Array, seeds: _Seeds | None = None, options: bytes = b""
    ) -> None:
        is_auto = seeds is None and not options
        for row in mask.nonzero()[0].tolist():
            record, incarnation = self._records[row], self._incarnation
            if not (is_auto and record.begin_as_before()):
                seed = None if seeds is None else seeds[row]
                given = incarnation, seed, None, options
                record.begin(None, *given, is_autoreset=is_auto)

    def _note_call(self, *, is_slow: bool) -> None:
        self._beat = self._heartbeat[0] = next_beat(self._beat, self.rows.start)
        self._heartbeat[1] = int(is_slow)

    def _recover(self, error: Exception) -> list[Fault]:
        """Replace the vector env that failed; see `EnvBlock`."""
        first = fault_of(self.rows.start, error)
        brief = first.text.strip().rpartition("\n")[2][:_MAX_BRIEF]
        others = (first._replace(env_index=n, text=brief) for n in self.rows[1:])
        for final, last in self._observed:
            final[...] = 0 if isinstance(error, SpaceViolation) else last
        self._block.status[...] = Status.PENDING
        for record in self._records:
            record.keep_failed()
        self._note_call(is_slow=True)
        self.close()
        self._incarnation += 1
        self._make_env()
        self._reset(None, self._all)
        return [first, *others]

    def render(self, row: int) -> Any:
        """Returns what one of the envs shows; all of them draw."""
        return render(self._env)[row - self.rows.start]

    def call(self, payload: bytes) -> bytes:
        """Uses an attribute of the env's; of a tuple, a row gets its own."""
        task = CallTask.read(payload)
        self._note_call(is_slow=True)
        for record in self._records if task.changes_env else ():
            record.touch()
        answer = answer_call_of_all(task, self._env, self.rows)
        self._heartbeat[1] = 0
        return answer

    def _write(
        self, target: Sequence[Array], observation: Any, mask: Array | None = None
    ) -> None:
        """Writes observations, which are of all rows or of those that are chosen."""
        values = leaf_values(self._spec.observation_space, observation)
        env_class = type(self._env)
        for leaf, array, value in zip(
            self._spec.observation_leaves, target, values, strict=True
        ):
            if mask is not None and len(value) == len(self.rows):
                value = np.asarray(value)[mask]
            count = len(self.rows) if mask is None else int(mask.sum())
            leaf_of_all = replace(leaf, shape=(count, *leaf.shape))
            checked = leaf_array(leaf_of_all, value, self._checks, env_class)
            self._put(label_of(leaf), array, checked, mask)

    def _put(
        self, label: str, target: Array, array: Array, mask: Array | None = None
    ) -> None:
        if array.dtype.kind == "f":
            with np.errstate(all="ignore"):  # a sum that is finite has finite terms
                total = array.sum()
            if not np.isfinite(total):
                self._checks.check_finite(f"{label} to be finite", array)
        target[... if mask is None else mask] = array


def _make(config: BuildMessage, num_envs: int) -> Any:
    for setting in ("wrappers", "spare_envs"):
        if getattr(config, setting):
            raise EnvStartError(f"expected no {setting} with a vector env; got some")
    name = config.env_name
    known = spec_of(name)
    if known.vector_entry_point is None:
        raise UnknownEnv(f"no env named {name!r} has a vector_entry_point")
    mode, kwargs = "vector_entry_point", config.env_kwargs
    return gymnasium.make_vec(known, num_envs, vectorization_mode=mode, **kwargs)


def _info_of(infos: _Infos, row: int, size: int) -> dict[str, Any]:
    """Returns what a dict of arrays, with their masks, says of one of so many envs."""
    info: dict[str, Any] = {}
    for key, value in infos.items():
        mask = infos.get(f"_{key}")
        is_mask = key.startswith("_") and key[1:] in infos
        if is_mask or not (mask is None or mask[row]):
            continue
        if isinstance(value, Mapping):
            value = _info_of(value, row, size)
        elif isinstance(value, np.ndarray | list | tuple) and len(value) == size:
            value = value[row]
        info[key] = value  # what has no rows is of all of them
    return info
