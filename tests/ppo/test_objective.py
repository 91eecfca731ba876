"""Custom policy losses: loading, the test call before envs start, and training."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ppo.agent.actions.distributions import Categorical, DiagonalGaussian
from ppo.agent.agent import Agent
from ppo.algorithms.ppo.load_loss import load_policy_loss
from ppo.algorithms.ppo.update import Updater
from ppo.errors import ConfigError
from tests.ppo import custom_losses
from tests.ppo.fakes import ACTIONS, BOX, CountingBatchEnv
from tests.ppo.runs import SMALL, Maker, eagerly, ppo, rollout_of, rows_of, run

FILE = custom_losses.__file__
DOCS = Path(__file__).parents[2] / "docs" / "research.md"
EXAMPLE = Path(__file__).parents[2] / "examples" / "spo.py"


def terms_of(distribution: Any) -> dict[str, Any]:
    return {
        "log_ratio": tf.math.log([1.5, 0.5, 9.0]),
        "advantage": tf.constant([2.0, -1.0, 7.0]),
        "weight": tf.constant([1.0, 1.0, 0.0]),
        "clip_range": tf.constant(0.25),
        **dict.fromkeys(["old", "new"], distribution),
        **dict.fromkeys(["action", "value", "target"]),
    }


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("raises", 11, "ZeroDivisionError: integer division or modulo by zero"),
        (
            "takes_unknown_argument",
            14,
            "TypeError: missing a required argument: 'advantages'",
        ),
        ("takes_too_few", 18, "TypeError: got an unexpected keyword argument"),
        ("per_row", 22, r"expected a float32 scalar, .* got Tensor.*shape=\(3,\)"),
        ("python_float", 26, r"expected a float32 scalar, .* got 3\.0\."),
        ("float64_loss", 30, "expected a float32 scalar, .* dtype=float64"),
        ("is_nan", 34, "expected a finite loss and a finite, .* got loss nan"),
        (
            "has_nan_gradient",
            38,
            r"expected a finite .* got loss 0\.0, gradient norm nan",
        ),
        ("is_constant", 42, r"ratios are 1; got loss 0\.25, gradient norm 0\.0"),
        ("branches", 47, "Using a symbolic `tf.Tensor` as a Python `bool`"),
    ],
)
def test_a_faulty_loss_is_a_one_line_error_before_any_env_starts(
    name: str, line: int, message: str, tmp_path: Path
) -> None:
    maker = Maker()
    config = SMALL.replace(objective=f"{FILE}:{name}")
    where = rf"^objective {FILE}:{name}: {FILE}:{line}: "
    with pytest.raises(ConfigError, match=where + f".*{message}") as caught:
        run(tmp_path, config, maker, in_graphs=True)
    assert len(str(caught.value).splitlines()) == 1
    assert maker.made == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (None, "FileNotFoundError: .*No such file .*mine.py"),
        ("def other(**_): ...", "expected a function loss in .*, found none"),
        ("loss = 3", "expected a function loss in .*, found 3"),
        ("\nx = 1 / 0", "mine.py:2: ZeroDivisionError"),
        ("def loss(:", "SyntaxError: .*mine.py, line 1"),
    ],
)
def test_a_file_without_the_loss_is_a_one_line_error(
    code: str | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    if code is not None:
        file.write_text(code)
    with pytest.raises(ConfigError, match=rf"^objective.*{message}"):
        load_policy_loss(SMALL.replace(objective=f"{file}:loss"))


@pytest.mark.parametrize(
    "name", ["for_categorical", "for_gaussian", "with_all_arguments"]
)
def test_a_loss_may_support_one_kind_of_actions_and_use_all_arguments(
    name: str,
) -> None:
    load_policy_loss(SMALL.replace(objective=f"{custom_losses.__name__}:{name}"))


def test_a_loss_for_the_wrong_kind_of_actions_is_a_one_line_error_in_the_update() -> (
    None
):
    loss = load_policy_loss(SMALL.replace(objective=f"{FILE}:for_categorical"))
    terms = terms_of(DiagonalGaussian(tf.zeros([3, 2]), tf.zeros([2])))
    traced = tf.function(lambda: loss(**terms))
    with pytest.raises(
        ConfigError, match=rf"^objective {FILE}:for_categorical: "
    ) as caught:
        traced()
    text = str(caught.value)
    assert text.endswith("'DiagonalGaussian' object has no attribute 'logits'")
    assert len(text.splitlines()) == 1


def test_the_example_is_spo_and_learns(tmp_path: Path) -> None:
    config = SMALL.replace(objective=f"{EXAMPLE}:loss")
    loss = load_policy_loss(config)
    terms = terms_of(Categorical(tf.zeros([3, 2])))
    # 1.5 * 2 - 2 / 0.5 * 0.5**2 = 2 and 0.5 * -1 - 1 / 0.5 * 0.5**2 = -1
    assert loss(**terms).numpy() == pytest.approx(-(2.0 - 1.0) / 2.0)

    class Rewarding(CountingBatchEnv):
        """An env whose reward is its action."""

        def step(self, actions: Any, out: Any = None) -> Any:
            result = super().step(actions, out)
            out.reward[:] = actions[:, 0]
            return result

    def make(num_envs: int) -> CountingBatchEnv:
        return Rewarding([4] * num_envs)

    config = config.replace(
        total_steps=640,
        checkpoint_every=0,
        minibatch_size=8,
        learning_rate=0.03,
        epochs=4,
        normalize_advantages=True,
    )
    run(tmp_path, config, Maker(make), in_graphs=True)
    rows = rows_of(tmp_path)
    assert rows[-1]["mean_return"] > rows[0]["mean_return"] + 1.0


@eagerly()
def test_the_auxiliary_loss_of_the_docs_trains_a_part_of_a_custom_network(
    tmp_path: Path,
) -> None:
    (example,) = re.findall(r"```python\n([^`]*decoder[^`]*)```", DOCS.read_text())
    file = tmp_path / "my_decoder.py"
    file.write_text(example)
    config = SMALL.replace(
        network=f"{file}:make",
        objective=f"{file}:loss",
        minibatch_size=16,
        learning_rate=0.03,
    )
    policy_loss = load_policy_loss(config)
    agent = Agent(BOX, ACTIONS, config)
    rows = np.random.default_rng(0).normal(size=(9, 2, 2))
    rollout = rollout_of(8, 2, observation=rows, final_observation=rows[1:])
    updater = Updater(agent, config, policy_loss)

    def error() -> float:
        observation = agent.preprocess.inputs(agent.preprocess(rows[:8].reshape(16, 2)))
        model = agent.custom_model
        decoded = model.decoder(model.features(observation[0]))
        return float(tf.reduce_mean(tf.square(decoded - observation[0])))

    before = error()
    for _ in range(12):
        updater.update(rollout, seed=(0, 0))
    assert error() < 0.7 * before


def test_ppo_train_reports_a_faulty_loss_in_one_line_and_leaves_no_folder(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    more = ("--set", f"objective={FILE}:raises", "--num-workers", 1)
    code, _, error = ppo("train", "cartpole", "--run-dir", folder, *more)
    assert code == 2
    assert f"{FILE}:11: ZeroDivisionError" in error
    assert len(error.strip().splitlines()) == 1
    assert not folder.exists()
