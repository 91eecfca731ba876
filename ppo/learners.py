"""Synchronise learners: processes with separate envs and identical networks.

TF_CONFIG lists the addresses of all learners, as for
`tf.distribute.MultiWorkerMirroredStrategy`, which connects them; learner 0 is the
chief. TensorFlow's collectives sum tensors in a ring over gRPC, without encryption
or authentication. XLA does not support collectives on CPUs, so they are called between
compiled functions, not within them.
"""

import contextlib
import faulthandler
import itertools
import json
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ppo.errors import LearnerLostError
from ppo.rendezvous import wait_for_learners

#: Seconds after which the process exits if TensorFlow does not connect the learners,
#: although all learners have started.
_CONNECT_SECONDS = 120
#: Seconds without a heartbeat after which a host is considered lost. The exit of a
#: process is usually detected within a second. During a collective operation of
#: TensorFlow, however, it may be detected only after this time.
_HEARTBEAT_SECONDS = 60
_DTYPES = (tf.float32, tf.float64, tf.int32, tf.int64)


class Learners:
    """The group of all learners, from the perspective of one of them.

    All learners must call the same methods in the same order, because each call is a
    collective operation; see "Learners synchronise through collectives, in one class"
    in the decisions. With a single learner, the methods add no operations to the graph.
    With several learners, they must not be called in a function that is compiled with
    `jit_compile`, because XLA does not support collectives on CPUs.

    Args:
      addresses: Addresses of all learners, the chief first.
      index: Index of this learner in `addresses`.

    Attributes:
      num: Number of learners.
      index: Index of this learner.
      is_chief: Whether this is learner 0, which evaluates the agent and
        writes metrics and checkpoints.
      wait_seconds: Seconds after a call to `gather` at which pending collectives
        fail, unless `gather` is called again before.
    """

    def __init__(self, addresses: Sequence[str] = ("here",), index: int = 0) -> None:
        self.num, self.index, self.is_chief = len(addresses), index, index == 0
        self._addresses = addresses
        # Keys identify collectives. All learners trace the same graphs in the same
        # order, so a collective has the same key in all of them.
        self._keys = itertools.count(1)
        self._sum = tf.function(self.sum)
        self.wait_seconds, self._timer = 3600.0, threading.Timer(0.0, int)

    def connect(self, timeout_seconds: float = 300.0) -> None:
        """Wait until all learners are connected; call this before using TensorFlow.

        Raises:
          ConfigError: Another learner has a different list of addresses.
          LearnerLostError: Another learner did not start in time, or exited.
        """
        from tensorflow.python.eager import context  # no public API sets the timeouts

        wait_for_learners(self._addresses, self.index, timeout_seconds)
        self._context = context.context()
        self._context.configure_coordination_service(
            "standalone",
            "/job:worker/replica:0/task:0",
            cluster_register_timeout_in_ms=1000 * _CONNECT_SECONDS,
            heartbeat_timeout_in_ms=1000 * _HEARTBEAT_SECONDS,
        )
        # If a learner exits during this call, TensorFlow waits for it without a limit,
        # and no Python code can run in the meantime.
        faulthandler.dump_traceback_later(_CONNECT_SECONDS, exit=True, file=2)
        try:
            tf.distribute.MultiWorkerMirroredStrategy()
        except tf.errors.OpError as error:
            raise LearnerLostError(
                f"Learner {self.index}: could not connect to "
                f"{', '.join(self._addresses)}: {error.message.splitlines()[0]}; "
                "another learner has exited: check its output, then restart all "
                "learners."
            ) from error
        finally:
            faulthandler.cancel_dump_traceback_later()
            # Install Python's handler again: TensorFlow has replaced it with a handler
            # that only records SIGTERM.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))

    @tf.autograph.experimental.do_not_convert
    def sum(self, nest: Any) -> Any:
        """Return the element-wise sums of a nest of tensors over all learners.

        All tensors of the same dtype are concatenated and summed in one collective.
        None, the gradient of an unused variable, is returned unchanged.
        """
        if self.num == 1:
            return nest
        tensors: list[Any] = [
            x if x is None else tf.convert_to_tensor(x) for x in tf.nest.flatten(nest)
        ]
        for dtype in _DTYPES:
            indices = [
                n for n, x in enumerate(tensors) if x is not None and x.dtype == dtype
            ]
            if indices:
                rows = [tf.reshape(tensors[index], [-1]) for index in indices]
                total = self._reduce(tf.concat(rows, 0))
                parts = tf.split(total, [row.shape[0] for row in rows])
                for index, part in zip(indices, parts, strict=True):
                    tensors[index] = tf.reshape(part, tensors[index].shape)
        return tf.nest.pack_sequence_as(nest, tensors)

    @tf.autograph.experimental.do_not_convert
    def max(self, number: tf.Tensor) -> tf.Tensor:
        """Return the maximum of a scalar over all learners."""
        return number if self.num == 1 else self._reduce(number, "Max")

    def mean(self, nest: Any, weight: tf.Tensor) -> Any:
        """Return weighted means of a nest of float32 tensors over all learners.

        Args:
          nest: Tensors of this learner; None is returned unchanged.
          weight: Scalar weight of this learner's tensors.
        """
        if self.num == 1:
            return nest
        weighted = tf.nest.map_structure(
            lambda x: None if x is None else x * weight, nest
        )
        total, total_weight = self.sum((weighted, weight))
        total_weight = tf.maximum(total_weight, 1.0)
        return tf.nest.map_structure(
            lambda x: None if x is None else x / total_weight, total
        )

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all learners, in the order of their indices.

        The values are sent as JSON. NumPy numbers become floats, and other objects that
        JSON does not support become strings.
        """
        if self.num == 1:
            return [value]
        self._timer.cancel()
        reason = (tf.errors.DEADLINE_EXCEEDED, "another learner is unresponsive")
        abort = self._context.abort_collective_ops
        self._timer = threading.Timer(self.wait_seconds, abort, reason)
        self._timer.daemon = True
        self._timer.start()
        text = json.dumps(value, default=_as_json_type, skipkeys=True).encode()
        sizes = self._sum(tf.one_hot(self.index, self.num, len(text), 0)).numpy()
        size = 1 << int(sizes.max()).bit_length()  # a power of two limits retracing
        rows = np.zeros([self.num, size], np.int32)
        rows[self.index, : len(text)] = list(text)
        rows = self._sum(tf.constant(rows)).numpy().astype(np.uint8)
        texts = [bytes(row[: sizes[number]]) for number, row in enumerate(rows)]
        return list(map(json.loads, texts))

    def broadcast(self, variables: Sequence[tf.Variable]) -> None:
        """Assign the chief's numbers and bools to the variables of all learners."""
        if self.num == 1:
            return
        copied = [
            v
            for v in variables
            if v.dtype.is_floating or v.dtype.is_integer or v.dtype.is_bool
        ]
        values = [
            _as_summable(v if self.is_chief else tf.zeros_like(v)) for v in copied
        ]
        for variable, value in zip(copied, self._sum(values), strict=True):
            variable.assign(tf.cast(value, variable.dtype))

    @contextlib.contextmanager
    def guard_collectives(self) -> Iterator[None]:
        """Raise `LearnerLostError` if a collective fails in the `with` block.

        If the block succeeds, wait for the other learners at its end.
        """
        try:
            yield
        except tf.errors.OpError as error:
            # XLA rejects collectives with an InvalidArgumentError.
            is_invalid = isinstance(error, tf.errors.InvalidArgumentError)
            if self.num == 1 or is_invalid or "ollective" not in error.message:
                raise
            tasks = map(int, re.findall(r"/task:(\d+)", error.message))
            others = (f"learner {task}" for task in tasks if task != self.index)
            lost = next(others, "another learner")
            raise LearnerLostError(
                f"Learner {self.index}: {lost} exited or became unreachable during "
                "the run. Check its output, then restart all learners, the first with "
                "--resume."
            ) from error
        self.wait_for_all()

    def wait_for_all(self) -> None:
        """Wait until all learners have received the last sum.

        In a ring, each learner forwards sums to the next one, so a learner that exits
        early would interrupt the remaining learners.
        """
        with contextlib.suppress(tf.errors.OpError):
            self.gather(None)
        self._timer.cancel()

    def _reduce(self, tensor: tf.Tensor, merge_op: str = "Add") -> tf.Tensor:
        with tf.device("CPU:0"):
            return tf.raw_ops.CollectiveReduceV2(
                input=tensor,
                group_size=self.num,
                group_key=7601,
                instance_key=next(self._keys),
                ordering_token=[],
                merge_op=merge_op,
                final_op="Id",
                communication_hint="ring",
                # No timeout is set, because TensorFlow would use a thread for it.
            )


def _as_json_type(value: Any) -> float | str:
    is_number = isinstance(value, np.integer | np.floating | np.bool_)
    return float(value) if is_number else str(value)


def _as_summable(value: tf.Tensor) -> tf.Tensor:
    """Return a tensor with a dtype that `Learners.sum` supports."""
    if value.dtype in _DTYPES:
        return tf.identity(value)
    return tf.cast(value, tf.float32 if value.dtype.is_floating else tf.int64)


#: The group of a run with a single learner, in which all sums are local.
SINGLE_LEARNER = Learners()
