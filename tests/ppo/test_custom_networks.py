"""Custom networks: loaded, checked, trained, saved and restored."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from ppo.agent.agent import Agent
from ppo.algorithms.ppo.update import Updater
from ppo.config import Config
from ppo.environments import env_maker
from ppo.errors import CheckpointError, ConfigError
from ppo.evaluation.evaluate import evaluate_run
from ppo.evaluation.export import export_policy
from ppo.learners import SINGLE_LEARNER, Learners
from ppo.run_folder import checkpoint
from ppo.run_folder.folder import RunFolder
from ppo.train import train
from ppo.user_code import load_user_code
from tests.ppo import custom_networks
from tests.ppo.fakes import ACTIONS, BOX, CountingBatchEnv, in_graph
from tests.ppo.runs import (
    SMALL,
    Maker,
    eagerly,
    parameters,
    ppo,
    rollout_of,
    run,
    save_run,
)

pytestmark = pytest.mark.usefixtures("one_launcher")

MODULE = custom_networks.__name__
X = spaces.Box(-1.0, 1.0, (3,))
CONFIG = SMALL.replace(env_name="CartPole-v1", network=f"{MODULE}:subclass")
EXAMPLE = Path(__file__).parents[2] / "docs" / "networks.md"


def named(function: str) -> Config:
    return CONFIG.replace(network=f"{MODULE}:{function}")


@pytest.mark.parametrize("function", ["subclass", "plain_object", "without_training"])
def test_outputs_are_logits_of_discrete_actions(function: str) -> None:
    agent = Agent(X, spaces.Discrete(4), named(function))
    features = agent.preprocess(tf.ones([5, 3]))
    action, log_prob = agent.act(tf.ones([5, 3]), tf.constant([1, 2]))
    assert (action.shape, log_prob.shape) == (5, 5)
    distribution, value = agent.distribution_and_value(features)
    np.testing.assert_array_equal(value, agent.value(features))
    np.testing.assert_array_equal(
        distribution.mode(), agent.distribution(features).mode()
    )
    assert agent.trackables.keys() == {"torso", "preprocess"}


def test_outputs_are_means_of_box_actions_whose_deviation_is_trained() -> None:
    config = named("subclass").replace(initial_log_std=-1.0)
    agent = Agent(X, spaces.Box(-1.0, 1.0, (2,)), config)
    features = agent.preprocess(tf.ones([5, 3]))
    assert agent.distribution(features).mode().shape == (5, 2)
    assert agent.trainable_variables[-1].numpy().tolist() == [-1.0, -1.0]
    assert agent.trackables.keys() == {"torso", "policy", "preprocess"}


def test_model_gets_the_input_space_without_the_action_mask() -> None:
    space = spaces.Dict(
        camera=spaces.Box(0, 255, (8, 8, 3), np.uint8),
        mode=spaces.Discrete(3),
        action_mask=spaces.MultiBinary(4),
    )
    agent = Agent(space, spaces.Discrete(4), named("inputs_of_a_dict"))
    rows = {
        "camera": tf.cast(tf.fill([5, 8, 8, 3], 255), tf.uint8),
        "mode": tf.zeros([5], tf.int64),
        "action_mask": tf.constant([[0, 0, 1, 0]] * 5),
    }
    action, _ = agent.mode(rows, tf.constant([1, 2]))
    assert action.numpy().tolist() == [2] * 5
    assert agent.value(agent.preprocess(rows)).shape == (5,)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("too_few_outputs", r"\[N, 4\].*got float32\[2, 3\], float32\[2\]"),
        ("one_output", r"expected outputs of shapes .* got float32\[2, 4\] for"),
        ("dict_of_outputs", r"got dict for N = 2 rows\.$"),
        ("with_variables_of_tensorflow", r"keras\.Variable, got \[<[^\n]*Variable'>\]"),
        ("float64", r"float32 outputs, got float64\[2, 4\], float64\[2\]"),
        ("only_eager", r"only_eager: .*custom_networks\.py:\d+: [^\n]*$"),
        ("returns_none", "expected the function to return a model"),
        ("without_checkpoint", r"expected a keras\.Model .* with trackables"),
        ("without_variables", r"expected trainable_variables, .* got \[\]"),
        ("with_empty_trackables", r"trackables with all .* would not store \['"),
        ("layers_in_a_set", r"^Dense dense\w*: expected .* lists, .* in a set, which"),
        ("layers_in_a_frozenset", r"^Dense dense\w*: .* in a set, which"),
        ("dropout", r"inference mode, .* changed the variable .*seed"),
        ("normalization", "two calls with the same row had different outputs"),
        ("random", "two calls with the same row had different outputs"),
        ("subclas", r"function subclas in .*, found none\. Did you mean subclass"),
        ("not_a_function", "found 3"),
    ],
)
def test_error_for_a_faulty_model_names_the_expected_one(
    function: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Agent(X, spaces.Discrete(4), named(function))


def test_exception_of_user_code_becomes_one_line_with_its_file_and_line() -> None:
    line = rf"network {MODULE}:raising: {custom_networks.__file__}:\d+: KeyError: 'cam"
    with pytest.raises(ConfigError, match=line):
        Agent(X, spaces.Discrete(4), named("raising"))


def test_errors_name_missing_modules_and_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No module named 'tests\.no'"):
        load_user_code("network", "tests.no.such:make")
    with pytest.raises(ConfigError, match=r"No such file .*: '/.*/no/such\.py'"):
        load_user_code("network", "no/such.py:make")
    file = tmp_path / "needy.py"
    file.write_text("import no_such_module\n")
    with pytest.raises(ConfigError, match=r"needy\.py:1: .*'no_such_module'"):
        load_user_code("network", f"{file}:make")


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """Write the example networks of the docs to a file."""
    _, _, rest = EXAMPLE.read_text().partition("```python\n")
    file = tmp_path / "my_networks.py"
    file.write_text(rest.partition("```")[0])
    return file


def test_privileged_observations_reach_only_the_value_function(
    example: Path, tmp_path: Path
) -> None:
    space = spaces.Dict(privileged=spaces.Box(-1.0, 1.0, (2, 2)), sensors=X)
    config = CONFIG.replace(network=f"{example}:asymmetric", epochs=2)
    maker = Maker(
        lambda count: CountingBatchEnv([3] * count, observation_space=space,
            action_space=spaces.Discrete(2), observe=observe)
    )  # fmt: skip
    agent = run(tmp_path / "run", config, maker).agent
    rows, other = observe(np.ones([4, 2])), observe(np.ones([4, 2]))
    other["privileged"] = rows["privileged"] + 0.5
    seen, changed = (agent.preprocess(tensors(each)) for each in (rows, other))
    np.testing.assert_array_equal(
        agent.distribution(seen).parameters, agent.distribution(changed).parameters
    )
    assert (agent.value(seen) != agent.value(changed)).numpy().all()
    export_policy(agent, in_graph(maker.made[0]), tmp_path / "policy")
    policy = tf.saved_model.load(str(tmp_path / "policy"))
    other["privileged"] = np.zeros_like(rows["privileged"])
    for seed in (tf.constant([1, number]) for number in range(5)):
        one, two = (policy.sample(tensors(each), seed) for each in (rows, other))
        np.testing.assert_array_equal(one, two)


def observe(rows: np.ndarray) -> dict[str, np.ndarray]:
    parts = np.repeat(rows[:, 1:], 4, axis=1).astype(np.float32)
    return {"privileged": parts.reshape(-1, 2, 2), "sensors": parts[:, :3]}


def tensors(rows: dict[str, np.ndarray]) -> dict[str, tf.Tensor]:
    return {key: tf.constant(part) for key, part in rows.items()}


def test_a_model_may_branch_on_tensors() -> None:
    agent = Agent(X, spaces.Discrete(2), named("plain_object"))
    rows = np.random.default_rng(0).normal(size=(9, 2, 3))
    parts = {"observation": rows, "final_observation": rows[1:]}
    parts["action"] = np.zeros((8, 2), np.int64)
    rollout = rollout_of(8, 2, reward=rows[1:, :, 0], **parts)
    before = agent.trainable_variables[0].numpy()
    Updater(agent, named("plain_object")).update(rollout, seed=(0, 0))
    assert (agent.trainable_variables[0].numpy() != before).any()


ONE_THREAD = f"""
import tensorflow as tf
tf.config.threading.set_inter_op_parallelism_threads(1)
from envserve.client import BatchEnv
from ppo.agent.agent import Agent
from ppo.in_graph_batch_env import InGraphBatchEnv
from tests.ppo.runs import SMALL, agent_simulation
with BatchEnv.local("CartPole-v1", 2, 1) as env:
    spaces = env.observation_space, env.action_space
    agent = Agent(*spaces, SMALL.replace(network="{MODULE}:plain_object"))
    env = InGraphBatchEnv(env, agent.actions)
    for act_on in (1.0, 0.5):
        simulation = agent_simulation(agent, env, 8, act_on=act_on)
        print(simulation.run((1, 2)).valid.sum())
"""


def test_a_model_may_branch_on_tensors_if_tensorflow_has_a_single_thread() -> None:
    words = [sys.executable, "-c", ONE_THREAD]
    finished = subprocess.run(words, stdout=subprocess.PIPE, timeout=300, check=True)
    assert finished.stdout == b"16\n16\n"


class Twins(Learners):
    """Two learners with the same rollout."""

    def __init__(self) -> None:
        super().__init__(["a:1", "b:1"], 0)

    def _reduce(self, tensor: tf.Tensor, merge_op: str = "Add") -> tf.Tensor:
        return tensor if merge_op == "Max" else 2.0 * tensor


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_variables_may_be_sparse_unused_or_of_another_dtype() -> None:
    config = named("unusual").replace(jit_compile=True, max_kl=0.0)
    agents = [Agent(BOX, ACTIONS, config) for _ in range(2)]
    start = [variable.numpy() for variable in agents[0].trainable_variables]
    for old, new in zip(start, agents[1].trainable_variables, strict=True):
        new.assign(old)
    random = np.random.default_rng(0)
    rollout = rollout_of(8, 2, observation=random.normal(size=(9, 2, 2)))
    rollout.reward[:] = random.normal(size=(8, 2))
    for agent, learners in zip(agents, (SINGLE_LEARNER, Twins()), strict=True):
        updater = Updater(agent, config, learners=learners)
        assert updater.update(rollout, seed=(3, 4))["gradient_norm"] > 0
    ends = [agent.trainable_variables for agent in agents]
    for before, one, two in zip(start, *ends, strict=True):
        assert np.array_equal(before, one) == ("unused" in one.path)
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def test_a_model_that_xla_cannot_compile_is_a_one_line_error() -> None:
    config = named("printing").replace(jit_compile=True)
    updater = Updater(Agent(BOX, ACTIONS, config), config)
    message = r"^jit_compile: .* (PrintV2|StringFormat) [^\n]*; .*jit_compile=false\.$"
    with pytest.raises(ConfigError, match=message):
        updater.update(rollout_of(8, 2), seed=(3, 4))


@eagerly()
def test_an_undone_epoch_spares_the_value_of_a_model_that_names_its_policy() -> None:
    config = named("with_named_policy").replace(learning_rate=0.3, max_kl=1e-6)
    agent = Agent(X, spaces.Box(-1.0, 1.0, (1,)), config)
    policy = agent.policy_variables
    assert len(policy) == 5  # two layers and the log standard deviation
    rows = np.random.default_rng(0).normal(size=(9, 2, 3))
    rollout = rollout_of(8, 2, observation=rows, reward=rows[1:, :, 0])
    rollout = rollout._replace(
        action=rows[:8, :, :1].astype(np.float32), final_observation=rows[1:]
    )
    before = [variable.numpy() for variable in agent.trainable_variables]
    metrics = Updater(agent, config).update(rollout, seed=(0, 0))
    assert metrics["undone_epochs"] == 1
    for variable, old in zip(agent.trainable_variables, before, strict=True):
        is_policy = any(variable is other for other in policy)
        assert np.array_equal(variable.numpy(), old) is is_policy
    with pytest.raises(ConfigError, match="expected policy_variables to be a subset"):
        Agent(X, spaces.Discrete(2), named("with_foreign_policy"))


def test_layers_in_a_list_are_saved_and_restored(tmp_path: Path) -> None:
    config = named("layers_in_a_list").replace(env_name="fake")
    result = run(tmp_path / "run", config)
    fresh = Agent(result.agent.preprocess.input_space, ACTIONS, config.replace(seed=9))
    checkpoint.load_agent(tmp_path / "run" / "checkpoints", fresh)
    np.testing.assert_array_equal(parameters(fresh), parameters(result.agent))


@eagerly()
def test_example_of_the_docs_is_trained_saved_and_restored(
    example: Path, tmp_path: Path
) -> None:
    config = CONFIG.replace(network=f"{example}:residual")
    run_folder = RunFolder.create(tmp_path / "run", config)
    make_env = env_maker(config, num_workers=1)
    result = train(config, run_folder, make_env)
    run_folder, config = RunFolder.open(tmp_path / "run")
    fresh = Agent(
        spaces.Box(-np.inf, np.inf, (4,)), spaces.Discrete(2), config.replace(seed=9)
    )
    checkpoint.load_agent(run_folder.checkpoints, fresh)
    for restored, trained in zip(
        fresh.trainable_variables, result.agent.trainable_variables, strict=True
    ):
        np.testing.assert_array_equal(restored, trained)
    direct = evaluate_run(config, run_folder, make_env, result.agent)
    again = evaluate_run(config, run_folder, make_env)
    np.testing.assert_array_equal(direct.returns, again.returns)
    with pytest.raises(CheckpointError, match="networks that the config describes"):
        evaluate_run(config.replace(network="mlp"), run_folder, make_env)


def test_error_of_the_command_contains_the_path_of_a_missing_file(
    tmp_path: Path,
) -> None:
    save_run(tmp_path / "run", named("subclass"))
    run_folder, config = RunFolder.open(tmp_path / "run")
    run_folder.save_config(config.replace(network="gone.py:make"))
    code, _, error = ppo("export", tmp_path / "run", tmp_path / "model", "--trust")
    assert code == 2
    assert f"No such file or directory: '{Path.cwd() / 'gone.py'}'" in error
