"""Batches of envs: in worker processes of this host, on servers, or both."""

from envserve.client.batch_env import BatchEnv, StepResult

__all__ = ["BatchEnv", "StepResult"]
