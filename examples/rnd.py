"""A callback that rewards novelty: random network distillation (Burda et al. 2018).

ppo train MountainCar-v0 --set callbacks=examples/rnd.py:Novelty
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

SCALE = 0.1  # standard deviation of the bonus


class Novelty:
    """Adds a bonus to the rewards: the prediction error for a random network's outputs.

    The error is large for observations that differ from all earlier observations.
    """

    def __init__(self) -> None:
        self._target, self._predictor = (
            keras.Sequential(
                [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(16)]
            )
            for _ in range(2)
        )
        self._predictor.compile(keras.optimizers.Adam(1e-3), "mse")

    def before_update(self, run: Any, rollout: Any) -> dict[str, float]:
        """Change the rewards of a rollout, and train the predictor."""

        def after_steps(rows: np.ndarray, final: np.ndarray) -> np.ndarray:
            """Return the observation after each step, `[T * B, ...]`."""
            rows, ended = rows[1:].copy(), rollout.done & rollout.valid
            rows[ended] = final[ended]  # `rows` has the next episode's observation
            return rows.reshape(-1, *rows.shape[2:])

        next_observation = tf.nest.map_structure(
            after_steps, rollout.observation, rollout.final_observation
        )
        preprocess = run.agent.preprocess
        inputs, _ = preprocess.inputs(preprocess(next_observation))
        leaves = [tf.reshape(leaf, [len(leaf), -1]) for leaf in tf.nest.flatten(inputs)]
        rows = tf.concat(leaves, axis=1)
        target = self._target(rows)
        error = np.mean((self._predictor(rows) - target) ** 2, axis=1)
        bonus = SCALE * error / (error.std() + 1e-8)
        rollout.reward[...] += bonus.reshape(rollout.reward.shape)
        self._predictor.fit(rows, target, batch_size=256, epochs=1, verbose=0)
        return {"novelty/error": float(error.mean())}
