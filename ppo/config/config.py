"""The settings of a training run: a frozen dataclass, validated when it is created.

The defaults suit continuous control. `named_configs` contains tuned settings for
particular tasks, and reads configs from files.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from msgspec import Meta

from envserve.envs.user_envs import env_name_of
from envserve.errors import WrapperError
from envserve.settings import NonFinite, convert, convert_fields
from envserve.text import Name
from envserve.wrappers.specs import parse_wrappers
from ppo.config.sac import SAC_DEFAULTS, Count, SACSettings
from ppo.errors import ConfigError, suggestion

CODE_SETTINGS = {
    "algorithm": ("ppo", "sac"),
    "network": ("auto", "mlp", "cnn"),
    "objective": ("clip", "penalty", "clip_and_penalty"),
    "optimizer": ("adam", "adamw", "rmsprop", "sgd"),
    "learning_rate_schedule": ("constant", "linear", "kl_adaptive"),
}
"""Settings whose value is a built-in name or the name of user code, and the built-in
names of each."""
_FUNCTION = re.compile(r"(.+\.py|[^\W\d]\w*(\.[^\W\d]\w*)*):[^\W\d]\w*")

#: Maximum depth of nested lists and dicts; messages to env servers allow 32 levels.
_MAX_DEPTH = 30
_Steps = Annotated[int, Meta(ge=0, le=2**53)]
_Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
_Positive = Annotated[float, Meta(ge=1e-12, le=1e9)]
_Seconds = Annotated[float, Meta(ge=1e-3, le=1e6)]
_Weight = Annotated[float, Meta(ge=0.0, le=1e6)]
_LayerSize = Annotated[int, Meta(ge=1, le=65_536)]
_Layers = Annotated[tuple[_LayerSize, ...], Meta(examples=["64,64"])]
_Name = Annotated[str, Meta(min_length=1)]
_Names = Annotated[tuple[_Name, ...], Meta(examples=["ale_py"])]
_Table = Mapping[str, Any]

#: Names of settings in other libraries, with the corresponding names here.
_ALIASES = {
    "lr": "learning_rate",
    "gamma": "discount",
    "lam": "gae_lambda",
    "env": "env_name",
    "env_id": "env_name",
    "n_envs": "num_envs",
    "timesteps": "total_steps",
    "total_timesteps": "total_steps",
    "n_steps": "horizon",
    "num_steps": "horizon",
    "rollout_length": "horizon",
    "n_epochs": "epochs",
    "update_epochs": "epochs",
    "batch_size": "minibatch_size",
    "ent_coef": "entropy_coefficient",
    "vf_coef": "value_coefficient",
    "clip_coef": "clip_range",
    "clip_range_vf": "value_clip_range",
    "max_grad_norm": "max_gradient_norm",
    "target_kl": "max_kl",
    "hidden_sizes": "policy_layers",
    "net_arch": "policy_layers",
    "buffer_size": "replay_size",
    "learning_starts": "random_steps",
}

#: Maps algorithms to the dataclasses of their specific settings.
SETTINGS_TYPES: Mapping[str, type[Any]] = {"sac": SACSettings}
#: Maps algorithms to their defaults for settings that all algorithms have.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"sac": SAC_DEFAULTS}
#: Settings of PPO, which algorithms in a user's file may also use. They are fields of
#: `Config`; see "The settings of PPO are fields of Config" in the decisions.
PPO_SETTINGS = frozenset(
    {
        *("epochs", "minibatch_size", "optimizer", "learning_rate_schedule"),
        *("adam_epsilon", "max_gradient_norm", "gae_lambda", "objective"),
        *("clip_range", "decay_clip_range", "kl_target", "initial_kl_penalty"),
        *("kl_cutoff_factor", "kl_cutoff_coefficient", "max_kl", "value_coefficient"),
        *("value_clip_range", "entropy_coefficient", "decay_entropy_coefficient"),
        *("normalize_advantages", "recompute_advantages", "scale_rewards"),
        *("reward_clip", "network", "shared_torso", "recurrent_size"),
        *("sequence_length", "state_dependent_std", "action_distribution"),
    }
)

_Type = TypeVar("_Type", bound=type)


def check_set_once(
    name: str, table: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Raise ConfigError if the table `name` and the other settings share a key."""
    if duplicates := table.keys() & settings.keys():
        raise ConfigError(
            f"{', '.join(sorted(duplicates))}: set twice, in the table {name} and "
            "outside of it; remove one of the two."
        )


def _accept_algorithm_settings(kind: _Type) -> _Type:
    """Let the constructor of `Config` accept algorithm-specific settings as arguments.

    The constructor then also applies the defaults of the algorithm for settings that
    all algorithms have.
    """
    untyped: Any = kind
    create, known = untyped.__init__, untyped.__dataclass_fields__

    @functools.wraps(create)
    def construct(self: Any, /, **values: Any) -> None:
        algorithm = str(values.get("algorithm", "ppo"))
        for name in CODE_SETTINGS["algorithm"]:
            table = _table_of(name, values.pop(name, {}), algorithm)
            check_set_once(name, table, values)
            values |= table
        specific = {key: values.pop(key) for key in [*values] if key not in known}
        # `Algorithm.check` checks the settings of a user's class.
        if ":" not in algorithm:
            _check_keys(specific, algorithm, known)
        settings = values.get("algorithm_settings", {})
        if specific and isinstance(settings, Mapping):
            values["algorithm_settings"] = {**settings, **specific}
        create(self, **{**_DEFAULTS.get(algorithm, {}), **values})

    untyped.__init__ = construct
    return kind


def _table_of(name: str, table: Any, algorithm: Any) -> Mapping[str, Any]:
    """Return the settings in a table `[name]` of a config file.

    Raises:
      ConfigError: The value is not a table, or the algorithm is not `name`.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"{name}: expected a table of settings of the algorithm {name}, got "
            f"{table!r:.200}. With --set, set each of them by its name."
        )
    if table and name != algorithm:
        raise ConfigError(
            f"{name}: expected this table only with the algorithm {name}; the "
            f"algorithm is {algorithm}. Remove the table, or change the algorithm."
        )
    return table


def suggest_setting(key: str, known: Iterable[str]) -> str:
    """Return ` Did you mean X?`, also for the name of another library, or ""."""
    return suggestion(_ALIASES.get(key, key), known)


def _check_keys(
    values: Mapping[str, Any], algorithm: Any, known: Mapping[str, Any]
) -> None:
    """Raise `ConfigError` unless all keys are settings of the built-in `algorithm`.

    `known` contains the fields of `Config`, which get a different error message.
    """
    settings = {
        name: [field.name for field in dataclasses.fields(kind)]
        for name, kind in SETTINGS_TYPES.items()
    }
    valid_keys, errors = settings.pop(algorithm, []), []
    for key in values:
        owners = [name for name, keys in settings.items() if key in keys]
        if key in valid_keys:
            continue
        if owners and key not in _ALIASES:
            text = f"{key} is a setting of {owners[0]}; the algorithm is {algorithm}."
        elif key in known:
            text = f"{key} is a setting of all algorithms or of ppo; write it outside "
            text += "of algorithm_settings."
        elif key in ("num_workers", "workers"):
            text = f"{key} is not a setting; use the option --num-workers."
        else:
            text = f"unknown key {key!r}.{suggest_setting(key, [*known, *valid_keys])}"
        errors.append(f"{text} `ppo configs NAME --all` lists all keys.")
    if errors:
        raise ConfigError(" ".join(errors))


@_accept_algorithm_settings
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a training run: environments, algorithm, reports.

    The constructor also accepts the settings of the algorithm as keyword arguments, and
    stores them in `algorithm_settings`.

    Raises:
      ConfigError: A key is unknown, or a value has the wrong type or is out of range.
        The message names every such key.
    """

    env_name: Annotated[str, Meta(min_length=1, examples=["CartPole-v1"])]
    """Environment: a name registered with Gymnasium, such as HalfCheetah-v5, or one
    from your code, such as my_env.py:Walk or my_package:Walk-v0."""

    env_kwargs: Annotated[_Table, Meta(examples=['{"name": 1}'])] = dataclasses.field(
        default_factory=dict
    )
    """Keyword arguments for the environment's constructor, as in `gymnasium.make`.
    Values are numbers, strings, booleans, None, lists and dicts; tuples become lists.
    """

    import_modules: _Names = ()
    """Modules that register environments or wrappers, for local worker processes to
    import. Env servers import the modules passed to their own `--import` option."""

    wrappers: Annotated[
        tuple[_Table, ...], Meta(examples=['[{name = "ActionRepeat", amount = 4}]'])
    ] = ()
    """Wrappers to apply to each environment, innermost first. Each is a table with the
    wrapper's name and arguments, such as `{name = "ActionRepeat", amount = 4}`; see
    "Wrappers" in the docs."""

    spare_envs: bool = False
    """Whether to keep a second copy of each environment and reset it in the background,
    so that slow resets do not delay the batch. Doubles the memory usage of the
    environments."""

    stagger_episodes: bool = False
    """Whether to truncate the first training episode of each environment at a random
    step, so that environments with a time limit do not all reset at the same step. The
    step is at most the time limit; without a time limit, no episode is truncated."""

    training_time_limit: _Steps = 0
    """Maximum number of steps in a training episode, after which it is truncated; 0
    means no additional limit. With a low limit, the agent sees more initial states.
    Evaluations always play complete episodes."""

    algorithm: str = "ppo"
    """Algorithm: ppo, sac, or a class, such as my.py:Algorithm. "sac" is for Box
    actions, and learns from fewer environment steps. For your own classes, see "Your
    own algorithm" in the docs."""

    algorithm_settings: Annotated[_Table, Meta(examples=['{"batch_size": 256}'])] = (
        dataclasses.field(default_factory=dict)
    )
    """Settings that are specific to the algorithm. In a file, write them as a table
    with the name of the algorithm, such as `[sac]`; in a command, set each by its name,
    such as `--set batch_size=256`."""

    total_steps: Count = 1_000_000
    """Environment steps to train for, summed over all environments. Training ends
    before the first iteration that would exceed this number. Steps that are lost
    because an environment failed do not count."""

    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Seed for all randomness: initial weights, sampled actions, the shuffling of
    minibatches, and the environments."""

    num_envs: Annotated[int, Meta(ge=1, le=65_536)] = 16
    """Number of environments, which are stepped together as one batch."""

    num_splits: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of groups that the batch is divided into; 1 steps all environments at the
    same time. With 2, the policy computes the actions of one group while the
    environments of the other group step. This is faster if stepping the environments
    takes longer than running the policy, or if CPU cores are idle. The collected data
    differs only by floating-point rounding in the policy."""

    act_on: Annotated[float, Meta(ge=0.001, le=1.0)] = 1.0
    """Fraction of the batch that the policy waits for before it computes the next
    actions of the environments that have finished their step. Lower it, to 0.25 for
    example, if single steps sometimes take much longer than others; see "Train" in the
    docs. Each environment still takes horizon steps per iteration. Requires
    num_splits = 1."""

    horizon: Annotated[int, Meta(ge=1, le=1_000_000)] = 128
    """Number of steps per environment in each iteration (the rollout length). One
    iteration collects num_envs * horizon steps."""

    overlap: bool = False
    """Whether to collect the next rollout during the update, with the policy from
    before that update. See "Train" in the docs. Do not change this setting when you
    resume a run."""

    epochs: Annotated[int, Meta(ge=1, le=10_000)] = 10
    """Number of passes over the steps of each iteration."""

    minibatch_size: Count = 64
    """Number of environment steps per minibatch; must divide num_envs * horizon."""

    learning_rate: _Fraction = 3e-4
    """Initial learning rate of the optimizer."""

    optimizer: str = "adam"
    """Optimizer: adam, adamw, rmsprop, sgd, or a custom function, such as
    my.py:optimizer, which gets the settings and returns a Keras optimizer. See "Your
    own losses, callbacks and metrics" in the docs."""

    learning_rate_schedule: str = "linear"
    """Learning rate schedule: constant, linear, kl_adaptive, or a custom function, such
    as my.py:warmup, which maps the fraction of the run that is complete to a factor of
    learning_rate. "linear" decays the rate to 0 over the run. "kl_adaptive" adapts it
    after each iteration: the rate is divided by 1.5 if the KL divergence exceeded 2 *
    kl_target, and multiplied by 1.5 if the divergence was between 1e-4 nats and 0.5 *
    kl_target. The rate stays between 1e-6 and learning_rate."""

    adam_epsilon: Annotated[float, Meta(ge=1e-12, le=1.0)] = 1e-5
    """Epsilon of adam and adamw, which is added to the square root of the second
    moment."""

    max_gradient_norm: _Positive = 0.5
    """Maximum gradient norm; larger gradients are scaled down to it. The gradients of
    the policy network and the value network are clipped separately, unless the two
    networks share variables."""

    discount: _Fraction = 0.99
    """Discount factor gamma."""

    gae_lambda: _Fraction = 0.95
    """Lambda of generalised advantage estimation (GAE)."""

    objective: str = "clip"
    """Policy loss: clip, penalty, clip_and_penalty, or a custom function, such as
    my.py:loss. "clip" clips the probability ratios, "penalty" adds a penalty on
    KL(old || new), and "clip_and_penalty" does both. For custom losses, see "Your own
    losses, callbacks and metrics" in the docs."""

    clip_range: Annotated[float, Meta(ge=1e-6, le=1.0)] = 0.2
    """Clip range epsilon: the objective does not reward probability ratios outside
    1 +- epsilon. Not used with the objective "penalty"."""

    decay_clip_range: bool = False
    """Whether to decay clip_range linearly to 0 over the run."""

    kl_target: Annotated[float, Meta(ge=1e-9, le=1000.0)] = 0.01
    """Target KL divergence per iteration, in nats. Only used with a KL penalty or with
    the learning rate schedule "kl_adaptive"."""

    initial_kl_penalty: Annotated[float, Meta(ge=1e-3, le=1e6)] = 1.0
    """Initial coefficient of the KL penalty. After each iteration, it is multiplied by
    1.5 if the KL divergence exceeded 1.3 * kl_target, and divided by 1.5 if the
    divergence was below 0.7 * kl_target. It stays between 1e-3 and 1e6. Only used with
    the objectives "penalty" and "clip_and_penalty"."""

    kl_cutoff_factor: _Weight = 2.0
    """Multiple of kl_target above which the KL divergence of a minibatch also incurs a
    quadratic penalty: the excess is squared and multiplied by kl_cutoff_coefficient.
    Only used with a KL penalty."""

    kl_cutoff_coefficient: Annotated[float, Meta(ge=0.0, le=1e9)] = 1000.0
    """Coefficient of the quadratic KL penalty; 0 disables it. Only used with a KL
    penalty."""

    max_kl: _Weight = 0.05
    """Maximum KL divergence per iteration, KL(old || new) in nats; 0 means no limit. An
    epoch that exceeds it is undone: the policy's weights are restored to their values
    before the epoch, and the remaining epochs only train the value network. If the two
    networks share variables, the update ends instead."""

    value_coefficient: _Weight = 0.5
    """Coefficient of the value loss."""

    value_clip_range: _Weight = 0.0
    """Clip range of the value loss, in units of scaled rewards: within one iteration,
    the loss does not reward larger changes of a value. 0 disables clipping, and usually
    works better."""

    entropy_coefficient: _Weight = 0.0
    """Coefficient of the entropy bonus; 0 disables it."""

    decay_entropy_coefficient: bool = False
    """Whether to decay entropy_coefficient linearly to 0 over the run."""

    normalize_advantages: bool = False
    """Whether to normalise the advantages of each minibatch to mean 0 and standard
    deviation 1. Without normalisation, advantages of scaled rewards are of order 1, and
    become smaller when there is little left to learn."""

    recompute_advantages: bool = True
    """Whether to recompute advantages and value targets before each epoch, instead of
    once per iteration."""

    normalize_observations: bool = True
    """Whether to normalise Box observations with running means and standard deviations.
    Images are scaled to [0, 1] instead."""

    observation_clip: _Positive = 10.0
    """Normalised observations are clipped to +- this value. Only used with
    normalize_observations."""

    scale_rewards: bool = True
    """Whether to divide rewards by the running standard deviation of the discounted
    return."""

    reward_clip: _Positive = 10.0
    """Scaled rewards are clipped to +- this value. Only used with scale_rewards."""

    network: str = "auto"
    """Network architecture: auto, mlp, cnn, or a custom function. "mlp" concatenates
    all observations into one vector. "cnn" processes images with convolutions. "auto"
    means "cnn" if the observations contain an image, and "mlp" otherwise. A custom
    function, written as package.module:function or path/to/file.py:function, builds a
    model; see "Networks, spaces and action masks" in the docs."""

    shared_torso: bool = True
    """Whether the policy and the value function share the convolutional layers of a
    "cnn"."""

    policy_layers: _Layers = (64, 64)
    """Sizes of the policy network's hidden layers; in a "cnn" they follow the
    convolutional layers."""

    value_layers: _Layers = (64, 64)
    """Sizes of the value network's hidden layers; in a "cnn" they follow the
    convolutional layers."""

    recurrent_size: Annotated[int, Meta(ge=0, le=65_536)] = 0
    """Number of GRU units in the policy network and in the value network, each of which
    has a GRU after its hidden layers; 0 disables recurrence. Recurrence helps if a
    single observation does not show the complete state; see "Recurrent policies" in the
    docs."""

    sequence_length: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Number of steps of backpropagation through time; 0 means the horizon. Must divide
    the horizon. Minibatches consist of complete sequences, so minibatch_size must be a
    multiple of the sequence length. Only used with recurrent_size."""

    activation: Literal["elu", "gelu", "relu", "silu", "tanh"] = "tanh"
    """Activation function of the hidden layers: elu, gelu, relu, silu or tanh."""

    initial_log_std: Annotated[float, Meta(ge=-20.0, le=2.0)] = -0.5
    """Initial log standard deviation of a Gaussian policy."""

    state_dependent_std: bool = False
    """Whether the policy network outputs the standard deviations of a Gaussian policy,
    so that they depend on the observation. Otherwise they are trained parameters that
    are the same for all observations."""

    action_distribution: Literal["gaussian", "squashed_gaussian"] = "gaussian"
    """Distribution of Box actions: gaussian or squashed_gaussian. "gaussian" clips the
    actions to the bounds of the action space. "squashed_gaussian" maps them into the
    bounds with tanh; all bounds must be finite."""

    jit_compile: bool = True
    """Whether to compile the update with XLA, which delays the start but makes updates
    several times faster."""

    use_gpu: bool = False
    """Whether to run the networks on a GPU, if there is one. Networks without
    convolutions are usually faster on the CPU."""

    evaluation_episodes: Count = 100
    """Number of complete episodes in the final evaluation of a run."""

    evaluation_actions: Literal["mode", "sample"] = "mode"
    """How the policy chooses actions in evaluations and videos: mode or sample. "mode"
    takes the most likely action; "sample" samples from the policy, as in training. Use
    "sample" if the most likely actions can lead to endless loops, for example in grid
    worlds."""

    evaluation_time_limit: Count = 10_000
    """Number of steps after which an episode of an evaluation is cut off if it has not
    ended; it then counts with its return so far. Checked every 100 steps."""

    evaluate_every: _Steps = 0
    """Environment steps between evaluations during training; 0 disables them. These
    evaluations use separate environments and do not affect training; their steps do not
    count. If enabled, an evaluation also follows the last iteration."""

    curve_episodes: Count = 20
    """Number of complete episodes in each evaluation during training. All evaluations
    use the same seeds."""

    report_every: _Steps = 0
    """Environment steps between rows of metrics; 0 means one row per iteration. A row
    covers all iterations since the previous row. Every evaluation is followed by a row.
    """

    checkpoint_every: _Steps = 0
    """Environment steps between checkpoints; 0 means that only checkpoint_seconds
    applies. Checkpoints are also written after the first iteration, after the last
    iteration, and after each evaluation that is the best so far."""

    checkpoint_seconds: Annotated[float, Meta(ge=0.0, le=1e9)] = 60.0
    """Seconds after a checkpoint at which the next one is due; it is written at the end
    of the current iteration."""

    checkpoints_to_keep: Count = 3
    """Number of most recent checkpoints to keep. The checkpoint of the best evaluation
    is kept as well."""

    callbacks: Annotated[tuple[_Name, ...], Meta(examples=["my.py:callback"])] = ()
    """Custom functions or classes that are called after each iteration, such as
    my.py:callback. See "Your own losses, callbacks and metrics" in the docs."""

    preload: bool = True
    """Whether the modules of local environments are imported once, in the process from
    which workers are forked. If false, each worker imports them, so that they may start
    threads or use a GPU; see "What forking means for envs" in the docs."""

    step_timeout_seconds: _Seconds = 30.0
    """Timeout for a step of a local environment, in seconds. Env servers have their own
    timeout."""

    reset_timeout_seconds: _Seconds = 120.0
    """Timeout for a reset of a local environment, in seconds. Env servers have their
    own timeout."""

    server_lost_after_seconds: _Seconds = 60.0
    """Seconds after which an env server that sends no message, or ignores a step or
    reset, is considered lost."""

    operation_timeout_seconds: _Seconds = 3600.0
    """Seconds for which an env server may report a step or reset as running, or rebuild
    environments, before it is considered lost."""

    on_server_lost: Literal["raise", "pad"] = "raise"
    """What happens when an env server is lost: raise or pad. "raise" ends the run with
    an error. "pad" continues without the server's environments until the server is
    back."""

    min_servers: Annotated[int, Meta(ge=0, le=65_536)] = 0
    """Minimum number of env servers that must be available at the start; 0 means
    all."""

    num_servers: Annotated[int, Meta(ge=0, le=65_536)] = 0
    """Number of env servers to spread the environments over. Set it if more servers
    will join later; 0 means the number of servers that have an address at the start."""

    insecure: bool = False
    """Whether to connect to env servers without keys, that is, without encryption and
    authentication. Only for trusted networks."""

    padding_after_seconds: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.1
    """Seconds that a step waits for absent environments before it continues without
    them. Environments are absent while their worker is restarted or their server does
    not reply."""

    max_restarts: Annotated[int, Meta(ge=0, le=2**31)] = 5
    """Maximum number of consecutive restarts of a local worker without a valid step of
    the failing env; after that, the run ends with the env's error. Env servers have
    their own limit."""

    on_fault: Literal["truncate", "raise"] = "truncate"
    """What happens when an environment fails: truncate or raise. "truncate" ends its
    episode and continues; "raise" ends the run with an error."""

    nonfinite: NonFinite = "raise"
    """What happens when an observation or reward is NaN or infinite: raise, mask or
    pass. "raise" ends the run with an error. "mask" ends the episode like any other
    failure (see on_fault) and counts it in the metric nonfinite_episodes. "pass" skips
    the check in the environment's worker; the trainer then ends the run if it receives
    such a value."""

    def __post_init__(self) -> None:
        """Check all values, first separately and then in combination."""
        if errors := convert_fields(self):
            raise ConfigError(" ".join(f"{error}." for error in errors))
        if ":" not in self.algorithm:
            self._convert_algorithm_settings()
        for key in ("env_kwargs", "algorithm_settings"):
            vars(self)[key] = _as_json_types(getattr(self, key), key)
        vars(self)["wrappers"] = tuple(_as_json_types(self.wrappers, "wrappers"))
        try:
            parse_wrappers(self.wrappers)
        except WrapperError as error:
            raise ConfigError(f"{error}.") from None
        try:
            convert(env_name_of(self.env_name), Name)
        except ValueError as error:
            raise ConfigError(
                f"env_name: {error}, got {self.env_name!r:.200}...."
            ) from None
        for key, value in vars(self).items():
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError:  # bytes of a command that are not UTF-8
                raise ConfigError(
                    f"{key}: expected text in UTF-8, got {value!a:.200}; rename the "
                    "file or folder."
                ) from None
        for key, expected in _conflicts(self):
            raise ConfigError(
                f"{key}: expected {expected}, got {getattr(self, key)!r}."
            )

    def _convert_algorithm_settings(self) -> None:
        """Check the settings of a built-in algorithm, and add its defaults."""
        _check_keys(self.algorithm_settings, self.algorithm, vars(self))
        if kind := SETTINGS_TYPES.get(self.algorithm):
            settings = kind(**self.algorithm_settings)
            if errors := convert_fields(settings):
                raise ConfigError(" ".join(f"{error}." for error in errors))
            vars(self)["algorithm_settings"] = vars(settings)
            for key in sorted(PPO_SETTINGS & self.non_defaults().keys()):
                raise ConfigError(
                    f"{key} is a setting of ppo; the algorithm is {self.algorithm}."
                )

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
        """Number of env steps that one iteration collects."""
        return self.num_envs * self.horizon

    @property
    def planned_steps(self) -> int:
        """Number of env steps in the complete iterations within `total_steps`."""
        return self.total_steps - self.total_steps % self.steps_per_iteration

    def is_finished_after(self, steps: int) -> bool:
        """Return whether the remaining steps are too few for another iteration.

        Args:
          steps: Valid env steps so far.
        """
        return steps + self.steps_per_iteration > self.total_steps

    def check_algorithm(self) -> None:
        """Check settings of a built-in algorithm against the length of the run.

        `Algorithm.check` does this too, but requires TensorFlow.

        Raises:
          ConfigError: The algorithm would never train the policy.
        """
        if kind := SETTINGS_TYPES.get(self.algorithm):
            kind(**self.algorithm_settings).check(self.planned_steps)

    def per_learner(self, num_learners: int) -> Self:
        """Return the config of one of several learners, with its share of the batch.

        Raises:
          ConfigError: Envs or minibatches cannot be divided equally, or the algorithm
            supports only one learner.
        """
        num_envs, size = self.num_envs, self.minibatch_size
        if num_learners == 1:
            return self
        if self.algorithm in SETTINGS_TYPES:
            raise self.several_learners_error(num_learners)
        if num_envs % num_learners or size % num_learners:
            raise ConfigError(
                f"num_envs, minibatch_size: expected multiples of {num_learners}, the "
                f"number of learners, got {num_envs} and {size}; change them, or "
                "change the number of learners in TF_CONFIG."
            )
        num_envs, size = num_envs // num_learners, size // num_learners
        try:
            return self.replace(num_envs=num_envs, minibatch_size=size)
        except ConfigError as error:
            raise ConfigError(
                f"Each of {num_learners} learners has num_envs = {num_envs} and "
                f"minibatch_size = {size}: {error}"
            ) from None

    def several_learners_error(self, num_learners: int) -> ConfigError:
        """Return the error that the algorithm supports only one learner."""
        return ConfigError(
            f"algorithm {self.algorithm}: expected one learner, because this "
            f"algorithm does not average gradients, got {num_learners}; train without "
            "--distribute and --on."
        )

    def replace(self, /, **changes: Any) -> Self:
        """Return a copy with some values changed; the new values are validated.

        If the algorithm changes, defaults become those of the new algorithm, and the
        settings that are specific to the old one are omitted.
        """
        algorithm = str(changes.get("algorithm", self.algorithm))
        if algorithm == self.algorithm:
            return dataclasses.replace(self, **changes)
        values = self.non_defaults()
        if env_name_of(algorithm) != env_name_of(self.algorithm):
            values.pop("algorithm_settings", None)  # unless only the file has moved
        return type(self)(**values | changes)

    @property
    def all_settings(self) -> dict[str, Any]:
        """All settings, including those that are specific to the algorithm, by name."""
        values = {**vars(self), **self.algorithm_settings}
        del values["algorithm_settings"]
        return values

    def non_defaults(self) -> dict[str, Any]:
        """Return a dict of the settings that differ from their defaults."""
        defaults = {
            field.name: {} if field.default is dataclasses.MISSING else field.default
            for field in dataclasses.fields(self)
        }
        defaults |= _DEFAULTS.get(self.algorithm, {})
        if kind := SETTINGS_TYPES.get(self.algorithm):
            defaults["algorithm_settings"] = vars(kind())
        return {k: value for k, value in vars(self).items() if value != defaults[k]}


def _as_json_types(value: Any, where: str, depth: int = 0) -> Any:
    """Return a copy of a value that has only JSON types; tuples become lists.

    Args:
      value: The value.
      where: Setting and keys that lead to the value, for error messages.
      depth: Number of lists and dicts that contain the value, at most `_MAX_DEPTH`.

    Raises:
      ConfigError: The value contains something that JSON cannot represent.
    """
    if depth > _MAX_DEPTH:
        raise ConfigError(
            f"{where:.200}: expected at most {_MAX_DEPTH} levels of nesting."
        )
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {
            key: _as_json_types(item, f"{where}[{key!r}]", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            _as_json_types(item, f"{where}[{index}]", depth + 1)
            for index, item in enumerate(value)
        ]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"{where}: expected a number, string, boolean, None, list, or dict with "
        f"string keys, got {value!r:.200}."
    )


def _conflicts(config: Config) -> Iterator[tuple[str, str]]:
    """Yield settings whose value is an unknown name or conflicts with another setting.

    Each item consists of the key of the setting and a description of valid values.
    """
    for key, known in CODE_SETTINGS.items():
        name = getattr(config, key)
        if name not in known and not _FUNCTION.fullmatch(name):
            forms = "package.module:function or path/to/file.py:function"
            yield key, f"{', '.join(known)}, {forms}"
    steps, size = config.steps_per_iteration, config.minibatch_size
    if steps % size and config.algorithm == "ppo":
        yield "minibatch_size", f"a divisor of num_envs * horizon = {steps}"
    if config.total_steps < steps:
        yield "total_steps", f"at least one iteration, num_envs * horizon = {steps}"
    if config.act_on < 1 and config.num_splits > 1:
        yield "act_on", f"1 with num_splits = {config.num_splits}"
    if not config.recurrent_size:
        return
    origin = "sequence_length" if config.sequence_length else "horizon"
    length = getattr(config, origin)
    if ":" in config.network:
        yield "recurrent_size", f"0 with a custom network, {config.network}"
    if config.horizon % length:
        yield "sequence_length", f"0 or a divisor of horizon = {config.horizon}"
    if size % length:
        yield (
            "minibatch_size",
            f"a multiple of the sequence length of a recurrent policy, {origin} = "
            f"{length} (or set sequence_length to a common divisor of horizon and "
            "minibatch_size)",
        )
