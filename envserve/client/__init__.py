"""Batches of envs: in worker processes of this host, on servers, or both."""

from envserve.client.batch_env import BatchEnv, BatchStats, StepResult
from envserve.slab import Status

__all__ = ["BatchEnv", "BatchStats", "Status", "StepResult"]
