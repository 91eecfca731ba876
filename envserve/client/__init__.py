"""Batches of envs: in worker processes of this host, on servers, or both.

What is named here is loaded when it is used: a probe of a server needs no batch.
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
