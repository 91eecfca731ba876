"""Load TensorFlow as `ppo train` does; imported by processes that tests fork from."""

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import ppo.train  # noqa: F401
