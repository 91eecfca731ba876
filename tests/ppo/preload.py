"""Load TensorFlow as `ppo train` does; imported by processes from which tests fork.

    python -m tests.ppo.preload MODULE ARGUMENTS

runs a module in a process that has loaded TensorFlow.
"""

import os
import runpy
import sys

from envserve.python_process import uncollected_imports

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

with uncollected_imports():
    import ppo.train  # noqa: F401

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
