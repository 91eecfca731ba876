"""The settings of SAC, and its defaults for settings that all algorithms have."""

import dataclasses
from typing import Annotated, Any

from msgspec import Meta

from ppo.errors import ConfigError

Count = Annotated[int, Meta(ge=1, le=2**53)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SACSettings:
    """Settings that are specific to SAC."""

    batch_size: Annotated[int, Meta(ge=1, le=1_000_000)] = 256
    """Number of transitions per gradient step, sampled from the replay buffer."""

    replay_size: Count = 1_000_000
    """Number of most recent transitions that the replay buffer holds, in the memory of
    this host. Less memory is used if total_steps is smaller."""

    random_steps: Annotated[int, Meta(ge=0, le=2**53)] = 1_000
    """Number of environment steps before the first gradient step. Until then, actions
    are almost uniformly distributed. Must not exceed replay_size, or total_steps
    rounded down to whole iterations."""

    save_replay: bool = True
    """Whether to save the replay buffer in the run folder, so that a resumed run can
    continue with it. Each transition is written once, when the next checkpoint is
    written."""

    updates_per_step: Annotated[float, Meta(ge=1e-6, le=1_000.0)] = 1.0
    """Number of gradient steps per environment step. Rounded to whole gradient steps
    per iteration, and to at least one."""

    tau: Annotated[float, Meta(ge=1e-9, le=1.0)] = 0.005
    """Fraction by which the weights of the target networks move towards the critics'
    weights in each gradient step."""

    target_entropy: Annotated[float, Meta(ge=-1e6, le=1e6)] = -1.0
    """Target entropy per dimension of the action, in nats, for actions that are scaled
    to [-1, 1]. The temperature adapts until the policy has this entropy."""

    initial_temperature: Annotated[float, Meta(ge=1e-9, le=1e6)] = 1.0
    """Initial weight of the entropy in the objective."""

    def check(self, planned_steps: int) -> None:
        """Check that a run of `planned_steps` env steps would train the policy.

        Raises:
          ConfigError: `random_steps` is too large.
        """
        limit = min(self.replay_size, planned_steps)
        if self.random_steps > limit:
            raise ConfigError(
                f"random_steps: expected at most {limit:,}, which is the smaller of "
                f"replay_size and the steps of the run, got {self.random_steps:,}; "
                "reduce it, because the policy would never be trained."
            )


#: Defaults of SAC for settings that all algorithms have, where they differ from PPO's.
SAC_DEFAULTS: dict[str, Any] = {
    # Iterations are short, because a gradient step follows each env step.
    "horizon": 4,
    "policy_layers": (256, 256),
    "value_layers": (256, 256),
    "activation": "relu",
    # tanh maps Gaussian noise of this standard deviation to almost uniform actions.
    "initial_log_std": -0.1,
    "state_dependent_std": True,
    "action_distribution": "squashed_gaussian",
    "normalize_observations": False,
    "report_every": 1_000,
}
