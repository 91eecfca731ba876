"""The settings of a training run: one frozen value, checked when it is made.

The defaults suit continuous control; `named_configs` holds what other tasks
change, and reads configs from files.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)

from envserve.errors import WrapperError
from envserve.wrappers.specs import parse_wrappers
from ppo.config.values import Table, Tables, in_words
from ppo.errors import ConfigError

__all__ = ["Config"]

_NETWORKS = ("auto", "mlp", "cnn")
_FUNCTION = re.compile(r"(.+\.py|[^\W\d]\w*(\.[^\W\d]\w*)*):[^\W\d]\w*")

_Count = Annotated[int, Field(ge=1, le=2**53)]
_Steps = Annotated[int, Field(ge=0, le=2**53)]
_Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
_Positive = Annotated[float, Field(ge=1e-12, le=1e9)]
_Loss = Annotated[str, Field(pattern=r"^(clip|penalty|clip_and_penalty|.+:\w+)$")]
_Seconds = Annotated[float, Field(ge=1e-3, le=1e6)]
_Weight = Annotated[float, Field(ge=0.0, le=1e6)]
_LayerSize = Annotated[int, Field(ge=1, le=65_536)]
# Not strict: files and settings have lists where Python has tuples.
_Layers = Annotated[tuple[_LayerSize, ...], Field(strict=False, examples=["64,64"])]
_Words = Annotated[tuple[str, ...], Field(strict=False, examples=["ale_py"])]


class Config(BaseModel, frozen=True):
    """Everything that decides what a run learns from and how.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type or range; names
            each.
    """

    model_config = ConfigDict(
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # in env_kwargs
        extra="forbid",
        strict=True,  # JSON, which run folders hold, tells numbers from text and truth
        use_attribute_docstrings=True,
    )

    env_name: Annotated[str, Field(min_length=1)]
    """Registered Gymnasium name, such as "HalfCheetah-v5"."""

    env_kwargs: Table = {}
    """Keyword arguments for the env's constructor."""

    import_modules: _Words = ()
    """Modules that register envs or wrappers, for local workers; servers import their
    own."""

    wrappers: Tables = ()
    """What each env is wrapped in, the innermost first. Tables with a name and
    arguments, such as `{name = "ActionRepeat", amount = 4}`; see docs/wrappers.md."""

    spare_envs: bool = False
    """Whether each row has a second env that is reset while the first is stepped: for
    envs whose resets are slow. Twice the memory."""

    stagger_episodes: bool = False
    """Whether training cuts each env's first episode at a random step up to its time
    limit, so that envs that end by theirs do not all begin anew at once."""

    training_time_limit: _Steps = 0
    """Steps after which training truncates an episode, if the env's own limit comes
    later: more beginnings are seen. Evaluations play whole episodes. 0 for none."""

    total_steps: _Count = 1_000_000
    """Valid env steps to train for. Whole iterations that fit are run, never more."""

    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Root of all randomness: networks, actions, shuffling, envs."""

    num_envs: Annotated[int, Field(ge=1, le=65_536)] = 16
    """Rows of the batch of envs."""

    num_splits: Annotated[int, Field(ge=1, le=64)] = 1
    """Parts of the batch that step in turn: with 2, the policy thinks about one part's
    rows while the other part's envs step. Worth it where a step takes the envs longer
    than the policy, or where cores are to spare. A run's data do not depend on it but
    for the rounding of the policy's numbers."""

    horizon: Annotated[int, Field(ge=1, le=1_000_000)] = 128
    """Batch steps per iteration; an iteration collects num_envs * horizon steps."""

    overlap: bool = False
    """Whether the next rollout is collected while an update runs, by the policy before
    that update; see docs/training.md. Not to be changed when a run is resumed."""

    epochs: Annotated[int, Field(ge=1, le=10_000)] = 10
    """Passes over the collected steps per iteration."""

    minibatch_size: _Count = 64
    """Steps per gradient step; must divide num_envs * horizon."""

    learning_rate: _Fraction = 3e-4
    """Step size of Adam in the first iteration."""

    learning_rate_schedule: Literal["constant", "linear", "kl_adaptive"] = "linear"
    """How the learning rate goes on: "constant"; "linear", to 0 at the end of the run;
    "kl_adaptive", divided by 1.5 after an iteration whose divergence is more than
    2 kl_target, and multiplied by 1.5 after less than half of it, from 1e-6 to
    learning_rate, but left alone after less than 1e-4."""

    adam_epsilon: Annotated[float, Field(ge=1e-12, le=1.0)] = 1e-5
    """Added to the root of Adam's second moment."""

    max_gradient_norm: _Positive = 0.5
    """The gradient of each network is scaled down to this norm."""

    discount: _Fraction = 0.99
    """Gamma: weight of the next step's reward against this one's."""

    gae_lambda: _Fraction = 0.95
    """Lambda of generalised advantage estimation."""

    objective: _Loss = "clip"
    """What keeps the policy near the one that collected the steps: clip (its ratios),
    penalty (on KL(old || new)) or clip_and_penalty; or a loss of yours, my.py:loss."""

    clip_range: Annotated[float, Field(ge=1e-6, le=1.0)] = 0.2
    """Ratios earn nothing beyond 1 +- clip_range. Only used with a loss that clips."""

    decay_clip_range: bool = False
    """Whether the clip range falls linearly to 0 over the run."""

    kl_target: Annotated[float, Field(ge=1e-9, le=1000.0)] = 0.01
    """Divergence per iteration, in nats, that the KL penalty and a kl_adaptive learning
    rate aim at."""

    initial_kl_penalty: Annotated[float, Field(ge=1e-3, le=1e6)] = 1.0
    """Weight of the KL penalty at first; multiplied by 1.5 after an iteration whose
    divergence is more than 1.3 kl_target, divided by 1.5 after less than 0.7 of it,
    from 1e-3 to 1e6. Only used with an objective that has one."""

    kl_cutoff_factor: _Weight = 2.0
    """Times kl_target: divergence of a minibatch beyond which its square is penalised
    too. Only used with a KL penalty."""

    kl_cutoff_coefficient: Annotated[float, Field(ge=0.0, le=1e9)] = 1000.0
    """Weight of that square; 0 leaves it out. Only used with a KL penalty."""

    max_kl: _Weight = 0.05
    """Divergence KL(old || new) of an iteration, in nats, beyond which an epoch is
    undone: the policy then stays as it was before it, and only the value goes on to
    learn. 0 for no limit."""

    value_coefficient: _Weight = 0.5
    """Weight of the value loss."""

    value_clip_range: _Weight = 0.0
    """Values earn nothing by moving further than this in one iteration, in units of
    scaled rewards; 0 for no limit, which is usually better."""

    entropy_coefficient: _Weight = 0.0
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

    observation_clip: _Positive = 10.0
    """Normalised observations are clipped to +- this."""

    scale_rewards: bool = True
    """Whether rewards are divided by the running std of the discounted return."""

    reward_clip: _Positive = 10.0
    """Scaled rewards are clipped to +- this. Only used with scale_rewards."""

    network: str = "auto"
    """Kind of networks: auto, mlp, cnn, or a function of your own. "mlp" joins all that
    is observed into a vector, "cnn" has convolutions for images, and "auto" is "cnn"
    where there are any. "package.module:function" and "path/to/file.py:function" name
    a function that makes a model, see docs/networks.md."""

    shared_torso: bool = True
    """Whether policy and value share the convolutions of a "cnn"."""

    policy_layers: _Layers = (64, 64)
    """Hidden layers of the policy network; those of a "cnn" follow its torso."""

    value_layers: _Layers = (64, 64)
    """Hidden layers of the value network."""

    recurrent_size: Annotated[int, Field(ge=0, le=65_536)] = 0
    """Units of a GRU between hidden layers and heads, one in the policy and one in the
    value network: for tasks in which an observation does not tell all; see
    docs/recurrent.md. 0 is none."""

    sequence_length: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Batch steps through which a gradient step of a recurrent policy looks back; 0 is
    the horizon, and else it must divide it. Minibatches are made of whole sequences, so
    minibatch_size must be a multiple of it. Only used with recurrent_size."""

    activation: Literal["elu", "gelu", "relu", "silu", "tanh"] = "tanh"
    """Activation of the hidden layers: elu, gelu, relu, silu or tanh."""

    initial_log_std: Annotated[float, Field(ge=-20.0, le=2.0)] = -0.5
    """Log standard deviation of a Gaussian policy at the start."""

    state_dependent_std: bool = False
    """Whether a Gaussian policy's network gives standard deviations, too, or they are
    parameters that do not depend on what is observed."""

    action_distribution: Literal["gaussian", "squashed_gaussian"] = "gaussian"
    """What Box actions are drawn from: "gaussian", clipped to the bounds; or
    "squashed_gaussian", brought within them by tanh, for Boxes with finite bounds."""

    jit_compile: bool = True
    """Whether updates are compiled with XLA: slow to start, several times faster."""

    use_gpu: bool = False
    """Whether a GPU, if there is one, learns and acts: networks without convolutions
    are sooner done without."""

    evaluation_episodes: _Count = 100
    """Complete episodes of the evaluation that ends a run."""

    evaluate_every: _Steps = 0
    """Env steps of training between evaluations on the way; 0 for none. They take envs
    of their own meanwhile, count as no steps, and change nothing of the training. There
    is one after the last iteration besides."""

    curve_episodes: _Count = 20
    """Complete episodes of each evaluation on the way: the same ones every time."""

    report_every: _Steps = 0
    """Env steps between rows of metrics, which cover all that lies between; 0 for a row
    per iteration. An evaluation is reported at once."""

    checkpoint_every: _Steps = 0
    """Env steps between checkpoints; 0 leaves it to checkpoint_seconds. There is one
    after the first and the last iteration and after the best evaluation besides."""

    checkpoint_seconds: Annotated[float, Field(ge=0.0, le=1e9)] = 60.0
    """Seconds after which an iteration ends with a checkpoint in any case."""

    checkpoints_to_keep: _Count = 3
    """How many of the newest checkpoints stay on disk, besides the best."""

    callbacks: _Words = ()
    """Your functions or classes that each iteration calls; see docs/research.md."""

    step_timeout_seconds: _Seconds = 30.0
    """Seconds that a step of an env may take; servers have a limit of their own."""

    reset_timeout_seconds: _Seconds = 120.0
    """Seconds that a reset of an env may take; servers have a limit of their own."""

    server_lost_after_seconds: _Seconds = 60.0
    """Seconds of silence after which an env server is given up."""

    on_server_lost: Literal["raise", "pad"] = "raise"
    """What a server that was given up does: "raise" ends the training; "pad" leaves its
    rows out of it until the server is back."""

    min_servers: Annotated[int, Field(ge=0, le=65_536)] = 0
    """Env servers that must be there to begin; 0 for all."""

    num_servers: Annotated[int, Field(ge=0, le=65_536)] = 0
    """Env servers to spread the envs over, if more than have an address at first."""

    insecure: bool = False
    """Whether env servers are spoken to without keys, in a network that you trust."""

    padding_after_seconds: Annotated[float, Field(ge=0.0, le=1e6)] = 0.1
    """Seconds that a step waits for envs that are not there (their worker is being
    replaced, or their server is silent) before the others go on without them."""

    max_restarts: Annotated[int, Field(ge=0, le=2**31)] = 5
    """How often a worker that ends without a step in between is replaced; servers have
    a limit of their own."""

    on_fault: Literal["truncate", "raise"] = "truncate"
    """What a failed env does: "truncate" ends its episode, "raise" the training."""

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, content: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            config = handler(content)
            parse_wrappers(config.wrappers)
        except ValidationError as error:
            words = [in_words(each, cls.model_fields) for each in error.errors()]
            raise ConfigError(" ".join(words)) from None
        except WrapperError as error:
            raise ConfigError(f"{error}.") from None
        misfit = _misfit(config)
        if misfit is not None:
            raise ConfigError(misfit)
        return config

    @property
    def clips_ratios(self) -> bool:
        """Whether the objective clips probability ratios."""
        return self.objective != "penalty"

    @property
    def penalizes_kl(self) -> bool:
        """Whether the objective has a KL penalty."""
        return self.objective in ("penalty", "clip_and_penalty")

    @property
    def steps_per_iteration(self) -> int:
        """Env steps that one iteration collects."""
        return self.num_envs * self.horizon

    @property
    def planned_steps(self) -> int:
        """Env steps of the whole iterations that fit into `total_steps`."""
        return self.total_steps - self.total_steps % self.steps_per_iteration

    def is_over_after(self, steps: int) -> bool:
        """Whether no whole iteration fits into what these valid steps have left."""
        return steps + self.steps_per_iteration > self.total_steps

    def share_of(self, num_learners: int) -> Self:
        """Return what each of so many learners has, or raise if it is not the same."""
        num_envs, size = self.num_envs, self.minibatch_size
        if num_envs % num_learners or size % num_learners:
            raise ConfigError(
                f"num_envs, minibatch_size: expected multiples of the {num_learners} "
                f"learners, got {num_envs} and {size}; change them, or TF_CONFIG."
            )
        size //= num_learners
        return self.replace(num_envs=num_envs // num_learners, minibatch_size=size)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some values changed, checked like any other."""
        return self.model_validate({**dict(self), **changes})


def _misfit(config: Config) -> str | None:
    """Say which setting does not fit the others, if one does not."""
    steps = config.steps_per_iteration
    if config.network not in _NETWORKS and not _FUNCTION.fullmatch(config.network):
        return (
            f"network: expected {', '.join(_NETWORKS)}, package.module:function or "
            f"path/to/file.py:function, got {config.network!r}."
        )
    if steps % config.minibatch_size:
        return (
            f"minibatch_size: expected a divisor of num_envs * horizon = {steps}, "
            f"got {config.minibatch_size}."
        )
    if config.total_steps < steps:
        return (
            "total_steps: expected at least one iteration, num_envs * horizon = "
            f"{steps}, got {config.total_steps}."
        )
    return _recurrent_misfit(config) if config.recurrent_size else None


def _recurrent_misfit(config: Config) -> str | None:
    length = config.sequence_length or config.horizon
    if ":" in config.network:
        return (
            "recurrent_size: expected 0 with a custom network, "
            f"{config.network}, got {config.recurrent_size}."
        )
    if config.horizon % length:
        return (
            "sequence_length: expected 0 or a divisor of horizon = "
            f"{config.horizon}, got {length}."
        )
    if config.minibatch_size % length:
        origin = "sequence_length" if config.sequence_length else "horizon"
        return (
            "minibatch_size: expected a multiple of the length of a recurrent "
            f"policy's sequences, {origin} = {length}, got {config.minibatch_size}; "
            "change it, or set sequence_length to a divisor of both."
        )
    return None
