"""The main loop of a worker process.

A worker builds the envs of its blocks (BUILD), maps the slab (SLAB) and then executes
operations one at a time (STEP, RESET, CALL), until the pool sends CLOSE or closes its
end of the socket. The worker replies to each operation exactly once, with DONE, after
it has written the rows. Between operations, it renders a frame if one was requested.

An env that fails is replaced within the operation; see `env_block`. Any other exception
ends the worker, which sends FAILED with a traceback. `envserve.worker` describes the
design.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from envserve.crashes.action_ring import ActionRing, ring_nbytes
from envserve.envs import registry
from envserve.envs.global_generators import seed_global_generators
from envserve.envs.pickled_code import UserCode
from envserve.envs.seeding import env_seed
from envserve.errors import EnvStartError, SpaceError, WorkerError
from envserve.host_resources import num_cores
from envserve.slab import Slab
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.leaves import custom_space_classes
from envserve.worker import replay_worker
from envserve.worker.channel import (
    MAX_MESSAGE_BYTES,
    REQUEST_ERRORS,
    BuildMessage,
    ChannelMessage,
    MessageKind,
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
from envserve.worker.worker_report import encode_spaces, traceback_of, utf8_tail
from envserve.wrappers.specs import wrappers_from_plain

#: Time to poll for the next message, about as long as a policy takes to compute
#: actions. Polling is worthwhile because waking up a sleeping core takes longer than a
#: step of a light env. Workers poll only if there is a core for each of them.
_SPIN_SECONDS: Final = 400e-6
#: Maximum time to wait for running resets of spare envs before all envs are closed.
_CLOSE_SECONDS: Final = 0.5
#: Errors whose messages are sufficient without a traceback, unless they have a cause.
_COMPLETE_ERRORS: Final = (EnvStartError, SpaceError)


def run(
    channel: socket.socket, import_modules: Sequence[str] = (), error: str = ""
) -> None:
    """Serve a pool until it sends CLOSE or closes its socket.

    Args:
      channel: The worker's end of the socket pair.
      import_modules: Env modules that the template has not imported.
      error: Error of an import in the template, or "".
    """
    with channel:
        # A child that an env forks must not receive the messages for its parent.
        os.register_at_fork(after_in_child=channel.close)
        try:
            inbox = MessageReader(channel)
            messages = inbox.messages()
            build = next(messages, None)
            kinds = MessageKind.BUILD, MessageKind.REPLAY
            if build is None or build.kind not in kinds:
                return
            is_replay = build.kind is MessageKind.REPLAY
            fields: dict[str, Any] = {}
            if not is_replay:
                fields = codec.decode(build.payload, max_bytes=MAX_MESSAGE_BYTES)
            if gpu := fields.get("gpu"):  # set before a module initialises CUDA
                os.environ["CUDA_VISIBLE_DEVICES"] = gpu
            for module in (*import_modules, "") if import_modules else ():
                payload = utf8_tail(module).encode()
                channel.sendall(pack_message(MessageKind.IMPORTING, payload=payload))
                if module and not error:
                    error = import_error(module)
            if error:
                raise EnvStartError(error)
            if is_replay:
                replay_worker.run(channel, build.payload, build.sequence)
                return
            config = _build_message_of(fields)
            if config.num_workers <= num_cores():
                inbox.spin_seconds = _SPIN_SECONDS
            worker = _Worker(channel, config)
            orphans = OrphanReaper()
            for message in messages:
                orphans.reap()
                if message.kind is MessageKind.SLAB:
                    worker.map_slab(inbox.fds.pop())
                elif message.kind is MessageKind.CLOSE:
                    break
                else:
                    worker.handle(message)
            worker.close()
        except BaseException as failure:  # including an env's SystemExit
            failed = _failure_message(failure)
            with contextlib.suppress(OSError):  # the pool may have exited
                channel.sendall(failed)


def import_error(module: str) -> str:
    """Import an env module; return the error if this fails, or ""."""
    try:
        registry.import_env_modules([module])
    except Exception as error:
        return str(error)
    except BaseException as error:  # such as SystemExit; Ctrl-C does not reach it
        return f"importing {module} raised {error!r}"
    return ""


def _build_message_of(fields: dict[str, Any]) -> BuildMessage:
    """Return the content of BUILD; unpickle the functions and arguments of envs."""
    wrappers = wrappers_from_plain(fields.pop("wrappers"))
    code = UserCode.loads(fields.pop("pickled_code"), fields["env_name"])
    kwargs = fields["env_kwargs"]
    all_kwargs = kwargs if isinstance(kwargs, list) else [kwargs]
    for plain, pickled in zip(all_kwargs, code.kwargs, strict=False):
        plain |= pickled
    return BuildMessage(wrappers=wrappers, code=code, **fields)


def _failure_message(error: BaseException) -> bytes:
    """Encode an error that ends the worker; omit the traceback if the text suffices."""
    matches = (kind for kind, cls in REQUEST_ERRORS.items() if isinstance(error, cls))
    kind = next(matches, MessageKind.FAILED)
    is_permanent = isinstance(error, SpaceViolation) and error.is_permanent
    is_complete = isinstance(error, _COMPLETE_ERRORS) and error.__cause__ is None
    has_text = is_complete or is_permanent or kind is not MessageKind.FAILED
    text = utf8_tail(str(error) if has_text else traceback_of(error))
    return pack_message(kind, int(is_permanent), payload=text.encode())


def _with_hint(built: Iterator[tuple[int, EnvSpec]]) -> Iterator[tuple[int, EnvSpec]]:
    """Yield the envs of a worker from `built`; add a hint if one is not built."""
    is_first = True
    try:
        for env in built:
            yield env
            is_first = False
    except Exception as error:
        # The class of the exception may forbid notes, as a frozen dataclass does.
        with contextlib.suppress(Exception):
            if not is_first:
                error.add_note(
                    "Hint: The first env of this worker was built, a later one was "
                    "not. If a process can have only one env, use num_workers=num_envs "
                    "(servers: --workers) and no spare_envs; if each env needs its own "
                    "port or file, use {row} in env_kwargs."
                )
            # Gymnasium and the old Gym have classes of this name.
            elif "UnregisteredEnv" in (item.__name__ for item in type(error).__mro__):
                error.add_note(
                    "Hint: If a module registers this env when it is imported, name "
                    "that module in import_modules (servers: --import). Workers do not "
                    "run the calling script."
                )
        raise


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
        seed = env_seed(config.seed, env_index, incarnation)
        seed_global_generators(config.env_name, seed, config.code.roots)
        self._spec = self._build()
        if config.worker == 0:
            self._warn_of_custom_spaces(checks)
        gc.collect()
        gc.freeze()
        self._send(pack_message(MessageKind.READY, payload=encode_spaces(self._spec)))

    def _build(self) -> EnvSpec:
        blocks = self._blocks.values()
        built = _with_hint(env for block in blocks for env in block.build())
        first_index, first = next(built)
        self._send(pack_message(MessageKind.BUILT))
        for env_index, spec in built:
            different = first.differences(spec, self._config.observation_mode)
            if different:
                raise EnvStartError(
                    f"Env {env_index}: its spaces differ from the spaces of env "
                    f"{first_index}: {'; '.join(different)}"
                )
            self._send(pack_message(MessageKind.BUILT))
        return first

    def _warn_of_custom_spaces(self, checks: EnvChecks) -> None:
        spec = self._spec
        classes = custom_space_classes(spec.observation_space) | custom_space_classes(
            spec.action_space
        )
        for name, kind in classes.items():
            checks.warnings[name] = (
                f"{name}: a space of class {name} is treated as a {kind}; its own "
                f"sample() and contains() are not available outside the env"
            )

    def map_slab(self, fd: int) -> None:
        """Map the slab, and pass its parts to the blocks."""
        config, spec = self._config, self._spec
        num_envs, num_workers = config.num_envs, config.num_workers
        slab = Slab(fd, spec, num_envs, num_workers)
        slab.close()  # processes started by envs must not inherit the descriptor
        slab.withhold_from_children()
        heartbeat = slab.heartbeats[config.worker].data
        ring = ActionRing(spec, num_envs, slab.extra)
        for block in self._blocks.values():
            block.attach(slab.rows, heartbeat, ring)
        memory = slab.extra[ring_nbytes(spec, num_envs) :]
        board = FrameBoard(num_envs, num_workers, memory)
        blocks = self._blocks.values()
        self._renderer = FrameRenderer(board, config.worker, heartbeat, ring, blocks)

    def handle(self, message: ChannelMessage) -> None:
        """Execute one operation on a block, and reply to it."""
        block = self._blocks[message.block]
        if message.kind is MessageKind.STEP:
            payload = block.step()
        elif message.kind is MessageKind.RESET:
            payload = block.reset(message.payload)
        elif message.kind is MessageKind.CALL:
            payload = block.call(message.payload)
        else:
            raise WorkerError(f"expected an operation on a block; got {message.kind!r}")
        self._send(
            pack_message(MessageKind.DONE, message.block, message.sequence, payload)
        )
        if self._renderer.watched_until[0]:
            self._renderer.render_due_row()

    def close(self) -> None:
        """Close the envs, after a short wait for running resets in threads."""
        if self._threads is not None:
            self._threads.close(_CLOSE_SECONDS)
        for block in self._blocks.values():
            block.close()
