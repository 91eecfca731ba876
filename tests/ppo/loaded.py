"""Loads TensorFlow as `ppo train` does: imported by what tests fork processes off."""

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import ppo.train  # noqa: F401
