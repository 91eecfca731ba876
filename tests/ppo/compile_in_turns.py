"""Compile a function in several processes that share a compilation cache.

    python -m tests.ppo.compile_in_turns FOLDER

The processes are forked from this one, which has imported TensorFlow but not used it.
Prints the exit codes as JSON: 0, 3 for a TensorFlow error, 4 for a wrong result.
"""

import json
import os
import sys
from pathlib import Path

import tensorflow as tf

from ppo.cli.options import start_tensorflow


@tf.function(jit_compile=True, autograph=False)
def doubled(numbers: tf.Tensor) -> tf.Tensor:
    return 2.0 * numbers


def start(flags: str = "") -> int:
    process = os.fork()
    if process == 0:
        os.environ["TF_XLA_FLAGS"] = flags
        start_tensorflow(1, 1)
        try:
            is_right = doubled(tf.ones([3])).numpy().tolist() == [2.0] * 3
        except tf.errors.OpError:
            os._exit(3)
        os._exit(0 if is_right else 4)
    return process


def ended(*processes: int) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for p in processes]


def main(root: Path) -> None:
    os.environ["XDG_CACHE_HOME"] = str(root)
    at_once = ended(start(), start())
    (entry,) = root.glob("envserve/xla/*/*")  # one complete entry for both
    whole, written = entry.read_bytes(), entry.stat().st_ino
    again = ended(start()), entry.stat().st_ino == written
    damaged: list[object] = []
    for content in (whole[:-9], b""):
        entry.write_bytes(content)
        unchecked = f"--tf_xla_persistent_cache_directory={entry.parent}"
        damaged += [ended(start(unchecked)), ended(start())]
        damaged.append(entry.stat().st_size > len(whole) - 9)
    print(json.dumps({"at_once": at_once, "again": again, "damaged": damaged}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
