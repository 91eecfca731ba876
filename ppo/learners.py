"""Several learners of one run: processes with envs of their own, and equal networks.

TF_CONFIG names them, as for `tf.distribute.MultiWorkerMirroredStrategy`, by which they
meet; the first is the chief. Sums are TensorFlow's collectives, a ring over gRPC, which
has no keys. XLA has none on CPUs: they stand between pieces of compiled code.
"""

import contextlib
import itertools
import json
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ppo.errors import LearnerLostError

_START_SECONDS = 300
_SILENCE_SECONDS = 60  # of a host that is gone; a process that ends is noticed at once
_KINDS = (tf.float32, tf.float64, tf.int32, tf.int64)


class Learners:
    """All learners, as one of them sees them; alone, no graph knows of it.

    All have to add up the same things, in the same order.
    docs/decisions.md: "Learners synchronise through collectives, in one class".
    """

    def __init__(self, addresses: Sequence[str] = ("here",), index: int = 0) -> None:
        self.num, self.index, self.is_chief = len(addresses), index, index == 0
        self._addresses = addresses
        self._keys = itertools.count(1)  # the same for all: they trace the same graphs
        self._sum = tf.function(self.sum)
        self.wait_seconds, self._timer = 3600.0, threading.Timer(0.0, int)

    def connect(self) -> None:
        """Wait until all are there; TensorFlow must not have been used before."""
        from tensorflow.python.eager import context  # nothing public sets these times

        self._context = context.context()
        self._context.configure_coordination_service(
            *("standalone", "/job:worker/replica:0/task:0"),
            cluster_register_timeout_in_ms=1000 * _START_SECONDS,
            heartbeat_timeout_in_ms=1000 * _SILENCE_SECONDS,
        )
        try:
            tf.distribute.MultiWorkerMirroredStrategy()
        except tf.errors.OpError as error:
            raise LearnerLostError(
                f"Learner {self.index}: expected {', '.join(self._addresses)} within "
                f"{_START_SECONDS} s, got {error.message.splitlines()[0]}; start all, "
                "each with its own index, at ports that are free and can be reached."
            ) from error

    def sum(self, nest: Any) -> Any:
        """Add up tensors over all learners, each in its place."""
        if self.num == 1:
            return nest
        tensors = list(map(tf.convert_to_tensor, tf.nest.flatten(nest)))
        for kind in _KINDS:
            places = [n for n, each in enumerate(tensors) if each.dtype == kind]
            if places:
                rows = [tf.reshape(tensors[place], [-1]) for place in places]
                total = self._reduce(tf.concat(rows, 0))
                parts = tf.split(total, [len(row) for row in rows])
                for place, part in zip(places, parts, strict=True):
                    tensors[place] = tf.reshape(part, tensors[place].shape)
        return tf.nest.pack_sequence_as(nest, tensors)

    def max(self, number: tf.Tensor) -> tf.Tensor:
        """Return the largest of a scalar over all learners."""
        return number if self.num == 1 else self._reduce(number, "Max")

    def mean(self, nest: Any, weight: tf.Tensor) -> Any:
        """Average float32 tensors, of which each learner's count with its weight."""
        if self.num == 1:
            return nest
        weighted = tf.nest.map_structure(lambda each: each * weight, nest)
        total, all_weight = self.sum((weighted, weight))
        return tf.nest.map_structure(lambda x: x / tf.maximum(all_weight, 1.0), total)

    def gather(self, value: Any) -> list[Any]:
        """Return a value of each learner; of what JSON cannot hold, its text."""
        if self.num == 1:
            return [value]
        self._timer.cancel()
        words = (tf.errors.DEADLINE_EXCEEDED, "nothing was heard for too long")
        give_up = self._context.abort_collective_ops
        self._timer = threading.Timer(self.wait_seconds, give_up, words)
        self._timer.daemon = True
        self._timer.start()
        text = json.dumps(value, default=str, skipkeys=True).encode()
        sizes = self._sum(tf.one_hot(self.index, self.num, len(text), 0)).numpy()
        size = 1 << int(sizes.max()).bit_length()  # a power of two: few graphs
        rows = np.zeros([self.num, size], np.int32)
        rows[self.index, : len(text)] = list(text)
        rows = self._sum(tf.constant(rows)).numpy().astype(np.uint8)
        texts = [bytes(row[: sizes[number]]) for number, row in enumerate(rows)]
        return list(map(json.loads, texts))

    def broadcast(self, variables: Sequence[tf.Variable]) -> None:
        """Give variables the values that the chief has."""
        if self.num == 1:
            return
        own = [variable for variable in variables if variable.dtype in _KINDS]
        values = [tf.identity(v) if self.is_chief else tf.zeros_like(v) for v in own]
        for variable, value in zip(own, self._sum(values), strict=True):
            variable.assign(value)

    @contextlib.contextmanager
    def guard_collectives(self) -> Iterator[None]:
        """Raise `LearnerLostError` if sums cannot be had any more."""
        try:
            yield
        except tf.errors.OpError as error:
            if self.num == 1 or "ollective" not in error.message:
                raise
            tasks = map(int, re.findall(r"/task:(\d+)", error.message))
            others = (f"learner {task}" for task in tasks if task != self.index)
            who = next(others, "another one")
            raise LearnerLostError(
                f"Learner {self.index}: expected {self.num} learners to the end, but "
                f"{who} is gone; see what it says, and start all, the first with "
                "--resume."
            ) from error
        self.wait_for_all()

    def wait_for_all(self) -> None:
        """Wait until all have had the last sum: they are getting it from each other."""
        with contextlib.suppress(tf.errors.OpError):
            self.gather(None)
        self._timer.cancel()

    def _reduce(self, tensor: tf.Tensor, how: str = "Add") -> tf.Tensor:
        with tf.device("CPU:0"):
            return tf.raw_ops.CollectiveReduceV2(
                input=tensor,
                group_size=self.num,
                group_key=7601,
                instance_key=next(self._keys),
                ordering_token=[],
                merge_op=how,
                final_op="Id",
                communication_hint="ring",  # a timeout would cost a thread each time
            )


#: A learner without others.
SINGLE_LEARNER = Learners()
