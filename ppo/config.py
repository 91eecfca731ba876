"""The settings of a training run: one frozen value, checked when it is made.

The defaults suit continuous control; `ppo.configs` holds what other tasks change.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envserve.errors import WrapperError
from envserve.wrappers import parse_wrappers
from ppo.errors import ConfigError

__all__ = [
    "ACTIVATIONS",
    "LEARNING_RATE_SCHEDULES",
    "NETWORKS",
    "OBJECTIVES",
    "Config",
]

ACTIVATIONS = ("elu", "gelu", "relu", "silu", "tanh")
LEARNING_RATE_SCHEDULES = ("constant", "linear", "kl_adaptive")
NETWORKS = ("auto", "mlp", "cnn")
OBJECTIVES = ("clip", "penalty", "clip_and_penalty")

_FUNCTION = re.compile(r"(.+\.py|[^\W\d]\w*(\.[^\W\d]\w*)*):[^\W\d]\w*")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides what a run learns from and how."""

    env_name: str
    """Registered Gymnasium name, such as "HalfCheetah-v5"."""

    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for the env's constructor."""

    import_modules: tuple[str, ...] = ()
    """Modules that register envs or wrappers, for local workers; servers import their
    own."""

    wrappers: tuple[Mapping[str, Any], ...] = ()
    """What each env is wrapped in, the innermost first. Tables with a name and
    arguments, such as `{name = "ActionRepeat", amount = 4}`; see docs/wrappers.md."""

    spare_envs: bool = False
    """Whether each row has a second env that is reset while the first is stepped: for
    envs whose resets are slow. Twice the memory."""

    total_steps: int = 1_000_000
    """Env steps to train for. Whole iterations that fit are run, never more."""

    seed: int = 0
    """Root of all randomness: networks, actions, shuffling, envs."""

    num_envs: int = 16
    """Rows of the batch of envs."""

    num_splits: int = 1
    """Parts of the batch that step in turn: with 2, the policy thinks about one part's
    rows while the other part's envs step. Worth it where a step takes the envs longer
    than the policy, or where cores are to spare. A run's data do not depend on it but
    for the rounding of the policy's numbers.
    """

    horizon: int = 128
    """Batch steps per iteration; an iteration collects num_envs * horizon steps."""

    epochs: int = 10
    """Passes over the collected steps per iteration."""

    minibatch_size: int = 64
    """Steps per gradient step; must divide num_envs * horizon."""

    learning_rate: float = 3e-4
    """Step size of Adam in the first iteration."""

    learning_rate_schedule: str = "linear"
    """How the learning rate goes on: "constant"; "linear", to 0 at the end of the run;
    "kl_adaptive", divided by 1.5 after an iteration whose divergence is more than
    2 kl_target, and multiplied by 1.5 after less than half of it, from 1e-6 to 1e-2."""

    adam_epsilon: float = 1e-5
    """Added to the root of Adam's second moment."""

    max_gradient_norm: float = 0.5
    """Gradients of both networks together are scaled down to this norm."""

    discount: float = 0.99
    """Gamma: weight of the next step's reward against this one's."""

    gae_lambda: float = 0.95
    """Lambda of generalised advantage estimation."""

    objective: str = "clip"
    """What keeps the policy near the one that collected the steps: "clip", clipped
    probability ratios; "penalty", a penalty on the divergence KL(old || new), which
    adapts; or "clip_and_penalty"."""

    clip_range: float = 0.2
    """Probability ratios earn nothing beyond 1 - clip_range and 1 + clip_range. Only
    used with an objective that clips."""

    decay_clip_range: bool = False
    """Whether the clip range falls linearly to 0 over the run."""

    kl_target: float = 0.01
    """Divergence per iteration, in nats, that the KL penalty and a kl_adaptive learning
    rate aim at."""

    initial_kl_penalty: float = 1.0
    """Weight of the KL penalty at first; multiplied by 1.5 after an iteration whose
    divergence is more than 1.3 kl_target, divided by 1.5 after less than 0.7 of it,
    from 1e-3 to 1e6. Only used with an objective that has one."""

    kl_cutoff_factor: float = 2.0
    """Times kl_target: divergence of a minibatch beyond which its square is penalised
    too. Only used with a KL penalty."""

    kl_cutoff_coefficient: float = 1000.0
    """Weight of that square; 0 leaves it out. Only used with a KL penalty."""

    max_kl: float = 0.0
    """An iteration ends with the epoch after which the divergence is more than this,
    in nats; 0 for no limit."""

    value_coefficient: float = 0.5
    """Weight of the value loss."""

    value_clip_range: float = 0.0
    """Values earn nothing by moving further than this in one iteration, in units of
    scaled rewards; 0 for no limit, which is usually better."""

    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""

    decay_entropy_coefficient: bool = False
    """Whether the weight of the entropy bonus falls linearly to 0 over the run."""

    normalize_advantages: bool = False
    """Whether each minibatch's advantages get mean 0 and standard deviation 1. With
    scaled rewards they are of order 1 anyway, and shrink when little is to be gained.
    """

    recompute_advantages: bool = True
    """Whether advantages are computed anew for each epoch, or once per iteration."""

    normalize_observations: bool = True
    """Whether Box observations are normalised by running statistics."""

    observation_clip: float = 10.0
    """Normalised observations are clipped to +- this."""

    scale_rewards: bool = True
    """Whether rewards are divided by the running std of the discounted return."""

    reward_clip: float = 10.0
    """Scaled rewards are clipped to +- this. Only used with scale_rewards."""

    network: str = "auto"
    """Kind of networks: auto, mlp, cnn, or a function of your own. "mlp" joins all that
    is observed into a vector, "cnn" has convolutions for images, and "auto" is "cnn"
    where there are any. "package.module:function" and "path/to/file.py:function" name
    a function that makes a model, see docs/networks.md.
    """

    shared_torso: bool = True
    """Whether policy and value share the convolutions of a "cnn"."""

    policy_layers: tuple[int, ...] = (64, 64)
    """Hidden layers of the policy network; those of a "cnn" follow its torso."""

    value_layers: tuple[int, ...] = (64, 64)
    """Hidden layers of the value network."""

    recurrent_size: int = 0
    """Units of a GRU between hidden layers and heads, one in the policy and one in the
    value network: for tasks in which an observation does not tell all; see
    docs/recurrent.md. 0 is none.
    """

    sequence_length: int = 0
    """Batch steps through which a gradient step of a recurrent policy looks back; 0 is
    the horizon, and else it must divide it. Minibatches are made of whole sequences, so
    minibatch_size must be a multiple of it. Only used with recurrent_size.
    """

    activation: str = "tanh"
    """Activation of the hidden layers: elu, gelu, relu, silu or tanh."""

    initial_log_std: float = -0.5
    """Log standard deviation of a Gaussian policy at the start."""

    jit_compile: bool = True
    """Whether updates are compiled with XLA: slow to start, several times faster."""

    evaluation_episodes: int = 100
    """Complete episodes of the evaluation that ends a run."""

    evaluate_every: int = 0
    """Env steps of training between evaluations on the way; 0 for none. They take envs
    of their own meanwhile, count as no steps, and change nothing of the training. There
    is one after the last iteration besides."""

    curve_episodes: int = 20
    """Complete episodes of each evaluation on the way: the same ones every time."""

    report_every: int = 0
    """Env steps between rows of metrics, which cover all that lies between; 0 for a row
    per iteration. An evaluation is reported at once."""

    checkpoint_every: int = 0
    """Env steps between checkpoints; 0 leaves it to checkpoint_seconds. There is one
    after the first and the last iteration and after the best evaluation besides."""

    checkpoint_seconds: float = 60.0
    """Seconds after which an iteration ends with a checkpoint in any case."""

    checkpoints_to_keep: int = 3
    """How many of the newest checkpoints stay on disk, besides the best."""

    step_timeout_seconds: float = 30.0
    """Seconds that a step of an env may take; servers have a limit of their own."""

    reset_timeout_seconds: float = 120.0
    """Seconds that a reset of an env may take; servers have a limit of their own."""

    server_lost_after_seconds: float = 60.0
    """Seconds of silence after which an env server is given up."""

    on_server_lost: str = "raise"
    """What a server that was given up does: "raise" ends the training; "pad" leaves its
    rows out of it until the server is back."""

    padding_after_seconds: float = 0.1
    """Seconds that a step waits for envs whose worker is being replaced, before the
    others go on without them; servers have a limit of their own."""

    max_restarts: int = 5
    """How often a worker that ends without a step in between is replaced; servers have
    a limit of their own."""

    on_fault: str = "truncate"
    """What a failed env does: "truncate" ends its episode, "raise" the training."""

    def __post_init__(self) -> None:
        """Check every value; raises `ConfigError` that names the first bad one."""
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if not _is_number(value, whole=isinstance(low, int)):
                kind = "a whole number" if isinstance(low, int) else "a number"
                raise ConfigError(f"{name}: expected {kind}, got {value!r}.")
            if not low <= value <= high:  # not a number is not, either
                raise ConfigError(
                    f"{name}: expected a number from {low:.10g} to {high:.10g}, "
                    f"got {value}."
                )
        for name in ("policy_layers", "value_layers"):
            layers = getattr(self, name)
            if not all(_is_number(size, whole=True) for size in layers):
                raise ConfigError(f"{name}: expected whole numbers, got {layers}.")
            if not all(1 <= size <= _LARGEST_LAYER for size in layers):
                raise ConfigError(
                    f"{name}: expected sizes from 1 to {_LARGEST_LAYER}, got {layers}."
                )
        if not self.env_name:
            raise ConfigError("env_name: expected the name of an env, got ''.")
        try:
            parse_wrappers(self.wrappers)
        except WrapperError as error:
            raise ConfigError(f"{error}.") from None
        if self.on_server_lost not in ("raise", "pad"):
            raise ConfigError(
                f"on_server_lost: expected raise or pad, got {self.on_server_lost!r}."
            )
        if self.on_fault not in ("truncate", "raise"):
            raise ConfigError(
                f"on_fault: expected truncate or raise, got {self.on_fault!r}."
            )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{name}: expected one of {', '.join(choices)}, "
                    f"got {getattr(self, name)!r}."
                )
        if self.network not in NETWORKS and not _FUNCTION.fullmatch(self.network):
            raise ConfigError(
                f"network: expected {', '.join(NETWORKS)}, package.module:function or "
                f"path/to/file.py:function, got {self.network!r}."
            )
        if self.steps_per_iteration % self.minibatch_size:
            raise ConfigError(
                "minibatch_size: expected a divisor of num_envs * horizon = "
                f"{self.steps_per_iteration}, got {self.minibatch_size}."
            )
        if self.recurrent_size:
            self._check_sequences()
        if self.total_steps < self.steps_per_iteration:
            raise ConfigError(
                "total_steps: expected at least one iteration, num_envs * horizon = "
                f"{self.steps_per_iteration}, got {self.total_steps}."
            )

    def _check_sequences(self) -> None:
        if ":" in self.network:
            raise ConfigError(
                f"recurrent_size: expected 0 with a network of your own, {self.network}"
                f", got {self.recurrent_size}."
            )
        length = self.sequence_length or self.horizon
        if self.horizon % length:
            raise ConfigError(
                "sequence_length: expected 0 or a divisor of horizon = "
                f"{self.horizon}, got {length}."
            )
        if self.minibatch_size % length:
            origin = "sequence_length" if self.sequence_length else "horizon"
            raise ConfigError(
                "minibatch_size: expected a multiple of the length of a recurrent "
                f"policy's sequences, {origin} = {length}, got {self.minibatch_size}; "
                "change it, or set sequence_length to a divisor of both."
            )

    @property
    def clips_ratios(self) -> bool:
        """Whether the objective clips probability ratios."""
        return self.objective != "penalty"

    @property
    def penalizes_kl(self) -> bool:
        """Whether the objective has a KL penalty."""
        return self.objective != "clip"

    @property
    def steps_per_iteration(self) -> int:
        """Env steps that one iteration collects."""
        return self.num_envs * self.horizon

    @property
    def num_iterations(self) -> int:
        """Whole iterations that fit into `total_steps`."""
        return self.total_steps // self.steps_per_iteration

    def replace(self, **changes: Any) -> "Config":
        """Return a copy with some values changed, checked like any other."""
        return dataclasses.replace(self, **changes)


def _is_number(value: Any, *, whole: bool) -> bool:
    # JSON, which run folders hold, has no other numbers; and True is an int to Python.
    kinds = int if whole else int | float
    return isinstance(value, kinds) and not isinstance(value, bool)


_CHOICES: dict[str, tuple[str, ...]] = {
    "activation": ACTIVATIONS,
    "learning_rate_schedule": LEARNING_RATE_SCHEDULES,
    "objective": OBJECTIVES,
}
_LARGEST_LAYER = 65_536
_COUNT = (1, 2**53)
_FRACTION = (0.0, 1.0)
_POSITIVE = (1e-12, 1e9)
_SECONDS = (0.001, 1e6)
_BOUNDS: dict[str, tuple[float, float]] = {
    "total_steps": _COUNT,
    "seed": (0, 2**31 - 1),
    "num_envs": (1, 65_536),
    "num_splits": (1, 64),
    "horizon": (1, 1_000_000),
    "epochs": (1, 10_000),
    "minibatch_size": _COUNT,
    "recurrent_size": (0, _LARGEST_LAYER),
    "sequence_length": (0, 1_000_000),
    "learning_rate": (0.0, 1.0),
    "adam_epsilon": (1e-12, 1.0),
    "max_gradient_norm": _POSITIVE,
    "discount": _FRACTION,
    "gae_lambda": _FRACTION,
    "clip_range": (1e-6, 1.0),
    "kl_target": (1e-9, 1e3),
    "initial_kl_penalty": (1e-3, 1e6),
    "kl_cutoff_factor": (0.0, 1e6),
    "kl_cutoff_coefficient": (0.0, 1e9),
    "max_kl": (0.0, 1e6),
    "value_coefficient": (0.0, 1e6),
    "value_clip_range": (0.0, 1e6),
    "entropy_coefficient": (0.0, 1e6),
    "observation_clip": _POSITIVE,
    "reward_clip": _POSITIVE,
    "initial_log_std": (-20.0, 2.0),
    "evaluation_episodes": _COUNT,
    "evaluate_every": (0, 2**53),
    "curve_episodes": _COUNT,
    "report_every": (0, 2**53),
    "checkpoint_every": (0, 2**53),
    "checkpoint_seconds": (0.0, 1e9),
    "checkpoints_to_keep": _COUNT,
    "step_timeout_seconds": _SECONDS,
    "reset_timeout_seconds": _SECONDS,
    "server_lost_after_seconds": _SECONDS,
    "padding_after_seconds": (0.0, 1e6),
    "max_restarts": (0, 2**31),
}
