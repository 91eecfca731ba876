"""Plays an env again in a worker process: the same beginning, the same actions.

It says which action comes next before it applies it, so that whoever listens knows
how far it has come, however it ends.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from envserve import codec
from envserve.crashes.action_ring import RowRecord, restore_rng_state
from envserve.crashes.repro import Repro, decode_repro
from envserve.encoded import action_values
from envserve.errors import ReproError
from envserve.slab import Rows
from envserve.spec import EnvSpec
from envserve.worker.channel import Kind, pack_frame
from envserve.worker.env_row import EnvRow
from envserve.worker.report import fault_of
from envserve.worker.values import Rules

__all__ = ["play", "run"]


def run(channel: socket.socket, payload: bytes) -> None:
    """Plays the content of a repro file.

    Sends DONE, with its number, before each action, and before that with 0 for the
    reset. At the end READY, or FAILED with what the env has raised.
    """
    repro = decode_repro(payload)

    def on_action(number: int) -> None:
        channel.sendall(pack_frame(Kind.DONE, sequence=number))

    env = EnvRow(
        row=0,
        env_index=repro.env_index,
        incarnation=repro.played.incarnation,
        name=repro.env_name,
        kwargs=repro.env_kwargs,
        root_seed=repro.root_seed,
        is_seeded=repro.seeded,
        wrappers=repro.wrappers,
        rules=Rules(repro.nonfinite, repro.strict_spaces),
    )
    spec = env.build()
    _check_actions(repro, spec)
    channel.sendall(pack_frame(Kind.BUILT))
    try:
        play(repro, env, spec, on_action)
    except Exception as error:
        fault = fault_of(0, error)
        told = {"text": fault["text"], "is_violation": fault["violation"]}
        failure = codec.encode(told)
        channel.sendall(pack_frame(Kind.FAILED, block=1, payload=failure))
    else:
        channel.sendall(pack_frame(Kind.READY))


def play(
    repro: Repro, env: EnvRow, spec: EnvSpec, on_action: Callable[[int], None]
) -> Rows:
    """Plays an env that has just been built; returns the row that it has written.

    Args:
      repro: What to play.
      env: The env.
      spec: Its spaces.
      on_action: Called with the number of each action before it is applied, counted
        from 1, and with 0 before the reset.

    Raises:
      Exception: What the env raises, or `SpaceViolation`.
    """
    rows = Rows.allocate(spec, 1)
    heartbeat = memoryview(bytearray(16)).cast("q")  # nobody's
    env.attach(rows, heartbeat, RowRecord.private(), repro.autoreset)
    played = repro.played
    if played.generator is not None:
        if repro.seeded:  # else this would be by chance, and fail by chance
            env.reset(None, played.options)  # which makes the generator
        restore_rng_state(env.inner_env, played.generator)
    on_action(0)
    env.reset(played.seed, played.options)
    for number, action in enumerate(action_values(spec, played.actions), 1):
        on_action(number)
        reward, *_ = env.step(action)
        env.check_finite(reward)
    return rows


def _check_actions(repro: Repro, spec: EnvSpec) -> None:
    arrays = repro.played.actions
    leaves = spec.action_leaves
    if len(arrays) != len(leaves) or any(
        array.shape[1:] != leaf.shape or array.dtype != leaf.dtype
        for array, leaf in zip(arrays, leaves, strict=False)
    ):
        raise ReproError(
            f"expected actions of {repro.env_name}, which are "
            f"{', '.join(map(str, leaves))}; got {len(arrays)} arrays of "
            f"{', '.join(f'{a.dtype}{list(a.shape[1:])}' for a in arrays)}; was the "
            f"file written with another version of the env?"
        )
