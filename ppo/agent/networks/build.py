"""Create the networks of a config for an observation space and an action space.

A torso turns preprocessed observations into features for the policy network and the
value network, which may share a torso. If the config has a `recurrent_size`, each
network has a recurrent core between its torso and its layers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ppo.agent.actions.action_spaces import ActionAdapter
from ppo.agent.actions.distributions import DiagonalGaussian
from ppo.agent.networks.convolution import ImageTorso
from ppo.agent.networks.custom import CustomHead, make_custom_model
from ppo.agent.networks.perceptrons import (
    GaussianHead,
    IdentityTorso,
    LogitsHead,
    Perceptron,
    ValueHead,
)
from ppo.agent.networks.recurrent import RecurrentCore
from ppo.agent.observations import ObservationPreprocessor
from ppo.config.config import Config
from ppo.errors import UnsupportedSpaceError
from ppo.spaces import is_image


class Networks(NamedTuple):
    """The networks of an agent. A shared torso is stored in both torso fields."""

    policy_torso: Any
    value_torso: Any
    policy: Any
    """Maps the output of its torso or core to parameters of the action distribution."""
    value: Any
    """Maps the output of its torso or core to values `[N]`."""
    cores: tuple[RecurrentCore, ...] = ()
    """Recurrent cores between the torsos and the networks; empty if there are none."""

    @property
    def is_torso_shared(self) -> bool:
        """Whether the policy network and the value network share one torso."""
        return self.policy_torso is self.value_torso

    @property
    def parts(self) -> dict[str, Any]:
        """All parts that have variables, by name; a shared torso is included once."""
        parts = {"policy_torso": self.policy_torso, "value_torso": self.value_torso}
        if self.is_torso_shared:
            parts = {"torso": self.policy_torso}
        parts |= {"policy": self.policy, "value": self.value}
        names = ("policy_memory", "value_memory")
        parts |= dict(zip(names, self.cores, strict=False))
        return {name: part for name, part in parts.items() if part.trackables}


def build_networks(
    preprocess: ObservationPreprocessor, actions: ActionAdapter, config: Config
) -> Networks:
    """Create the networks of a config.

    Args:
      preprocess: Preprocessor of the env's observations.
      actions: Adapter for the env's action space.
      config: The settings of the networks.

    Raises:
      UnsupportedSpaceError: The network is "cnn", but the observations contain no
        image.
      ConfigError: A custom network cannot be loaded or does not match the spaces.
    """
    seeds = np.random.SeedSequence(config.seed).generate_state(6) >> 2
    policy_seed, value_seed, *other_seeds = map(int, seeds)
    head: Any = LogitsHead()
    if issubclass(actions.distribution_type, DiagonalGaussian):
        head = GaussianHead(actions.output_size, config)
    if ":" in config.network:
        model = make_custom_model(
            config, preprocess.input_space, actions.output_size, policy_seed
        )
        return Networks(
            model, model, CustomHead(0, head), CustomHead(1, IdentityTorso())
        )
    torsos, input_size = _torsos(preprocess, config, other_seeds[:2])
    policy_layers, value_layers = _layers(config, (policy_seed, value_seed))
    cores: tuple[RecurrentCore, ...] = ()
    if config.recurrent_size:  # the hidden layers are then part of the cores
        cores = tuple(
            RecurrentCore(input_size, units=config.recurrent_size, **layers)
            for layers in _layers(config, other_seeds[2:])
        )
        input_size = config.recurrent_size
        policy_layers["hidden_sizes"] = value_layers["hidden_sizes"] = ()
    policy_layers |= {"output_size": actions.output_size, "output_gain": 0.01}
    value_layers |= {"output_size": 1, "output_gain": 1.0}
    policy = Perceptron(input_size, head=head, **policy_layers)
    value = Perceptron(input_size, head=ValueHead(), **value_layers)
    return Networks(*torsos, policy, value, cores)


def _layers(config: Config, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return keyword arguments for the hidden layers, as a list `[policy, value]`."""
    sizes = (config.policy_layers, config.value_layers)
    return [
        {"hidden_sizes": hidden_sizes, "activation": config.activation, "seed": seed}
        for hidden_sizes, seed in zip(sizes, seeds, strict=True)
    ]


def _torsos(
    preprocess: ObservationPreprocessor, config: Config, seeds: Sequence[int]
) -> tuple[tuple[Any, Any], int]:
    """Return the torsos of the policy and value networks, and their output size."""
    spaces = preprocess.leaf_spaces
    has_image = any(map(is_image, spaces))
    if config.network == "mlp" or (config.network == "auto" and not has_image):
        torso = IdentityTorso()
        return (torso, torso), preprocess.size
    if not has_image:
        raise UnsupportedSpaceError(
            "network cnn: expected observations with an image (a uint8 Box from 0 to "
            "255 with shape [H, W], [H, W, C] or [C, H, W] and at least 8x8 pixels), "
            f"got {', '.join(map(str, spaces))}; set network=mlp."
        )
    count = 1 if config.shared_torso else 2
    torsos = [ImageTorso(spaces, seed) for seed in seeds[:count]]
    return (torsos[0], torsos[-1]), torsos[0].size
