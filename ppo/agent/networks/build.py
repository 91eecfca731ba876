"""Which networks a config means, for what is observed and done.

A torso turns observations into one vector per row, where that takes more than joining
the leaves; a policy and a value network stand on it. They may share one torso.
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
    LogitsHead,
    IdentityTorso,
    Perceptron,
    ValueHead,
)
from ppo.agent.networks.recurrent import RecurrentCore
from ppo.agent.observations import ObservationPreprocessor
from ppo.config.config import Config
from ppo.errors import UnsupportedSpaceError
from ppo.images import can_convolve


class Networks(NamedTuple):
    """What an agent thinks with. A shared torso is one object in both places."""

    policy_torso: Any
    value_torso: Any
    policy: Any
    """Gives the parameters of the action distribution for what its torso gave."""
    value: Any
    memories: tuple[RecurrentCore, ...] = ()
    """Those of policy and value, between torso and network; none without recurrence."""

    @property
    def is_torso_shared(self) -> bool:
        """Whether policy and value need what one torso gives."""
        return self.policy_torso is self.value_torso

    @property
    def parts(self) -> dict[str, Any]:
        """The parts by name, policy first, each once."""
        parts = {"policy_torso": self.policy_torso, "value_torso": self.value_torso}
        if self.is_torso_shared:
            parts = {"torso": self.policy_torso}
        parts |= {"policy": self.policy, "value": self.value}
        names = ("policy_memory", "value_memory")
        parts |= dict(zip(names, self.memories, strict=False))
        return {name: part for name, part in parts.items() if part.trackables}


def build_networks(
    preprocess: ObservationPreprocessor, actions: ActionAdapter, config: Config
) -> Networks:
    """Make the networks that a config asks for.

    Raises:
        UnsupportedSpaceError: convolutions are asked for, but there is no image.
        ConfigError: a custom network cannot be loaded, or does not fit.
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
    memories: tuple[RecurrentCore, ...] = ()
    if config.recurrent_size:  # then memories have the hidden layers
        memories = tuple(
            RecurrentCore(input_size, units=config.recurrent_size, **layers)
            for layers in _layers(config, other_seeds[2:])
        )
        input_size = config.recurrent_size
        policy_layers["hidden_sizes"] = value_layers["hidden_sizes"] = ()
    policy_layers |= {"output_size": actions.output_size, "output_gain": 0.01}
    value_layers |= {"output_size": 1, "output_gain": 1.0}
    policy = Perceptron(input_size, head=head, **policy_layers)
    value = Perceptron(input_size, head=ValueHead(), **value_layers)
    return Networks(*torsos, policy, value, memories)


def _layers(config: Config, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return what hidden layers of the policy and of the value are made of."""
    sizes = (config.policy_layers, config.value_layers)
    return [
        {"hidden_sizes": hidden_sizes, "activation": config.activation, "seed": seed}
        for hidden_sizes, seed in zip(sizes, seeds, strict=True)
    ]


def _torsos(
    preprocess: ObservationPreprocessor, config: Config, seeds: Sequence[int]
) -> tuple[tuple[Any, Any], int]:
    """Return the torsos of policy and value, and the size of what they give."""
    spaces = preprocess.leaf_spaces
    has_image = any(map(can_convolve, spaces))
    if config.network == "mlp" or (config.network == "auto" and not has_image):
        torso = IdentityTorso()
        return (torso, torso), preprocess.size
    if not has_image:
        raise UnsupportedSpaceError(
            "network cnn: expected an image to observe, a Box of uint8 from 0 to 255 "
            "with shape [H, W], [H, W, C] or [C, H, W] and sides of at least 8, got "
            f"{', '.join(map(str, spaces))}; choose the network mlp."
        )
    count = 1 if config.shared_torso else 2
    torsos = [ImageTorso(spaces, seed) for seed in seeds[:count]]
    return (torsos[0], torsos[-1]), torsos[0].size
