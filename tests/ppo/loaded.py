"""Import TensorFlow as `ppo train` does, before tests fork processes."""

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import ppo.train  # noqa: F401
