"""Load TensorFlow as `ppo train` does; imported by processes from which tests fork."""

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import ppo.train  # noqa: F401
