"""Configs: checked values, text in and out, named ones."""

import dataclasses
import json
from pathlib import Path

import pytest

from ppo.config import Config
from ppo.config_text import (
    apply_settings,
    config_from_mapping,
    config_to_json,
    describe_keys,
    read_config,
)
from ppo.configs import CONFIGS, load_config
from ppo.errors import ConfigError

BASE = Config(env_name="CartPole-v1")
MY_OWN = {"name": "MyOwn", "speed": 0.5}


def test_an_unknown_key_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'learnin_rate'.*learning_rate"):
        apply_settings(BASE, ["learnin_rate=1e-4"])
    with pytest.raises(ConfigError, match=r"unknown key 'num_env'.*num_envs\?"):
        config_from_mapping({"env_name": "CartPole-v1", "num_env": 3})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("env", "env_name"), ("rate", "learning_rate"), ("steps", "total_steps")],
)
def test_keys_that_contain_the_word_are_suggested_first(key: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"Did you mean {nearest}\?"):
        apply_settings(BASE, [f"{key}=1"])


def test_every_key_has_a_meaning() -> None:
    meanings = describe_keys()
    assert list(meanings) == [field.name for field in dataclasses.fields(Config)]
    assert meanings["num_envs"] == "Rows of the batch of envs"


def test_a_key_like_nothing_known_suggests_nothing() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'zzz'\. `ppo configs"):
        apply_settings(BASE, ["zzz=1"])


@pytest.mark.parametrize("name", list(CONFIGS))
def test_saved_configs_read_back_equal(tmp_path: Path, name: str) -> None:
    changed = CONFIGS[name].replace(
        env_kwargs={"g": 9.8}, policy_layers=(32, 16), wrappers=(MY_OWN,)
    )
    path = tmp_path / "config.json"
    path.write_text(config_to_json(changed))
    assert read_config(path) == changed


def test_toml_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'env_name = "Pendulum-v1"\nlearning_rate = 1\npolicy_layers = [8]\n'
        'scale_rewards = false\nwrappers = [{name = "MyOwn", speed = 0.5}]\n'
        "[env_kwargs]\ng = 9.8\n"
    )
    config = load_config(str(path))
    assert config == Config(
        env_name="Pendulum-v1",
        learning_rate=1.0,
        policy_layers=(8,),
        scale_rewards=False,
        env_kwargs={"g": 9.8},
        wrappers=(MY_OWN,),
    )
    assert isinstance(config.learning_rate, float)


def test_a_python_file_is_run(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from ppo.configs import CONFIGS\n"
        'config = CONFIGS["cartpole"].replace(discount=0.98)\n'
    )
    assert load_config(str(path)) == CONFIGS["cartpole"].replace(discount=0.98)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"mine\.py: expected a Python file, found none"),
        ("", r"expected `config = ppo\.config\.Config\(...\)`, found no such name"),
        ("config = 3", r"found a int"),
        ("1 / 0", r"expected a file that runs; ZeroDivisionError: division by zero"),
        (
            "from ppo.config import Config\nconfig = Config(env_name='')",
            r"mine\.py: env_name: expected the name of an env",
        ),
    ],
)
def test_a_bad_python_file_is_named(
    tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(str(path))


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("learning_rate=1e-4", "learning_rate", 1e-4),
        ("learning_rate=0", "learning_rate", 0.0),
        ("total_steps=300_000", "total_steps", 300_000),
        ("total_steps=1e6", "total_steps", 1_000_000),
        ("scale_rewards=false", "scale_rewards", False),
        ("decay_clip_range=True", "decay_clip_range", True),
        ("policy_layers=256,128", "policy_layers", (256, 128)),
        ("policy_layers=[32]", "policy_layers", (32,)),
        ("policy_layers=", "policy_layers", ()),
        ("env_name=Pendulum-v1", "env_name", "Pendulum-v1"),
        ("import_modules=ale_py,my.envs", "import_modules", ("ale_py", "my.envs")),
        ('env_kwargs={"g": 9.8}', "env_kwargs", {"g": 9.8}),
        (
            'wrappers=[{name = "ActionRepeat", amount = 4}, {name = "ClipAction"}]',
            "wrappers",
            ({"name": "ActionRepeat", "amount": 4}, {"name": "ClipAction"}),
        ),
        (
            'wrappers=[{"name": "FrameHistory", "past_indices": [0, 2]}]',
            "wrappers",
            ({"name": "FrameHistory", "past_indices": [0, 2]},),
        ),
        ('wrappers=[{name = "MyOwn", speed = 0.5}]', "wrappers", (MY_OWN,)),
        ("wrappers=[]", "wrappers", ()),
    ],
)
def test_settings_have_the_type_of_their_key(
    setting: str, key: str, value: object
) -> None:
    result = getattr(apply_settings(BASE, [setting]), key)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("learning_rate", r"expected key=value, got 'learning_rate'"),
        ("learning_rate=fast", r"learning_rate: expected a number, got 'fast'"),
        ("learning_rate=nan", r"learning_rate: expected a number from 0 to 1, got nan"),
        ("total_steps=1.5", r"total_steps: expected a whole number, got '1.5'"),
        ("scale_rewards=maybe", r"scale_rewards: expected true or false, got 'maybe'"),
        ("policy_layers=a,b", r"policy_layers: expected whole numbers"),
        ("total_steps=inf", r"total_steps: expected a whole number, got 'inf'"),
        ("policy_layers=0", r"policy_layers: expected sizes from 1 to 65536, got"),
        ("value_layers=65537", r"value_layers: expected sizes from 1 to 65536, got"),
        ("policy_layers=1e400", r"policy_layers: expected whole numbers"),
        ("env_kwargs=3", r"env_kwargs: expected a mapping"),
        ("wrappers=ActionRepeat", r"wrappers: expected tables such as \[\{name = "),
        ("wrappers=[]\nseed = 1", r"wrappers: expected tables such as"),
        ("wrappers=[4]", r"wrappers: expected tables such as .*, got \[4\]"),
        ("wrappers=[{amount = 4}]", r"wrappers\[0\]: expected a table with a name"),
        (
            'wrappers=[{name = "ActionRepeat", amount = 0}]',
            r"wrappers\[0\] \(ActionRepeat\): amount: expected an int .*; got 0\.",
        ),
        ("discount=1.01", r"discount: expected a number from 0 to 1, got 1.01"),
        ("num_envs=0", r"num_envs: expected a number from 1"),
        (f"num_envs=1{'0' * 400}", r"num_envs: expected a number from 1 to 65536"),
        ("seed=-1", r"seed: expected a number from 0 to 2147483647, got -1"),
        ("activation=sigmoidal", r"activation: expected one of elu"),
        ("objective=trust", r"objective: expected one of clip, penalty, clip_and_pen"),
        ("learning_rate_schedule=cosine", r"schedule: expected one of constant, lin"),
        ("initial_kl_penalty=0", r"initial_kl_penalty: expected a number from 0.001"),
        ("on_server_lost=wait", r"on_server_lost: expected raise or pad"),
        ("on_fault=ignore", r"on_fault: expected truncate or raise"),
        ("minibatch_size=60", r"minibatch_size: expected a divisor of .* 2048"),
        ("recurrent_size=64", r"a multiple of the length .* horizon = 128, got 64; ch"),
        ("total_steps=2000", r"total_steps: expected at least one iteration"),
        ("env_name=", r"env_name: expected the name of an env"),
    ],
)
def test_bad_settings_say_what_was_expected(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_settings(BASE, [setting])


@pytest.mark.parametrize(
    ("sequence_length", "message"),
    [
        (48, "sequence_length: expected 0 or a divisor of horizon = 128, got 48"),
        (128, "minibatch_size: expected a multiple .* sequence_length = 128, got 64"),
        (-1, "sequence_length: expected a number from 0"),
    ],
)
def test_sequences_fill_rollouts_and_minibatches(
    sequence_length: int, message: str
) -> None:
    config = BASE.replace(recurrent_size=8, sequence_length=32)
    assert config.replace(sequence_length=0, minibatch_size=256)
    with pytest.raises(ConfigError, match=message):
        config.replace(sequence_length=sequence_length)
    with pytest.raises(ConfigError, match="expected 0 with a network of your own, a:b"):
        config.replace(network="a:b")
    # Without recurrence there are no sequences.
    assert BASE.replace(sequence_length=max(sequence_length, 0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected TOML or JSON"),
        ("[1]", "expected keys and values"),
        ("{}", "expected a key env_name"),
        ('{"env_name": "X", "num_envs": true}', "num_envs: expected a whole number"),
        ('{"env_name": "X", "num_envs": 2.0}', "num_envs: expected a whole number"),
        ('{"env_name": "X", "policy_layers": [1.5]}', "policy_layers: expected whole"),
        ('{"env_name": "X", "import_modules": [1]}', "import_modules: expected names"),
        ('{"env_name": "X", "discount": 2}', "discount: expected a number from 0"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("num_envs=4.5", "num_envs: expected a whole number, got 4.5"),
        ("num_envs='4'", "num_envs: expected a whole number, got '4'"),
        ("seed=True", "seed: expected a whole number, got True"),
        ("discount='high'", "discount: expected a number, got 'high'"),
        ("policy_layers=(64.0,)", "policy_layers: expected whole numbers, got"),
    ],
)
def test_numbers_of_a_python_file_have_the_type_of_their_key(
    tmp_path: Path, value: str, message: str
) -> None:
    path = tmp_path / "typed.py"
    text = "from ppo.config import Config\nconfig = Config(env_name='X', {})\n"
    path.write_text(text.format("discount=1"))
    assert load_config(str(path)).discount == 1
    path.write_text(text.format(value))
    with pytest.raises(ConfigError, match=message):
        load_config(str(path))


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_config(str(tmp_path / "none.toml"))


def test_a_misspelt_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean cartpole"):
        load_config("cartpol")


def test_iterations_never_exceed_the_steps() -> None:
    config = BASE.replace(total_steps=5000)
    assert config.steps_per_iteration == 2048
    assert config.num_iterations == 2


def test_every_number_of_the_config_has_bounds() -> None:
    from ppo.config import _BOUNDS

    numbers = {
        field.name
        for field in dataclasses.fields(Config)
        if field.name != "env_name" and type(getattr(BASE, field.name)) in (int, float)
    }
    assert numbers == set(_BOUNDS)


def test_the_saved_config_holds_every_key() -> None:
    saved = json.loads(config_to_json(BASE))
    assert set(saved) == {field.name for field in dataclasses.fields(Config)}
