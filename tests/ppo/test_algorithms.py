"""The algorithm is a setting: built-in ones, and classes in a user's file."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from ppo.agent.agent import Agent
from ppo.algorithms.algorithm import Algorithm
from ppo.algorithms.load import load_algorithm
from ppo.algorithms.ppo.ppo import PPO
from ppo.config import Config
from ppo.config.named_configs import CONFIGS, apply_settings, read_config
from ppo.environments import env_maker
from ppo.errors import ConfigError
from ppo.learners import Learners
from ppo.run_folder import checkpoint
from ppo.run_folder.folder import RunFolder
from ppo.run_folder.trust import code_names
from ppo.train import train
from tests.ppo.film_env import NAME
from tests.ppo.runs import SMALL, Maker, counters, eagerly, ppo, rows_of, run

pytestmark = pytest.mark.usefixtures("one_launcher")

EXAMPLE = Path(__file__).parents[2] / "examples" / "a2c.py"
A2C = SMALL.replace(
    env_name=NAME,
    import_modules=("tests.ppo.film_env",),
    algorithm=f"{EXAMPLE}:A2C",
    step_size=1e-2,
)


def test_the_docs_show_the_example() -> None:
    page = EXAMPLE.parents[1] / "docs" / "own-algorithm.md"
    code = EXAMPLE.read_text().partition('"""\n\n')[2]
    assert f"```python\n{code}```" in page.read_text()


class Killed(BaseException):
    """Ends a run immediately, without a checkpoint, as SIGKILL does."""


@eagerly()
def test_all_commands_serve_an_algorithm_in_a_users_file(tmp_path: Path) -> None:
    folder, steps = tmp_path / "run", iter(range(30))

    def on_step() -> None:
        if next(steps) == 26:
            raise Killed

    run_folder, make_env = RunFolder.create(folder, A2C), env_maker(A2C, num_workers=1)
    with pytest.raises(Killed):
        train(A2C, run_folder, make_env, on_step=on_step)
    assert counters(folder).iteration == 2
    code, output, error = ppo("train", "--resume", folder)
    assert (code, "Evaluation after 64 steps" in output) == (0, True), error
    rows = rows_of(folder)
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    assert {"policy_loss", "value_loss", "entropy"} < rows[-1].keys()
    assert ppo("evaluate", folder)[0] == 0
    assert json.loads((folder / "evaluation.json").read_text())["episodes"] == 3
    assert ppo("export", folder, tmp_path / "policy")[0] == 0
    policy = tf.saved_model.load(str(tmp_path / "policy"))
    assert policy.mode(tf.zeros([5, 2], tf.float64)).shape == (5, 1)
    assert ppo("visualize", folder, "--episodes", 1)[0] == 0
    assert len([*folder.rglob("*.mp4")]) == 1


def test_settings_of_an_algorithm_are_read_from_tables_files_and_commands(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.toml").write_text(
        'env_name = "X"\nalgorithm = "sac"\nseed = 3\n[sac]\ntau = 0.01\n'
    )
    config = apply_settings(read_config(tmp_path / "a.toml"), ["batch_size=32"])
    assert config.algorithm_settings["tau"] == 0.01
    assert config.algorithm_settings["batch_size"] == 32
    assert (config.seed, config.horizon) == (3, 4)  # SAC has another default
    settings = {"tau": 0.01, "batch_size": 32}
    assert config == Config(
        env_name="X", algorithm="sac", seed=3, algorithm_settings=settings
    )
    (tmp_path / "b.toml").write_text('env_name = "X"\n[ppo]\nepochs = 4\n')
    assert read_config(tmp_path / "b.toml") == Config(env_name="X", epochs=4)
    (tmp_path / "c.toml").write_text('env_name = "X"\nepochs = 3\n[ppo]\nepochs = 4\n')
    with pytest.raises(ConfigError, match="epochs: set twice, in the table ppo and"):
        read_config(tmp_path / "c.toml")
    (tmp_path / "c.toml").write_text(
        'env_name = "X"\nalgorithm = "my.py:A"\nlr = 1\n[algorithm_settings]\nlr = 2\n'
    )
    with pytest.raises(ConfigError, match="lr: set twice, in the table algorithm_set"):
        read_config(tmp_path / "c.toml")
    (tmp_path / "d.toml").write_text('env_name = "X"\nsac = 0\n')
    with pytest.raises(ConfigError, match="sac: expected a table of settings"):
        read_config(tmp_path / "d.toml")
    config = apply_settings(A2C, ["entropy_bonus=1e-2", "epochs=2"])
    assert config.algorithm_settings.keys() == {"step_size", "entropy_bonus"}
    assert load_algorithm(config).read_settings(config).entropy_bonus == 0.01


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm=sac", "epochs=4"], "epochs is a setting of ppo; the algorithm is"),
        (["tau=0.1"], "tau is a setting of sac; the algorithm is ppo"),
        (["batch_size=8"], "Did you mean minibatch_size"),
        (["algorithm=sac", "buffer_size=8"], "Did you mean replay_size"),
        (["algorithm=sac", "batch_size=0"], "batch_size: expected an int >= 1; got 0"),
        (["algorithm=sac", "ppo={}", "ppo={epochs = 1}"], "ppo: expected .* algorithm"),
        (
            ['algorithm_settings={"epochs": 3}'],
            "write it outside of algorithm_settings",
        ),
        (["algorithm=dqn"], "algorithm: expected ppo, sac, .*; got 'dqn'|got 'dqn'"),
    ],
)
def test_settings_of_another_algorithm_are_an_error(
    settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_settings(Config(env_name="X"), settings)


def test_another_algorithm_replaces_the_settings_tuned_for_the_first() -> None:
    config = apply_settings(CONFIGS["pendulum"], ["algorithm=sac", "seed=2"])
    assert config == CONFIGS["pendulum-sac"].replace(seed=2)
    config = apply_settings(CONFIGS["swimmer"], ["algorithm=sac"])
    assert config == Config(env_name="Swimmer-v5", algorithm="sac")
    config = apply_settings(CONFIGS["pong"], ["algorithm=my.py:Mine"])
    task = {"env_name", "import_modules", "wrappers", "evaluation_time_limit"}
    assert config.non_defaults().keys() == task | {"algorithm"}
    kept = Config(env_name="X", seed=5, discount=0.9)
    assert apply_settings(kept, ["algorithm=sac"]) == Config(
        env_name="X", seed=5, discount=0.9, algorithm="sac"
    )
    sac = kept.replace(algorithm="sac", tau=0.1)
    assert sac == apply_settings(kept, ["algorithm=sac", "tau=0.1"])
    assert sac.replace(algorithm="ppo") == kept
    mine = sac.replace(algorithm="my.py:Mine", tau=0.2)
    assert mine.algorithm_settings == {"tau": 0.2}
    assert mine.replace(algorithm="new/my.py:Mine").algorithm_settings == {"tau": 0.2}


def test_an_algorithm_in_a_file_is_code_that_must_be_trusted() -> None:
    assert code_names(A2C)["algorithm"] == [f"{EXAMPLE}:A2C"]


class Other(Algorithm):
    """An algorithm without settings that cannot train with several learners."""

    learn: Any = None


@dataclasses.dataclass
class SharedName:
    """Has a field with the name of a setting that all algorithms have."""

    learning_rate: float = 0.1


class Shared(Other):
    settings_type = SharedName


class NoDataclass(Other):
    settings_type = dict


class NoLearn(Algorithm):
    """An algorithm whose main method is missing."""


@dataclasses.dataclass
class Lists:
    """Settings of all documented types."""

    names: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    pair: tuple[int, float] = (0, 0.0)
    sizes: list[int] = dataclasses.field(default_factory=list)
    tag: str = ""
    on: bool = False
    label: str | None = None
    optional: tuple[int, ...] | None = None
    kind: Literal["a", "7"] = "a"
    mixed: tuple[str, int] = ("", 0)


class Listing(Other):
    settings_type = Lists


def test_settings_of_all_types_can_be_set_in_a_command() -> None:
    config = SMALL.replace(algorithm=f"{__name__}:Listing")
    changes = ["names=left, right", "pair=1,2", "tag=a,b", "on=true"]
    expected = Lists(names=("left", "right"), pair=(1, 2.0), tag="a,b", on=True)
    assert Listing.read_settings(apply_settings(config, changes)) == expected
    texts = ["names=1,2", "tag=007", "pair=1e0,-1e-3", "layers=(8, 4)", "on=False"]
    read = Listing.read_settings(apply_settings(config, texts))
    assert read == Lists(
        names=("1", "2"), tag="007", pair=(1, -0.001), layers=(8, 4), on=False
    )
    for tag in ("7", "1e6", "true", "[1, 2]", "{}", "8,4"):
        changed = apply_settings(config, [f"tag={tag}", f"label={tag}"])
        read = Listing.read_settings(changed)
        assert read.tag == read.label == tag
    texts = ["label=7", "optional=8", "kind=7", "mixed=a,1"]
    read = Listing.read_settings(apply_settings(config, texts))
    assert read == Lists(label="7", optional=(8,), kind="7", mixed=("a", 1))
    changed = apply_settings(config, [*texts, *(f"{k}=null" for k in ("label", "tag"))])
    read = Listing.read_settings(apply_settings(changed, ["optional=null"]))
    assert read == Lists(tag="null", kind="7", mixed=("a", 1))
    for change in ("names=left", 'names=["left"]'):
        changed = apply_settings(apply_settings(config, changes), [change])
        assert Listing.read_settings(changed).names == ("left",)
    one = apply_settings(config, ["layers=64"])
    assert Listing.read_settings(one) == Lists(layers=(64,))
    two = apply_settings(one, ["layers=64,32", "names="])
    for change in ("sizes=1,2", "sizes=3"):
        two = apply_settings(two, [change])
    assert Listing.read_settings(two).sizes == [3]
    two = apply_settings(two, ["sizes="])
    assert Listing.read_settings(two) == Lists(layers=(64, 32))
    assert Listing.read_settings(config) == Lists()
    deep = apply_settings(config, ["layers=" + 9999 * "["])
    with pytest.raises(ConfigError, match="layers: expected a value with fewer nested"):
        Listing.read_settings(deep)


def test_faulty_algorithms_are_errors_before_any_env_starts(tmp_path: Path) -> None:
    maker = Maker()

    def message(number: int, config: Config, learners: Learners) -> str:
        folder = RunFolder.create(tmp_path / str(number), config)
        with pytest.raises(ConfigError) as caught:
            train(config, folder, maker, learners=learners)
        return str(caught.value)

    one, two = Learners(), Learners(["a:1", "b:1"], 0)
    name = f"{__name__}:Other"
    config = SMALL.replace(algorithm=name)
    assert "one learner" in message(1, config, two)
    assert "'bonus'" in message(2, config.replace(bonus=1), one)
    renamed = message(12, config.replace(gamma=0.9), one)
    assert renamed.startswith("unknown key 'gamma'. Did you mean discount? The")
    misplaced = config.replace(algorithm_settings={"horizon": 3})
    assert "write it outside of algorithm_settings" in message(10, misplaced, one)
    assert "float" in message(3, A2C.replace(step_size="high"), one)
    shared = SMALL.replace(algorithm=f"{__name__}:Shared")
    assert "without the names of other settings, got learning_rate" in message(
        8, shared, one
    )
    no_dataclass = SMALL.replace(algorithm=f"{__name__}:NoDataclass")
    assert "expected a dataclass as settings_type, got <class 'dict'>" in message(
        9, no_dataclass, one
    )
    no_class = SMALL.replace(algorithm=f"{__name__}:NAME")
    assert f"in {__name__}, found" in message(4, no_class, one)
    no_learn = SMALL.replace(algorithm=f"{__name__}:NoLearn")
    assert "expected a class with the method learn" in message(11, no_learn, one)
    no_algorithm = SMALL.replace(algorithm=f"{__name__}:Path")
    assert "expected a subclass of" in message(5, no_algorithm, one)
    sac = Config(env_name="X", algorithm="sac")
    with pytest.raises(ConfigError, match="sac: expected one learner"):
        sac.per_learner(2)
    assert "sac: expected one learner" in message(7, sac, two)
    subclass = SMALL.replace(algorithm="ppo.algorithms.ppo.ppo:PPO")
    assert "divisor" in message(6, subclass.replace(minibatch_size=12), one)
    assert maker.made == []


class Counter(Algorithm):
    """An algorithm whose metrics have names of the training loop."""

    def learn(self, rollout: Any, **_: Any) -> Any:
        return {"steps": 7, "invalid_steps": 16, "evaluation_return": 3, "loss": 1}

    def statistics(self) -> dict[str, float]:
        return {"mean_return": 7.0, "evaluation_return": 3.0, "state": 2.0}


class Silent(Counter):
    """An algorithm that does not return metrics."""

    metrics: Any = None

    def learn(self, rollout: Any, **_: Any) -> Any:
        return self.metrics


class Mute(Counter):
    """An algorithm whose statistics are not numbers."""

    def statistics(self) -> Any:
        return {"state": "good"}


class Resetting(Counter):
    """An algorithm whose statistics cover the updates since they were last read."""

    updates = 0

    def learn(self, rollout: Any, **_: Any) -> Any:
        self.updates += 1
        return {}

    def statistics(self) -> dict[str, float]:
        updates, self.updates = self.updates, 0
        return {"updates": updates}


class Unbuilt(Counter):
    """An algorithm whose optimizer would create its variables in the first update."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.trackables = {"optimizers": [keras.optimizers.Adam()]}


class UnbuiltAgent(Counter):
    """An algorithm whose agent would create its variables in the first step."""

    @classmethod
    def make_agent(cls, *arguments: Any) -> Agent:
        agent = Agent(*arguments)
        agent.trackables = {"net": keras.Sequential([keras.layers.Dense(1)])}
        return agent


class Untracked(Counter):
    """An algorithm whose trackables a checkpoint cannot store."""

    stored: Any = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.trackables = self.stored


def test_trackables_without_variables_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got Adam, which is not built yet"):
        run(tmp_path / "run", SMALL.replace(algorithm=f"{__name__}:Unbuilt"))
    with pytest.raises(ConfigError, match="got Sequential, which is not built yet"):
        run(tmp_path / "agent", SMALL.replace(algorithm=f"{__name__}:UnbuiltAgent"))
    config = SMALL.replace(algorithm=f"{__name__}:Untracked", overlap=True)
    variable = tf.Variable(1.0)
    mixed = {1: variable, "v": variable}
    taken = {"agent": variable}, {"acting": variable}
    nested = {"targets": {0: variable}}
    wrong = (None, [variable], {1: variable}, mixed, nested, *taken)
    parts = ({"n": 3}, 3), ({"v": variable, "state": [{"lost": 3}]}, 3)
    for stored, got in [*zip(wrong, wrong, strict=True), *parts]:
        with (
            mock.patch.object(Untracked, "stored", stored),
            pytest.raises(ConfigError, match="a dict from names other than") as caught,
        ):
            run(tmp_path / "untracked", config)
        assert str(caught.value).endswith(f"Checkpoints, got {got!r:.200}.")


class Stack(keras.Model):
    """A model with a layer in a list, a layer in a dict, and weights of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [keras.layers.Dense(2, kernel_initializer="zeros")]
        self.heads = {"value": keras.layers.Dense(1, kernel_initializer="zeros")}
        self(tf.zeros([1, 1]))

    def call(self, rows: Any) -> Any:
        return self.heads["value"](self.hidden[0](rows))


class Stacked(Counter):
    """An algorithm that increments all weights of two models in each iteration."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        critic = Stack()
        self.trackables = {"critics": [critic]}
        self.weights = [*critic.weights, *self.agent.trackables["target"].weights]

    @classmethod
    def make_agent(cls, *arguments: Any) -> Agent:
        agent = Agent(*arguments)
        agent.trackables["target"] = Stack()
        return agent

    def learn(self, rollout: Any, **_: Any) -> Any:
        for weight in self.weights:
            weight.assign_add(tf.ones_like(weight))
        return {"smallest_weight": min(np.min(weight) for weight in self.weights)}


def test_layers_in_lists_and_dicts_of_a_model_are_stored(tmp_path: Path) -> None:
    config = SMALL.replace(algorithm=f"{__name__}:Stacked")
    run(tmp_path / "run", config)
    result = run(tmp_path / "run", config.replace(total_steps=96), resume=True)
    assert rows_of(tmp_path / "run")[-1]["smallest_weight"] == 6
    target = result.agent.trackables["target"] = Stack()
    checkpoint.load_agent(tmp_path / "run" / "checkpoints", result.agent)
    assert min(np.min(weight) for weight in target.weights) == 6


class Compiled(Counter):
    """An algorithm that trains a compiled model, whose optimizer may not be built."""

    is_built = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        self.model.compile("adam", "mse")
        if self.is_built:
            self.model.optimizer.build(self.model.trainable_variables)
        self.trackables = {"model": self.model}

    def learn(self, rollout: Any, **_: Any) -> Any:
        self.model.train_on_batch(np.ones((2, 1)), np.zeros((2, 1)))
        return {"updates": self.model.optimizer.iterations}


def test_compiled_model_is_resumed_if_its_optimizer_is_built(tmp_path: Path) -> None:
    config = SMALL.replace(algorithm=f"{__name__}:Compiled")
    with pytest.raises(ConfigError, match=r"created later: .*kernel.*in __init__"):
        run(tmp_path / "lazy", config)
    assert not (tmp_path / "lazy" / "checkpoints").exists()
    with mock.patch.object(Compiled, "is_built", True):
        run(tmp_path / "run", config)
        run(tmp_path / "run", config.replace(total_steps=96), resume=True)
    assert rows_of(tmp_path / "run")[-1]["updates"] == 6


class Replacing(Counter):
    """An algorithm that replaces its target in each iteration."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.trackables = {"target": tf.Variable(0.0)}

    def learn(self, rollout: Any, **_: Any) -> Any:
        self.trackables["target"] = tf.Variable(1.0, name="new")
        return {}


def test_trackables_that_replace_others_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"created later: \['new:0'\]"):
        run(tmp_path / "run", SMALL.replace(algorithm=f"{__name__}:Replacing"))


class Loading(Counter):
    """An algorithm that reads a file that it has not saved."""

    def load_data(self, folder: Path, steps: int) -> None:
        np.load(folder / "data.npy")


class Parsing(Counter):
    """An algorithm whose library raises an error without a number, as h5py does."""

    def load_data(self, folder: Path, steps: int) -> None:
        raise OSError("truncated file")


class Saving(Counter):
    """An algorithm that does not create the folder of its data."""

    def save_data(self, folder: Path) -> None:
        np.save(folder / "data.npy", np.zeros(3))


class Creating(Counter):
    """An algorithm that creates the folder of its data again for each checkpoint."""

    def save_data(self, folder: Path) -> None:
        folder.mkdir()


class Reading(Counter):
    """An algorithm that reads a missing file with TensorFlow."""

    def save_data(self, folder: Path) -> None:
        tf.io.read_file(str(folder / "data"))


def test_errors_of_an_algorithms_files_are_reported_with_their_tracebacks(
    tmp_path: Path,
) -> None:
    missing: Any = (FileNotFoundError, tf.errors.NotFoundError)
    for name in ("Saving", "Reading"):
        with pytest.raises(missing, match=r"run/algorithm/data"):
            run(tmp_path / name / "run", SMALL.replace(algorithm=f"{__name__}:{name}"))
    with pytest.raises(FileExistsError, match=r"run/algorithm"):
        run(tmp_path / "again" / "run", SMALL.replace(algorithm=f"{__name__}:Creating"))
    config = SMALL.replace(algorithm=f"{__name__}:Loading")
    run(tmp_path / "run", config)
    with pytest.raises(missing, match=r"run/algorithm/data\.npy"):
        run(tmp_path / "run", config, resume=True)
    parsing = config.replace(algorithm=f"{__name__}:Parsing")
    with pytest.raises(OSError, match=r"^truncated file$"):
        run(tmp_path / "run", parsing, resume=True)


def test_algorithm_without_support_for_recurrent_policies_is_an_error(
    tmp_path: Path,
) -> None:
    config = A2C.replace(env_name="fake", recurrent_size=4)
    with pytest.raises(ConfigError, match=r"^recurrent_size: expected 0, .* got 4\.$"):
        run(tmp_path / "run", config, in_graphs=True)


def test_metrics_are_numbers_and_do_not_replace_those_of_the_loop(
    tmp_path: Path,
) -> None:
    run(tmp_path / "run", SMALL.replace(algorithm=f"{__name__}:Counter"))
    rows = rows_of(tmp_path / "run")
    assert [row["steps"] for row in rows] == [16, 32, 48, 64]
    assert {(row["invalid_steps"], row["loss"]) for row in rows} == {(0.0, 1.0)}
    assert {(row["mean_return"], row["state"]) for row in rows} == {(3.0, 2.0)}
    assert "evaluation_return" not in rows[0]
    silent = SMALL.replace(algorithm=f"{__name__}:Silent")
    faulty = (None, {"x": "good"}, {1: 1.0}, {"x": 10**400}, {"\ud800": 1.0})
    for number, metrics in enumerate(faulty):
        with (
            mock.patch.object(Silent, "metrics", metrics),
            pytest.raises(ConfigError, match="`learn` to return a dict from metric"),
        ):
            run(tmp_path / f"silent-{number}", silent)
    with pytest.raises(ConfigError, match=r"`statistics` to return .* 'good'"):
        run(tmp_path / "mute", SMALL.replace(algorithm=f"{__name__}:Mute"))
    run(tmp_path / "once", SMALL.replace(algorithm=f"{__name__}:Resetting"))
    assert [row["updates"] for row in rows_of(tmp_path / "once")] == [1.0] * 4


def test_subclass_of_ppo_can_change_the_rewards(tmp_path: Path) -> None:
    source = (
        "from ppo.algorithms.ppo.ppo import PPO\n\n\n"
        "class Doubled(PPO):\n"
        "    def learn(self, rollout, **named):\n"
        "        rollout.reward[:] *= 2.0\n"
        "        metrics = super().learn(rollout, **named)\n"
        "        return metrics | {'reward': rollout.reward.mean()}\n"
    )
    (tmp_path / "doubled.py").write_text(source)
    config = SMALL.replace(algorithm=f"{tmp_path / 'doubled.py'}:Doubled")
    run(tmp_path / "run", config)
    assert [row["reward"] for row in rows_of(tmp_path / "run")] == [2.0] * 4


class Drifting(Agent):
    """Agent that adds its recurrent state to its actions, which updates ignore."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.state_sizes = (1,)

    def act_from(
        self, snapshot: Any, observation: Any, noise: tf.Tensor, *state: tf.Tensor
    ) -> tuple[Any, ...]:
        _, (mean, log_std) = super().act_from(snapshot, observation, noise)
        distribution = self.distribution_from((mean + state[0], log_std))
        return distribution.sample(noise), distribution.parameters, state[0] + 1.0


class Forgetful(PPO):
    """PPO with an agent whose state its updates do not use."""

    @classmethod
    def make_agent(cls, *arguments: Any) -> Agent:
        return Drifting(*arguments)


def test_a_warning_names_the_methods_if_updates_use_another_policy_than_rollouts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = SMALL.replace(algorithm=f"{__name__}:Forgetful")
    run(tmp_path / "run", config)
    (warning,) = caplog.messages
    assert "expected the policy that is updated to be the one that acted" in warning
    caplog.clear()
    run(tmp_path / "ppo")
    assert not caplog.messages


class Remembering(Agent):
    """Agent with two recurrent states: the step of the episode, and its observation.

    Its snapshot differs from that of its base class.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.state_sizes = (1, 2)

    def snapshot(self) -> Any:
        return {"scale": tf.constant(0.1)}

    def act_from(
        self, snapshot: Any, observation: Any, noise: tf.Tensor, *state: tf.Tensor
    ) -> tuple[Any, ...]:
        step, _ = state
        scale = 0.1 if snapshot is None else snapshot["scale"]
        _, parameters = super().act_from(None, observation, noise)
        return scale * step, parameters, step + 1.0, tf.cast(observation, tf.float32)


class Memory(Counter):
    """An algorithm whose agent has several recurrent states."""

    @classmethod
    def make_agent(cls, *arguments: Any) -> Agent:
        return Remembering(*arguments)


@eagerly()
def test_agent_can_have_its_own_snapshot_and_several_recurrent_states(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    config = A2C.replace(algorithm=f"{__name__}:Memory", algorithm_settings={})
    train(config, RunFolder.create(folder, config), env_maker(config, num_workers=1))
    assert ppo("evaluate", folder)[0] == 0
    evaluation = json.loads((folder / "evaluation.json").read_text())
    # The actions of the five steps are multiples of 0.1, scaled to bounds of 2.
    assert evaluation["returns"] == pytest.approx([2.0] * 3)
    assert ppo("visualize", folder, "--episodes", 1)[0] == 0
    film = json.loads((folder / "films" / "step-64.json").read_text())
    assert film["returns"] == pytest.approx([2.0])
    assert ppo("export", folder, tmp_path / "policy")[0] == 0
    policy = tf.saved_model.load(str(tmp_path / "policy"))
    state = policy.initial_state(1)
    for step in range(3):
        action, state = policy.mode(tf.constant([[0.5, step]], tf.float64), state)
        np.testing.assert_allclose(action, [[0.2 * step]], rtol=1e-6)
        np.testing.assert_array_equal(state, [[step + 1, 0.5, step]])
