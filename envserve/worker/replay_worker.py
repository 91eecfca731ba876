"""Plays an env again in a worker process: the same beginning, the same actions.

It says which action comes next before it applies it, so that whoever listens knows
how far it has come, however it ends.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import numpy as np

from envserve.crashes.action_ring import RowRecord, restore_rng_state
from envserve.crashes.repro_file import Repro, decode_repro
from envserve.errors import EnvStartError, ReproError, VideoError
from envserve.settings import EnvRequest
from envserve.slab import Rows, private_heartbeat
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.variable_length import action_values
from envserve.text import one_line
from envserve.worker.channel import Kind, pack_message
from envserve.worker.env_checks import EnvChecks
from envserve.worker.env_row import EnvRow
from envserve.worker.worker_report import fault_of

__all__ = ["build", "play", "run"]


def run(channel: socket.socket, payload: bytes, num_filmed: int = 0) -> None:
    """Plays the content of a repro file.

    Sends DONE, with its number, before each action, and before that with 0 for the
    reset. At the end READY, or FAILED with what the env has raised. A PICTURE goes
    before each of the last `num_filmed` actions, and one before READY.
    """
    repro = decode_repro(payload)
    first_filmed = len(repro.played.actions[0]) - num_filmed + 1

    def on_action(number: int) -> None:
        if number and number >= first_filmed:
            channel.sendall(_picture(env))
        channel.sendall(pack_message(Kind.DONE, sequence=number))

    env, spec = build(repro)
    channel.sendall(pack_message(Kind.BUILT))
    try:
        play(repro, env, spec, on_action)
        if num_filmed:
            channel.sendall(_picture(env))
    except VideoError as error:
        raise EnvStartError(str(error)) from None
    except Exception as error:
        fault = fault_of(0, error)
        told = {"text": fault.text, "is_violation": fault.is_violation}
        failure = codec.encode(told)
        channel.sendall(pack_message(Kind.FAILED, block=1, payload=failure))
    else:
        channel.sendall(pack_message(Kind.READY))


def build(repro: Repro) -> tuple[EnvRow, EnvSpec]:
    """Builds the env of a repro file.

    Raises:
      ReproError: It cannot be played, or not with this env.
    """
    if repro.vectorized:
        raise EnvStartError(
            "its vector env stepped other rows with it, which the file does not hold"
        )
    request = EnvRequest(
        env_name=repro.env_name,
        env_kwargs=repro.env_kwargs,
        num_envs=1,
        seed=repro.root_seed,
        seeded=repro.seeded,
        first_env_index=repro.env_index,
        wrappers=repro.wrappers,
        autoreset=repro.autoreset,
    )
    checks = EnvChecks(repro.nonfinite, repro.strict_spaces)
    env = EnvRow(request, 0, repro.played.incarnation, checks)
    spec = env.build()
    _check_actions(repro, spec)
    return env, spec


def _picture(env: EnvRow) -> bytes:
    rate = getattr(env.inner_env, "metadata", {}).get("render_fps")
    if not (isinstance(rate, int | float) and 0.01 <= rate <= 1000):
        rate = 30.0
    try:
        picture = env.call("call", "render", [])
    except Exception as error:
        picture = error
    if getattr(picture, "dtype", None) == np.uint8 and picture.shape[2:] == (3,):
        return pack_message(Kind.VIDEO_FRAME, payload=codec.encode([rate, picture]))
    raise VideoError(
        f"expected render() to give a frame, uint8 [height, width, 3]; got "
        f"{one_line(repr(picture), 200)}; the env has to support "
        f"render_mode='rgb_array'"
    )


def play(
    repro: Repro, env: EnvRow, spec: EnvSpec, on_action: Callable[[int], None]
) -> Rows:
    """Plays an env that has just been built; returns the row that it has written.

    Calls `on_action` with the number of each action before it is applied, counted from
    1, and with 0 before the reset.

    Raises:
      Exception: What the env raises, or `SpaceViolation`.
    """
    rows = Rows.allocate(spec, 1)
    env.attach(rows, private_heartbeat(), RowRecord.private())
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
