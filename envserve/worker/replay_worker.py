"""Replay the reset and the actions of a repro file in a worker process.

The worker reports the number of each action before it applies the action, so that the
pool can report in which action the worker crashed.
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
from envserve.spaces.variable_length import decode_actions
from envserve.text import one_line
from envserve.worker.channel import MessageKind, pack_message
from envserve.worker.env_checks import EnvChecks
from envserve.worker.env_row import EnvRow
from envserve.worker.rendering import frame_rate
from envserve.worker.worker_report import fault_from_error


def run(channel: socket.socket, payload: bytes, num_frames: int = 0) -> None:
    """Replay the content of a repro file.

    Send DONE with the number of each action before it is applied, and with 0 before the
    reset. At the end, send READY, or FAILED with the env's exception.

    Args:
      channel: The worker's end of the socket pair.
      payload: Content of the repro file.
      num_frames: Number of actions, counted from the end, before which a VIDEO_FRAME is
        sent. If it is positive, another VIDEO_FRAME is sent before READY.
    """
    repro = decode_repro(payload)
    first_frame = len(repro.played.actions[0]) - num_frames + 1

    def on_action(number: int) -> None:
        if number and number >= first_frame:
            channel.sendall(_render_video_frame(env))
        channel.sendall(pack_message(MessageKind.DONE, sequence=number))

    env = build_env(repro)
    channel.sendall(pack_message(MessageKind.BUILT))
    try:
        apply_actions(repro, env, on_action)
        if num_frames:
            channel.sendall(_render_video_frame(env))
    except VideoError as error:
        raise EnvStartError(str(error)) from None
    except Exception as error:
        fault = fault_from_error(0, error)
        fields = {"text": fault.text, "is_violation": fault.is_violation}
        failure = codec.encode(fields)
        channel.sendall(pack_message(MessageKind.FAILED, block=1, payload=failure))
    else:
        channel.sendall(pack_message(MessageKind.READY))


def build_env(repro: Repro) -> EnvRow:
    """Build the env of a repro file.

    Raises:
      ReproError: The env's action space differs from the one in the file.
      EnvStartError: The env was a row of a vector env, whose other rows the file does
        not contain.
    """
    if repro.vectorized:
        raise EnvStartError(
            "this env was a row of a vector env, and the file does not contain the "
            "actions of the other rows"
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
    env = EnvRow(request, 0, repro.played.incarnation, checks, context=repro.context)
    _check_actions(repro, env.build())
    return env


def _render_video_frame(env: EnvRow) -> bytes:
    rate = frame_rate(getattr(env.inner_env, "metadata", {}))
    try:
        frame = env.call("call", "render", [])
    except Exception as error:
        frame = error
    if getattr(frame, "dtype", None) == np.uint8 and frame.shape[2:] == (3,):
        return pack_message(
            MessageKind.VIDEO_FRAME, payload=codec.encode([rate, frame])
        )
    raise VideoError(
        f"expected render() to return a frame, uint8 [height, width, 3]; got "
        f"{one_line(repr(frame), 200)}; the env must support "
        f"render_mode='rgb_array'"
    )


def apply_actions(repro: Repro, env: EnvRow, on_action: Callable[[int], None]) -> Rows:
    """Reset an env that was just built, and apply the actions of a repro file.

    Args:
      repro: The content of the repro file.
      env: The env.
      on_action: Called with the number of each action (from 1) before it is applied,
        and with 0 before the reset.

    Returns:
      The row that the env has written.

    Raises:
      Exception: The env's exception, or `SpaceViolation`.
    """
    rows = Rows.allocate(env.spec, 1)
    env.attach(rows, private_heartbeat(), RowRecord.private())
    played = repro.played
    if played.generator is not None:
        # This reset creates the generator whose state is restored below. An unseeded
        # reset would be random, and might crash.
        if repro.seeded:
            env.reset(None, played.options)
        restore_rng_state(env.inner_env, played.generator)
    on_action(0)
    env.reset(played.seed, played.options)
    for number, action in enumerate(decode_actions(env.spec, played.actions), 1):
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
            f"expected actions of {repro.env_name}, with the arrays "
            f"{', '.join(map(str, leaves))}; got {len(arrays)} arrays: "
            f"{', '.join(f'{a.dtype}{list(a.shape[1:])}' for a in arrays)}; replay the "
            f"file with the version of the env that wrote it"
        )
