"""Load configs by name, from files or for an env, and apply `--set KEY=VALUE`.

A named config contains the settings of a task that differ from the defaults, which suit
continuous control. Comments give the reasons. Similar tasks share settings.
"""

import contextlib
import json
import re
import reprlib
import runpy
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from envserve.envs.user_envs import is_user_env
from ppo.config.config import Config
from ppo.errors import ConfigError, suggestion

__all__ = ["CONFIGS"]

# With a lambda of 0.95, advantages are noisier, and the return of some seeds stays far
# below that of the others. Gradient norms differ by a factor of 100 between a steady
# gait and falls. The small maximum norm makes all gradient steps equally large; with a
# larger one, no gradients are clipped.
_MUJOCO: dict[str, Any] = {
    "gae_lambda": 0.9,
    "max_gradient_norm": 0.02,
    "adam_epsilon": 1e-8,
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
    """Return the config of an Atari game; frames and network as in Mnih et al. 2015.

    The settings are those of Schulman et al. 2017, with two exceptions: rewards are
    scaled instead of clipped, and the loss of a life does not end an episode, so
    returns are game scores. Published results usually use ten times as many
    steps.
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
    "jit_compile": False,  # on CPUs, convolutions are slower with XLA
    "use_gpu": True,
    "evaluation_episodes": 10,
}

CONFIGS: dict[str, Config] = {
    # With two splits, a rollout takes two thirds of the time. HalfCheetah is an
    # exception: its envs keep all cores busy, so two splits slow its rollouts down.
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
    # easier to learn. With 0.9, some seeds never swing up. Four envs with 256 steps
    # each give twice as many updates, and rollouts that contain whole episodes.
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
    # Most falls happen at the start of an episode. With the time limit, ten times as
    # many episodes start.
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
    # lambda and the short rollouts of the other MuJoCo tasks, the policy only twitches
    # (return 70 instead of 361, one seed). These settings are those of RL Baselines3
    # Zoo. With the maximum gradient norm of the other MuJoCo tasks, exploration ends
    # before the best stroke is found (304 instead of 360, means of five seeds).
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
    # Episodes end only at the time limit, so more envs mean more diverse rollouts.
    "cheetah": _variant(_MUJOCO, "HalfCheetah-v5", num_envs=64, horizon=32),
    # The walker learns from falls, which cause large gradients. With the maximum
    # gradient norm of the other MuJoCo tasks, the return was 2,560 instead of 4,063
    # (means of four seeds).
    # The entropy bonus keeps enough exploration to find another gait.
    "walker": Config(env_name="Walker2d-v5", gae_lambda=0.9, entropy_coefficient=3e-4),
    "ant": _variant(_MUJOCO, "Ant-v5", total_steps=3_000_000),
    "humanoid": _variant(_MUJOCO, "Humanoid-v5", total_steps=10_000_000),
    # Only the goal is rewarded, after hundreds of steps. Noise as large as the action
    # range sometimes reaches it, and a high discount propagates the reward to all
    # preceding steps.
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
    # With the entropy bonus and a quarter of the envs, some seeds hover and land late
    # (return 267 instead of 278, means of five seeds).
    "lunar_lander_continuous": _variant(
        _BOX2D, "LunarLanderContinuous-v3", num_envs=64, minibatch_size=256
    ),
    # Every step forward is rewarded. With an entropy bonus, the noise grows to five
    # times the action range. With iterations of 2,048 steps, the return decreases again
    # late in training.
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
"""Description of valid config names, for error messages."""

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
"""Typical results of the named configs that were measured: mean return of 100 episodes
with the most likely actions, averaged over seeds; see docs/scores.md."""


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
    `recommended_settings`. A `.py` file is executed, and must assign the variable
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
    known_names = [*CONFIGS, *(config.env_name for config in CONFIGS.values())]
    raise ConfigError(
        f"Expected {CONFIG_FORMS}; got {name!r}.{suggestion(name, known_names)}"
    )


def recommended_settings(observation_space: Any, action_space: Any) -> dict[str, Any]:
    """Return settings for an env without a named config, by name.

    Envs with images get the Atari settings. Other envs with discrete actions get
    normalised advantages and an entropy bonus. For continuous actions, the defaults are
    best.
    """
    if _has_image(observation_space):
        return _PIXELS
    if action_space.dtype is not None and action_space.dtype.kind == "f":
        return {}
    return {"entropy_coefficient": 0.01, "normalize_advantages": True}


def _has_image(space: Any) -> bool:
    """Return whether a space contains an image that convolutions support."""
    parts = getattr(space, "spaces", None)
    if parts is not None:
        parts = parts.values() if isinstance(parts, Mapping) else parts
        return any(map(_has_image, parts))
    # Imported lazily, so that configs can be read without Gymnasium.
    from ppo.images import can_convolve

    return can_convolve(space)


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
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        json.dumps(content, default=str, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected TOML or JSON; {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"expected a table of settings by name, got {reprlib.repr(content)}."
        )
    return content


def apply_settings(config: Config, settings: Iterable[str]) -> Config:
    """Return a config with settings such as `learning_rate=1e-4` applied.

    Numbers are written as Python literals (`300_000`, `1e6`), layers as `64,64`,
    booleans as `true` or `false`, and mappings and wrappers as JSON or TOML.

    Raises:
        ConfigError: A setting has the wrong form, is unknown, or is out of range.
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
            f"{path}: executing the file raised {type(error).__name__}: {error}."
        ) from error
    config = names.get("config")
    if not isinstance(config, Config):
        found = "no such variable" if config is None else f"a {type(config).__name__}"
        raise ConfigError(
            f"{path}: expected `config = ppo.config.Config(...)`, found {found}. If "
            f"the file contains an env, name it as {path}:NAME."
        )
    return config


def _parsed(text: str, kind: type[Any]) -> Any:
    """Parse the text of a setting; if it is invalid, leave it or a part of it unparsed.

    `Config` then rejects the value with an error that names the expected type.

    Args:
        text: The text after the equals sign.
        kind: Type of the setting's current value.
    """
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
