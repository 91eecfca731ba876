"""The client: batches of envs in worker processes on this host or on servers.

The names below are imported on first use, so that a server probe, which does not need
them, starts fast.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from envserve.client.batch_env import BatchEnv
    from envserve.client.stats import BatchStats
    from envserve.client.step_result import StepResult
    from envserve.slab import Status

__all__ = ["BatchEnv", "BatchStats", "Status", "StepResult"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from envserve import slab
    from envserve.client import batch_env

    return vars(slab if name == "Status" else batch_env)[name]
