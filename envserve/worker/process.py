"""The main loop of a worker process: build the envs, then answer operations on blocks.

Every operation gets exactly one answer, after its rows have been written to the slab.
This process imports neither zmq nor asyncio.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import socket
import traceback
from collections.abc import Callable
from typing import Final

import numpy as np

from envserve.crashes.action_ring import ActionRing, ring_nbytes
from envserve.envs.seeding import env_seed
from envserve.errors import EnvStartError, SpaceError, WorkerError
from envserve.host_resources import num_cores
from envserve.slab import Slab
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.leaves import custom_space_classes
from envserve.worker import replay_worker
from envserve.worker.channel import (
    REFUSALS,
    BuildMessage,
    ChannelMessage,
    Kind,
    MessageReader,
    pack_message,
)
from envserve.worker.env_block import EnvBlock
from envserve.worker.env_checks import EnvChecks, SpaceViolation
from envserve.worker.frame_board import FrameBoard
from envserve.worker.orphans import OrphanReaper
from envserve.worker.rendering import FrameRenderer
from envserve.worker.spare_row import ResetThreads
from envserve.worker.vector_block import VectorBlock
from envserve.worker.worker_report import encode_spaces, sendable
from envserve.wrappers.specs import wrappers_from_plain

__all__ = ["run"]

_LOGGER: Final = logging.getLogger(__name__)
#: To wake a core that sleeps takes longer than a light env's step; a policy thinks for
#: about as long as this. Only where no other worker waits for that core.
_SPIN_SECONDS: Final = 400e-6
#: Seconds to wait for running resets at the end. The pool waits twice as long.
_CLOSE_SECONDS: Final = 0.5
_OURS: Final = (EnvStartError, SpaceError)


def run(channel: socket.socket, import_error: str = "") -> None:
    """Serve a pool until it sends CLOSE or closes its socket.

    Args:
      channel: The worker's end of the socket pair.
      import_error: Why the user's env modules could not be imported; or empty.
    """
    with channel:
        try:
            inbox = MessageReader(channel)
            messages = inbox.messages()
            build = next(messages, None)
            if build is None or build.kind not in (Kind.BUILD, Kind.REPLAY):
                return
            if import_error:
                raise EnvStartError(import_error)
            if build.kind is Kind.REPLAY:
                replay_worker.run(channel, build.payload, build.sequence)
                return
            fields = codec.decode(build.payload, max_bytes=1 << 26)
            wrappers = wrappers_from_plain(fields.pop("wrappers"))
            config = BuildMessage(wrappers=wrappers, **fields)
            if config.num_workers <= num_cores():
                inbox.spin_seconds = _SPIN_SECONDS
            worker = _Worker(channel, config)
            orphans = OrphanReaper()
            for message in messages:
                orphans.reap()
                if message.kind is Kind.SLAB:
                    worker.attach(inbox.fds.pop())
                elif message.kind is Kind.CLOSE:
                    break
                else:
                    worker.handle(message)
            worker.close()
        except Exception as error:
            refusals = (
                kind for kind, cls in REFUSALS.items() if isinstance(error, cls)
            )
            kind = next(refusals, Kind.FAILED)
            # The message of an error of our own is complete. Other errors need their
            # traceback.
            is_lasting = isinstance(error, SpaceViolation) and error.is_lasting
            is_ours = isinstance(error, _OURS) and error.__cause__ is None
            is_whole = is_ours or is_lasting or kind is not Kind.FAILED
            text = sendable(str(error) if is_whole else traceback.format_exc())
            failed = pack_message(kind, int(is_lasting), payload=text.encode())
            with contextlib.suppress(OSError):  # the pool may have gone
                channel.sendall(failed)


class _Worker:
    """The blocks of a worker process, and the slab that they share."""

    def __init__(self, channel: socket.socket, config: BuildMessage) -> None:
        self._send: Callable[[bytes], None] = channel.sendall
        self._config = config
        checks = EnvChecks(config.nonfinite, config.strict_spaces)
        num_rows = sum(stop - start for _, start, stop in config.blocks)
        self._threads = ResetThreads(num_rows) if config.spare_envs else None
        self._blocks: dict[int, EnvBlock | VectorBlock] = {}
        for index, start, stop in config.blocks:
            rows = range(start, stop)
            self._blocks[index] = (
                VectorBlock(config, rows, checks)
                if config.vectorized
                else EnvBlock(config, rows, checks, self._threads)
            )
        row = config.blocks[0][1]
        env_index, incarnation = config.first_env_index + row, config.incarnations[row]
        # Env code that uses the global generators must not do the same everywhere.
        seed = env_seed(config.seed, env_index, incarnation)
        random.seed(seed)
        np.random.seed(seed)
        self._spec = self._build()
        if config.worker == 0:
            self._warn_of_custom_spaces()
        gc.collect()
        gc.freeze()
        self._send(pack_message(Kind.READY, payload=encode_spaces(self._spec)))

    def _build(self) -> EnvSpec:
        built = (each for block in self._blocks.values() for each in block.build())
        first_index, first = next(built)
        self._send(pack_message(Kind.BUILT))
        for env_index, spec in built:
            different = first.differences(spec)
            if different:
                raise EnvStartError(
                    f"Env {env_index}: its spaces differ from those of env "
                    f"{first_index}; {'; '.join(different)}"
                )
            self._send(pack_message(Kind.BUILT))
        return first

    def _warn_of_custom_spaces(self) -> None:
        spec = self._spec
        own = custom_space_classes(spec.observation_space) | custom_space_classes(
            spec.action_space
        )
        for name, kind in own.items():
            _LOGGER.warning(
                "%s: a space of class %s is taken as a %s; what that class does in "
                "sample() and contains() is not known outside of the env",
                *(spec.env_name, name, kind),
            )

    def attach(self, fd: int) -> None:
        """Map the slab."""
        config, spec = self._config, self._spec
        num_envs, num_workers = config.num_envs, config.num_workers
        slab = Slab(fd, spec, num_envs, num_workers)
        slab.close()  # it stays mapped; a process that an env starts must not have it
        heartbeat = slab.heartbeats[config.worker].data
        ring = ActionRing(spec, num_envs, slab.extra)
        for block in self._blocks.values():
            block.attach(slab.rows, heartbeat, ring)
        memory = slab.extra[ring_nbytes(spec, num_envs) :]
        board = FrameBoard(num_envs, num_workers, memory)
        blocks = self._blocks.values()
        self._renderer = FrameRenderer(board, config.worker, heartbeat, ring, blocks)

    def handle(self, message: ChannelMessage) -> None:
        """Carry out one operation on a block, and answer it."""
        block = self._blocks[message.block]
        if message.kind is Kind.STEP:
            payload = block.step()
        elif message.kind is Kind.RESET:
            payload = block.reset(message.payload)
        elif message.kind is Kind.CALL:
            payload = block.call(message.payload)
        else:
            raise WorkerError(f"expected an operation on a block; got {message.kind!r}")
        self._send(pack_message(Kind.DONE, message.block, message.sequence, payload))
        if self._renderer.until[0]:
            self._renderer.render_due_row()

    def close(self) -> None:
        """Close the envs, after the resets that run in threads."""
        if self._threads is not None:
            self._threads.close(_CLOSE_SECONDS)
        for block in self._blocks.values():
            block.close()
