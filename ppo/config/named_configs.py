"""Load named configs, config files and configs for envs; apply `--set KEY=VALUE`.

A named config contains the settings of a task that differ from the defaults, which suit
continuous control. Comments explain the differences. Similar tasks share settings.
"""

import contextlib
import json
import os
import re
import reprlib
import runpy
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from envserve.envs.user_envs import is_user_env, sibling_imports
from envserve.regular_file import open_regular
from envserve.text import with_article
from ppo.config.config import Config, check_set_once
from ppo.errors import ConfigError, suggestion

__all__ = ["CONFIGS"]

#: Maximum size of a file with settings or results.
_MAX_TABLE_BYTES = 1 << 24

# With a GAE lambda of 0.95, advantages are noisier, and the return of some seeds stays
# far below that of the others. Gradient norms differ by a factor of 100 between a
# steady gait and falls. The small maximum norm makes all gradient steps equally large;
# with a much larger maximum, no gradients are clipped.
_MUJOCO: dict[str, Any] = {
    "gae_lambda": 0.9,
    "max_gradient_norm": 0.02,
    "adam_epsilon": 1e-8,
}
# As in Haarnoja et al. 2018, except for the number of envs: with four, 16 gradient
# steps run in one call, which takes less time than 16 calls.
_MUJOCO_SAC: dict[str, Any] = {
    "algorithm": "sac",
    "num_envs": 4,
    "random_steps": 10_000,
}
# Most of the reward is given at the end of an episode, and is so large that reward
# scaling makes all other advantages too small. Without normalised advantages, the mean
# return of LunarLander was 179 instead of 278 (one seed).
_BOX2D: dict[str, Any] = {
    "discount": 0.999,
    "gae_lambda": 0.98,
    "normalize_advantages": True,
}


def _variant(family: Mapping[str, Any], env_name: str, **changes: Any) -> Config:
    """Return the config of an env that shares settings with similar tasks."""
    return Config(env_name=env_name, **{**family, **changes})


def _atari(env_name: str) -> Config:
    """Return the config of an Atari game, with frames and network of Mnih et al. 2015.

    The settings are those of Schulman et al. 2017, with two exceptions: rewards are
    scaled instead of clipped, and the loss of a life does not end an episode, so
    returns are game scores. Published results usually use ten times as many steps.
    """
    is_frameskip_in_env = env_name.startswith("ALE/")
    return Config(
        env_name=env_name,
        env_kwargs={"frameskip": 1} if is_frameskip_in_env else {},
        import_modules=("ale_py",),
        wrappers=(
            {"name": "AtariPreprocessing"},
            {"name": "FrameStackObservation", "stack_size": 4},
        ),
        evaluation_time_limit=30_000,  # games may take 27,000 steps of 4 frames
        **_PIXELS,
    )


_PIXELS: dict[str, Any] = {
    "num_envs": 8,
    "epochs": 4,
    "minibatch_size": 256,
    "learning_rate": 2.5e-4,
    "clip_range": 0.1,
    "decay_clip_range": True,
    "entropy_coefficient": 0.01,
    "normalize_advantages": True,
    "recompute_advantages": False,
    "policy_layers": (),
    "value_layers": (),
    "jit_compile": False,  # on CPUs, convolutions are slower with XLA
    "use_gpu": True,
    "evaluation_episodes": 10,
}

CONFIGS: dict[str, Config] = {
    # Two splits shorten a rollout by a third.
    "cartpole": Config(env_name="CartPole-v1", total_steps=100_000, num_splits=2),
    # Every step has the same reward until the end, so the differences between actions
    # are small after reward scaling. Normalised advantages enlarge them.
    "acrobot": Config(
        env_name="Acrobot-v1",
        total_steps=300_000,
        learning_rate=1e-3,
        gae_lambda=0.9,
        normalize_advantages=True,
    ),
    # Torques take effect within a second, so a low discount suffices, and makes values
    # easier to learn. With a discount of 0.9, some seeds never swing up. Four envs with
    # 256 steps each give twice as many iterations as the defaults, and rollouts that
    # contain whole episodes.
    "pendulum": Config(
        env_name="Pendulum-v1",
        total_steps=300_000,
        num_envs=4,
        horizon=256,
        discount=0.95,
        learning_rate=1e-3,
    ),
    "inverted_pendulum": _variant(_MUJOCO, "InvertedPendulum-v5", total_steps=300_000),
    # Once the pole is balanced, only rare falls are informative. With minibatches of
    # 64, most gradients are noise, so the policy drifts until the pole falls again.
    # Most falls happen at the start of an episode. With the lower time limit, ten times
    # as many episodes start.
    "double_pendulum": _variant(
        _MUJOCO,
        "InvertedDoublePendulum-v5",
        training_time_limit=100,
        minibatch_size=2048,
        epochs=25,
        learning_rate=1e-3,
    ),
    "reacher": _variant(_MUJOCO, "Reacher-v5"),
    # A stroke pays off only much later. With a discount of 0.99, or with 0.9999 and the
    # lambda and the short rollouts of the other MuJoCo tasks, the policy hardly
    # moves (return 70 instead of 361, one seed). These settings are those of RL
    # Baselines3 Zoo. With the maximum gradient norm of the other MuJoCo tasks,
    # exploration ends before the best stroke is found (304 instead of 360, five seeds).
    "swimmer": Config(
        env_name="Swimmer-v5",
        discount=0.9999,
        gae_lambda=0.98,
        num_envs=4,
        horizon=1024,
        minibatch_size=256,
        learning_rate=6e-4,
    ),
    "hopper": _variant(_MUJOCO, "Hopper-v5"),
    # Episodes are long, because they end only at the time limit. A rollout therefore
    # contains diverse states only if it has many envs. The envs keep all cores busy, so
    # two splits would slow the rollouts down.
    "cheetah": _variant(_MUJOCO, "HalfCheetah-v5", num_envs=64, horizon=32),
    # The walker learns from falls, which cause large gradients. With the maximum
    # gradient norm of the other MuJoCo tasks, the return was 2,560 instead of 4,063
    # (four seeds). The entropy bonus keeps enough exploration to find another gait.
    "walker": Config(env_name="Walker2d-v5", gae_lambda=0.9, entropy_coefficient=3e-4),
    "ant": _variant(_MUJOCO, "Ant-v5", total_steps=3_000_000),
    "humanoid": _variant(_MUJOCO, "Humanoid-v5", total_steps=10_000_000),
    # Only the goal is rewarded, after hundreds of steps. With noise as large as the
    # action range, some episodes reach the goal, and a high discount propagates the
    # reward to all preceding steps.
    "mountain_car_continuous": Config(
        env_name="MountainCarContinuous-v0",
        total_steps=100_000,
        num_envs=8,
        horizon=256,
        learning_rate=1e-3,
        discount=0.9999,
        initial_log_std=1.0,
        normalize_advantages=True,
    ),
    "lunar_lander": _variant(
        _BOX2D, "LunarLander-v3", entropy_coefficient=0.01, learning_rate=1e-3
    ),
    # With the entropy bonus and the 16 envs of lunar_lander, some policies hover and
    # land late (mean return over five seeds: 267 instead of 278).
    "lunar_lander_continuous": _variant(
        _BOX2D, "LunarLanderContinuous-v3", num_envs=64, minibatch_size=256
    ),
    # Every step forward is rewarded. With an entropy bonus, the action noise grows to
    # five times the action range. With iterations of 2,048 instead of 8,192 steps, the
    # return decreases again late in training.
    "bipedal_walker": _variant(
        _BOX2D,
        "BipedalWalker-v3",
        total_steps=5_000_000,
        num_envs=64,
        minibatch_size=256,
        gae_lambda=0.95,
    ),
    "pong": _atari("PongNoFrameskip-v4"),
    "breakout": _atari("BreakoutNoFrameskip-v4"),
    # Four envs give 16 gradient steps per iteration, so the policy changes little from
    # rollout to rollout. Small networks suffice for observations of three numbers.
    "pendulum-sac": Config(
        env_name="Pendulum-v1",
        algorithm="sac",
        total_steps=20_000,
        num_envs=4,
        policy_layers=(64, 64),
        value_layers=(64, 64),
    ),
    "cheetah-sac": _variant(_MUJOCO_SAC, "HalfCheetah-v5"),
    "hopper-sac": _variant(_MUJOCO_SAC, "Hopper-v5"),
    "walker-sac": _variant(_MUJOCO_SAC, "Walker2d-v5"),
    "ant-sac": _variant(_MUJOCO_SAC, "Ant-v5"),
}

#: Settings of a task that do not depend on the algorithm.
_TASK_SETTINGS = frozenset(
    {
        *("env_name", "env_kwargs", "import_modules", "wrappers", "total_steps"),
        "evaluation_time_limit",
    }
)

CONFIG_FORMS = (
    "the name of a config (`ppo configs` lists them), a .toml, .json or .py file, or "
    "an env, such as CartPole-v1 or my_env.py:Walk"
)
"""Description of valid config names, for error messages."""

EXPECTED_RESULTS: dict[str, tuple[str, int]] = {
    "cartpole": ("500", 37),
    "acrobot": ("-71 (-73 to -69)", 103),
    "pendulum": ("-154 (-160 to -148)", 129),
    "pendulum-sac": ("-147 (-154 to -143)", 250),
    "inverted_pendulum": ("1,000", 44),
    "double_pendulum": ("9,260 (8,900 to 9,360)", 137),
    "reacher": ("-4.0 (-4.2 to -3.6)", 200),
    "swimmer": ("360 (358 to 362)", 465),
    "hopper": ("3,300 (3,200 to 3,400)", 378),
    "cheetah": ("6,600 (4,900 to 7,900)", 105),
    "walker": ("4,500 (3,500 to 5,100)", 234),
    "ant": ("3,660 (3,120 to 3,970)", 2360),
    "mountain_car_continuous": ("94 (94 to 95)", 44),
    "lunar_lander": ("280 (271 to 285)", 207),
    "lunar_lander_continuous": ("278 (265 to 284)", 138),
    "bipedal_walker": ("280 (279 to 282)", 2409),
    "cheetah-sac": ("10,600 (10,010 to 10,910)", 7943),
    "hopper-sac": ("3,440 (3,340 to 3,510)", 8999),
    "walker-sac": ("4,330 (3,680 to 4,980)", 8518),
    "ant-sac": ("3,860 (3,420 to 4,320)", 5606),
}
"""Typical results of the named configs that were measured: the return, and the training
time in seconds on one core (median over seeds). The return is the mean over 100
episodes with the most likely actions, averaged over seeds, followed by the lowest and
the highest mean of a seed; see "Scores" in the docs."""


def expected_result(config: Config) -> tuple[str, str]:
    """Return the expected return of a config, and its training time on one core.

    The return is followed by its range over seeds. Both texts are empty if the config
    has not been measured. The seed of the config is ignored.
    """
    config = config.replace(seed=Config.seed)  # no named config sets the seed
    for name, (returns, seconds) in EXPECTED_RESULTS.items():
        if config == CONFIGS[name]:
            is_short = seconds < 100
            return returns, f"{seconds} s" if is_short else f"{seconds / 60:.0f} min"
    return "", ""


def is_env(name: str) -> bool:
    """Return whether a name has the form of a registered env or a user env.

    A user env is `MODULE:NAME` or `FILE.py:NAME`.
    """
    if is_user_env(name):
        return ":" in name
    return re.search(r"-v\d+$", name) is not None


def load_config(name: str) -> Config:
    """Return the config for a config name, an env name, or a file.

    For an env name, return the env's named config, or the defaults if it has none; see
    `recommended_settings`. A `.py` file is executed; it must assign the variable
    `config`.

    Raises:
      ConfigError: The name is unknown, or the file has no valid config.
    """
    if name in CONFIGS:
        return CONFIGS[name]
    if name.endswith((".toml", ".json")):
        return read_config(Path(name))
    if name.endswith(".py"):
        return _run_config(Path(name))
    if name.startswith("ALE/"):
        return _atari(name)
    if is_env(name):
        tuned = (config for config in CONFIGS.values() if config.env_name == name)
        return next(tuned, Config(env_name=name))
    import gymnasium

    known_names = [*CONFIGS, *(config.env_name for config in CONFIGS.values())]
    known_names += sorted(gymnasium.registry, reverse=True)  # newest versions first
    raise ConfigError(
        f"Expected {CONFIG_FORMS}; got {name!r}.{suggestion(name, known_names)}"
    )


def recommended_settings(observation_space: Any, action_space: Any) -> dict[str, Any]:
    """Return a dict of settings for an env that has no named config.

    Envs with images get the Atari settings, without the entropy bonus if actions are a
    Box. If the observations also contain parts that are not images, the networks get
    hidden layers: otherwise, policy and value would be linear in these parts.

    Envs without images get a GAE lambda of 0.9, like most MuJoCo tasks, if actions are
    a Box, and otherwise normalised advantages and an entropy bonus.
    """
    # Import lazily, so that configs can be read without Gymnasium.
    from gymnasium.spaces import Box

    from ppo.spaces import flat_leaves, is_image, space_leaves

    is_continuous = isinstance(action_space, Box)  # also for integers: a Gaussian
    leaves = space_leaves(observation_space)
    if isinstance(leaves, dict):
        leaves.pop("action_mask", None)
    are_images = list(map(is_image, flat_leaves(leaves)))
    if any(are_images):
        settings = {**_PIXELS}
        if is_continuous:
            settings["entropy_coefficient"] = 0.0
        if not all(are_images):
            settings["policy_layers"] = settings["value_layers"] = (64, 64)
        return settings
    if is_continuous:
        return {"gae_lambda": 0.9}
    return {"entropy_coefficient": 0.01, "normalize_advantages": True}


def read_config(path: Path) -> Config:
    """Read a config from a `.toml` or `.json` file; missing keys get their defaults.

    Raises:
      ConfigError: The file cannot be read, or a key or value is invalid.
    """
    try:
        content = read_table(path)
        if "env_name" not in content:
            raise ConfigError(
                f"expected a table of settings with the key env_name, for example "
                f'env_name = "CartPole-v1", got {reprlib.repr(content)}.'
            )
        table = content.get("algorithm_settings")
        if isinstance(table, dict):
            check_set_once("algorithm_settings", table, content)
        return Config(**content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the config file; {error}.") from error
    except (ConfigError, OverflowError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def read_table(path: Path) -> dict[str, Any]:
    """Read a table of values from an untrusted `.toml` or `.json` file.

    Raises:
      OSError: The file cannot be read.
      ValueError: The content is not a table, is nested too deeply, or has characters
        that cannot be printed (surrogates).
    """
    try:
        with open_regular(path, _MAX_TABLE_BYTES) as file:
            # Some editors begin a file with a byte order mark.
            text = file.read().decode("utf-8-sig")
        content = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        json.dumps(content, default=str, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected TOML or JSON; {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"expected a table of settings, got {reprlib.repr(content)}.")
    return content


def apply_settings(config: Config, settings: Iterable[str]) -> Config:
    """Return a config with settings such as `learning_rate=1e-4` applied.

    Numbers are written as Python literals (`300_000`, `1e6`), layers as `64,64`,
    booleans as `true` or `false`, and mappings and wrappers as JSON or TOML.

    Raises:
      ConfigError: A setting has the wrong form, is unknown, or is out of range.
    """
    changes: dict[str, Any] = {}
    settings = list(settings)
    try:
        config = with_algorithm(config, settings)
        current = {**config.algorithm_settings, **vars(config)}
        for setting in settings:
            key, equals, text = setting.partition("=")
            if not equals:
                raise ConfigError(f"expected key=value, got {setting!r}.")
            if key not in vars(config) and ":" in config.algorithm:
                # The type is not known until the user's class is loaded.
                changes[key] = text.strip()
            else:
                changes[key] = parse_value(
                    key, text.strip(), type(current.get(key, ""))
                )
        return config.replace(**changes)
    except ConfigError as error:
        raise ConfigError(f"--set: {error}") from None


def with_algorithm(config: Config, settings: Iterable[str]) -> Config:
    """Return the config for the algorithm that `settings` select.

    The settings of a named config are tuned for its algorithm. If the algorithm
    changes, a named config is replaced by the env's named config for the new algorithm
    or, if there is none, by the algorithm's defaults. Any other config keeps the
    settings that differ from the defaults.

    Raises:
      ConfigError: The algorithm is unknown, or does not have a setting of the config.
    """
    pairs = [setting.partition("=") for setting in settings]
    algorithms = [text.strip() for key, _, text in pairs if key == "algorithm"]
    if not algorithms or algorithms[-1] == config.algorithm:
        return config
    if config not in CONFIGS.values():
        return config.replace(algorithm=algorithms[-1])
    for other in CONFIGS.values():
        if (other.env_name, other.algorithm) == (config.env_name, algorithms[-1]):
            return other
    kept = {k: v for k, v in config.non_defaults().items() if k in _TASK_SETTINGS}
    return Config(**kept | {"algorithm": algorithms[-1]})


def _run_config(path: Path) -> Config:
    if not os.path.isfile(path):
        raise ConfigError(f"{path}: expected a Python file, found none.")
    try:
        with sibling_imports(str(path)):
            names = runpy.run_path(str(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{path}: executing the file raised {type(error).__name__}: {error}."
        ) from error
    config = names.get("config")
    if not isinstance(config, Config):
        kind = with_article(type(config).__name__)
        found = "no such variable" if config is None else kind
        raise ConfigError(
            f"{path}: expected `config = ppo.config.Config(...)`, found {found}. If "
            f"the file contains an env, use {path}:NAME."
        )
    return config


def parse_value(key: str, text: str, kind: type[Any] | None) -> Any:
    """Parse the text of a setting; return invalid text, or invalid list items, as str.

    The value must then be checked, with an error that names the expected type.

    Args:
      key: Name of the setting.
      text: The text after the equals sign.
      kind: Expected type: bool, int, float, str, or another type for lists and tables;
        None to infer the type from the text.

    Raises:
      ConfigError: The text is nested too deeply.
    """
    if kind is None:
        types = [type(_as_number(word)) for word in text.split(",")]
        is_list = text[:1] in ("[", "{") or (len(types) > 1 and str not in types)
        kind = list if is_list else types[0]
        kind = bool if text.lower() in ("true", "false") else kind
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if kind in (int, float):
        return _as_number(text)
    if kind is str:
        return text
    try:
        for read in (json.loads, _toml_value):
            with contextlib.suppress(ValueError):
                value = read(text)
                if isinstance(value, list | dict):
                    return value
    except RecursionError:
        raise ConfigError(
            f"{key}: expected a value with fewer nested levels, got {text:.40}...."
        ) from None
    words = map(str.strip, text.strip("[]()").split(","))
    return [_as_number(word) for word in words if word]


def _as_number(text: str) -> Any:
    """Return an int (also for 1e6), a float, or the text if it is not a number."""
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        number = float(text)
        return int(number) if number.is_integer() else number
    return text


def _toml_value(text: str) -> Any:
    (value,) = tomllib.loads(f"value = {text}").values()
    return value
