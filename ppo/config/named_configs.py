"""Where a config comes from: a name, a TOML, JSON or Python file, an env, and settings.

A named config holds what its task needs that differs from the defaults, and why. The
defaults are those of continuous control; a family of tasks shares what differs.
"""

import contextlib
import json
import re
import runpy
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from envserve.envs.user_envs import is_user_env
from ppo.config.config import Config
from ppo.errors import ConfigError, suggestion

# With a lambda of 0.95 advantages are noisier, and some seeds stay far behind the
# others. The small norm makes steps alike: gradients differ a hundredfold between a
# calm and a fall, and larger limits never act.
_MUJOCO: dict[str, Any] = {
    "gae_lambda": 0.9,
    "max_gradient_norm": 0.02,
    "adam_epsilon": 1e-8,
}
# Most of the reward lies at an episode's end, and is so large that advantages scaled by
# it would be too small: unless they are normalised, LunarLander's mean return is 179
# instead of 278, of one seed.
_BOX2D: dict[str, Any] = {
    "discount": 0.999,
    "gae_lambda": 0.98,
    "normalize_advantages": True,
}


def _variant(family: Mapping[str, Any], env_name: str, **changes: Any) -> Config:
    """Return the config of an env, given what is common to its family."""
    return Config(env_name=env_name, **{**family, **changes})


def _atari(env_name: str) -> Config:
    """Return a config of Atari games: Mnih et al. 2015's frames and convolutions.

    Settings as in Schulman et al. 2017, but rewards are scaled instead of clipped, and
    a lost life ends no episode: returns are the game's score. The usual budget is ten
    times as large.
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
    "jit_compile": False,  # on CPUs, XLA's convolutions take longer
    "use_gpu": True,
    "evaluation_episodes": 10,
}

CONFIGS: dict[str, Config] = {
    # In two splits a rollout takes two thirds of the time; with HalfCheetah, whose envs
    # keep all cores busy, it takes longer.
    "cartpole": Config(env_name="CartPole-v1", total_steps=100_000, num_splits=2),
    # Every step costs the same until the end: scaled rewards say little of how good an
    # action was, normalised advantages do.
    "acrobot": Config(
        env_name="Acrobot-v1",
        total_steps=300_000,
        learning_rate=1e-3,
        gae_lambda=0.9,
        normalize_advantages=True,
    ),
    # Torques take effect within a second, and a shorter view of the future makes the
    # values easier to learn; with 0.9 some seeds never swing up. Few envs make twice as
    # many updates of the same steps, over whole episodes.
    "pendulum": Config(
        env_name="Pendulum-v1",
        total_steps=300_000,
        num_envs=4,
        horizon=256,
        discount=0.95,
        learning_rate=1e-3,
    ),
    "inverted_pendulum": _variant(_MUJOCO, "InvertedPendulum-v5", total_steps=300_000),
    # Once it balances, all there is to learn from are a few falls: in minibatches of
    # 64 most gradients are noise, in which the policy drifts until it falls again. It
    # falls right after it has begun, which whole episodes do a tenth as often.
    "double_pendulum": _variant(
        _MUJOCO,
        "InvertedDoublePendulum-v5",
        training_time_limit=100,
        minibatch_size=2048,
        epochs=25,
        learning_rate=1e-3,
    ),
    "reacher": _variant(_MUJOCO, "Reacher-v5"),
    # A stroke pays off long after it: with a discount of 0.99, or with 0.9999 and the
    # family's lambda and short rollouts, it learns to twitch (70 instead of 361, of one
    # seed). As in RL Baselines3 Zoo. With the family's norm its noise is gone before it
    # has found the best stroke: 304 instead of 360, means of five seeds.
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
    # Nothing ends its episodes but their limit: many envs see more of them at a time.
    "cheetah": _variant(_MUJOCO, "HalfCheetah-v5", num_envs=64, horizon=32),
    # It learns from its falls. To cut their gradients to the norm of all others left it
    # at 2,560 instead of 4,063, means of four seeds. With a bonus it keeps noise enough
    # to find another gait.
    "walker": Config(env_name="Walker2d-v5", gae_lambda=0.9, entropy_coefficient=3e-4),
    "ant": _variant(_MUJOCO, "Ant-v5", total_steps=3_000_000),
    "humanoid": _variant(_MUJOCO, "Humanoid-v5", total_steps=10_000_000),
    # Only the goal earns anything, at the end of hundreds of steps: noise as strong as
    # the engine reaches it now and then, and a long view gives all steps their part.
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
    # With the entropy bonus and a quarter of the envs, slow seeds learn to hover, and
    # to land late: 267 instead of 278, means of five seeds.
    "lunar_lander_continuous": _variant(
        _BOX2D, "LunarLanderContinuous-v3", num_envs=64, minibatch_size=256
    ),
    # It earns as it walks. With an entropy bonus its noise grows to five times what the
    # engines can do; from 2,048 steps an iteration it unlearns what it had learned.
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
}

CONFIG_FORMS = (
    "the name of a config (`ppo configs` lists them), a .toml, .json or .py file, or "
    "an env, such as CartPole-v1 or my_env.py:Walk"
)
"""What `load_config` takes, as errors say it."""

EXPECTED_RETURNS: dict[str, str] = {
    "cartpole": "500",
    "acrobot": "-71",
    "pendulum": "-154",
    "inverted_pendulum": "1,000",
    "double_pendulum": "9,260",
    "reacher": "-4.0",
    "swimmer": "360",
    "hopper": "3,300",
    "cheetah": "6,600",
    "walker": "4,500",
    "mountain_car_continuous": "94",
    "lunar_lander": "280",
    "lunar_lander_continuous": "278",
    "bipedal_walker": "280",
}
"""What a run of each config reaches: mean return over 100 episodes with mode actions,
and over seeds; docs/scores.md says more. Empty where it was not measured."""


def is_env(name: str) -> bool:
    """Whether a name is that of an env: registered, `MODULE:NAME` or `FILE.py:NAME`."""
    if is_user_env(name):
        return ":" in name
    return re.search(r"-v\d+$", name) is not None


def load_config(name: str) -> Config:
    """Return a named config, or read one from a `.toml`, `.json` or `.py` file.

    A Python file is run; what it calls `config` is taken. An env has the named config
    that is for it, or else the defaults; see `suited`.

    Raises:
        ConfigError: there is neither, or the file is wrong.
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
        known = (config for config in CONFIGS.values() if config.env_name == name)
        return next(known, Config(env_name=name))
    known_names = [*CONFIGS, *(config.env_name for config in CONFIGS.values())]
    raise ConfigError(
        f"Expected {CONFIG_FORMS}; got {name!r}.{suggestion(name, known_names)}"
    )


def recommended_settings(observation_space: Any, action_space: Any) -> dict[str, Any]:
    """Return what to change of the defaults for an env that has no config of its own.

    That is nothing for actions that are real numbers, which the defaults are for.
    """
    if _has_image(observation_space):
        return _PIXELS
    if action_space.dtype is not None and action_space.dtype.kind == "f":
        return {}
    return {"entropy_coefficient": 0.01, "normalize_advantages": True}


def _has_image(space: Any) -> bool:
    """Whether something in a space is an image that convolutions can take."""
    parts = getattr(space, "spaces", None)
    if parts is not None:
        parts = parts.values() if isinstance(parts, Mapping) else parts
        return any(map(_has_image, parts))
    from ppo.images import (
        can_convolve,  # with Gymnasium, which configs do without
    )

    return can_convolve(space)


def read_config(path: Path) -> Config:
    """Read a config from a `.toml` or `.json` file; a key left out has its default.

    Raises:
        ConfigError: the file cannot be read, or a key or a value is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected a config file; {error}.") from error
    try:
        content = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: expected TOML or JSON; {error}.") from error
    if not isinstance(content, dict) or "env_name" not in content:
        raise ConfigError(
            f"{path}: expected a table of settings with a key env_name, such as "
            f'env_name = "CartPole-v1", got {content!r:.200}.'
        )
    try:
        return Config(**content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def apply_settings(config: Config, settings: Iterable[str]) -> Config:
    """Change a config by settings such as `learning_rate=1e-4`.

    Numbers may be written as in Python (`300_000`, `1e6`), layers as `64,64`, truth as
    `true` and `false`, mappings and wrappers as JSON or TOML.

    Raises:
        ConfigError: a setting is malformed, unknown, or out of range.
    """
    changes: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set: expected key=value, got {setting!r}.")
        changes[key] = _parsed(text.strip(), type(vars(config).get(key, "")))
    try:
        return config.replace(**changes)
    except ConfigError as error:
        raise ConfigError(f"--set: {error}") from None


def _run_config(path: Path) -> Config:
    if not path.is_file():
        raise ConfigError(f"{path}: expected a Python file, found none.")
    try:
        names = runpy.run_path(str(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"{path}: expected a file that runs; {type(error).__name__}: {error}."
        ) from error
    config = names.get("config")
    if not isinstance(config, Config):
        found = "no such name" if config is None else f"a {type(config).__name__}"
        raise ConfigError(
            f"{path}: expected `config = ppo.config.Config(...)`, found {found}. An "
            f"env in that file is {path}:NAME."
        )
    return config


def _parsed(text: str, kind: type[Any]) -> Any:
    """Turn the text of a setting into a value that may be of its key's kind."""
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if kind in (int, float):
        return _number(text)
    if kind is str:
        return text
    for read in (json.loads, _toml_value):
        with contextlib.suppress(ValueError):
            value = read(text)
            if isinstance(value, list | dict):
                return value
    return [_number(word) for word in text.strip("[]()").replace(",", " ").split()]


def _number(text: str) -> Any:
    """Read a number, a whole one also where it is written as 1e6; else the text."""
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        number = float(text)
        return int(number) if number.is_integer() else number
    return text


def _toml_value(text: str) -> Any:
    (value,) = tomllib.loads(f"value = {text}").values()
    return value
