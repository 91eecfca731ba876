"""`Config`: validation, files, settings as text, named configs."""

import codecs
import dataclasses
import json
import math
import pickle
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from gymnasium import spaces

from envserve.settings import field_docs
from ppo.config import Config
from ppo.config.named_configs import (
    CONFIGS,
    apply_settings,
    load_config,
    read_config,
    recommended_settings,
)
from ppo.config.sac import SACSettings
from ppo.errors import ConfigError
from ppo.run_folder.folder import RunFolder

BASE = Config(env_name="CartPole-v1")
MY_WRAPPER = {"name": "MyWrapper", "speed": 0.5}


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("learnin_rate", "learning_rate"),
        ("num_env", "num_envs"),
        # Known keys that contain the unknown one come first.
        ("env", "env_name"),
        ("rate", "learning_rate"),
        ("steps", "total_steps"),
    ],
)
def test_error_for_an_unknown_key_suggests_the_nearest_one(
    key: str, nearest: str, tmp_path: Path
) -> None:
    message = (
        rf"unknown key '{key}'\. Did you mean {nearest}\? `ppo configs NAME --all`"
    )
    with pytest.raises(ConfigError, match=message):
        apply_settings(BASE, [f"{key}=1"])
    (tmp_path / "mine.json").write_text(json.dumps({"env_name": "X", key: 3}))
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path / "mine.json")


def test_error_for_the_number_of_workers_names_the_option() -> None:
    with pytest.raises(ConfigError, match="not a setting; use the option --num-work"):
        apply_settings(BASE, ["num_workers=4"])


@pytest.mark.parametrize("key", ["zzz", "self"])
def test_error_for_a_key_without_similar_ones_suggests_nothing(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key '{key}'\. `ppo configs"):
        apply_settings(BASE, [f"{key}=1"])
    values: dict[str, Any] = {"env_name": "X", key: 1}
    with pytest.raises(ConfigError, match=rf"unknown key '{key}'\. `ppo configs"):
        Config(**values)


@pytest.mark.parametrize("kind", [Config, SACSettings])
def test_every_setting_has_a_docstring_and_every_number_has_bounds(
    kind: type[Any],
) -> None:
    hints = get_type_hints(kind, include_extras=True)
    assert list(field_docs(kind)) == list(hints)
    for key, hint in hints.items():
        if get_args(hint)[:1] in ((int,), (float,)):
            (bounds,) = hint.__metadata__
            assert None not in (bounds.ge, bounds.le), key
        else:
            assert hint not in (int, float), key


def test_all_invalid_settings_are_reported_in_one_error() -> None:
    with pytest.raises(ConfigError, match=r"seed: .*; got -1\. epochs: .*; got 0\.$"):
        BASE.replace(epochs=0, seed=-1)


def test_config_is_immutable_and_can_be_pickled() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match="seed"):
        BASE.seed = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(BASE)) == BASE
    assert BASE.replace() == BASE


@pytest.mark.parametrize("name", list(CONFIGS))
def test_saved_configs_are_equal_when_they_are_read(tmp_path: Path, name: str) -> None:
    changed = CONFIGS[name].replace(
        env_kwargs={"g": 9.8}, policy_layers=(32, 16), wrappers=(MY_WRAPPER,)
    )
    path = tmp_path / "config.json"
    RunFolder(tmp_path).save_config(changed)
    assert read_config(path) == changed
    assert set(json.loads(path.read_text())) == set(vars(BASE))


def test_toml_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'env_name = "Pendulum-v1"\nlearning_rate = 1\npolicy_layers = [8]\n'
        'scale_rewards = false\nwrappers = [{name = "MyWrapper", speed = 0.5}]\n'
        "[env_kwargs]\ng = 9.8\n"
    )
    config = load_config(str(path))
    assert config == Config(
        env_name="Pendulum-v1",
        learning_rate=1.0,
        policy_layers=(8,),
        scale_rewards=False,
        env_kwargs={"g": 9.8},
        wrappers=(MY_WRAPPER,),
    )
    assert isinstance(config.learning_rate, float)
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())  # as some editors do
    assert load_config(str(path)) == config


def test_python_file_is_executed(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from ppo.config.named_configs import CONFIGS\n"
        'config = CONFIGS["cartpole"].replace(discount=0.98)\n'
    )
    assert load_config(str(path)) == CONFIGS["cartpole"].replace(discount=0.98)


CONFIG_OF = "from ppo.config.config import Config\nconfig = Config(env_name='X', {})"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"mine\.py: expected a Python file, found none"),
        ("", r"expected `config = ppo\.config\.Config\(...\)`, found no such variable"),
        ("config = 3", r"found an int"),
        ("1 / 0", r"executing the file raised ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", r"executing the file raised SystemExit: 3\."),
        (CONFIG_OF.format("wrappers=3"), r"mine\.py: wrappers: .* a list, .* got 3\."),
        (CONFIG_OF.format("num_envs=4.5"), r"num_envs: .* an int; got 4\.5\."),
        (CONFIG_OF.format("num_envs='4'"), r"num_envs: .* an int; got '4'\."),
        (CONFIG_OF.format("seed=True"), r"seed: expected an int; got True\."),
        (CONFIG_OF.format("discount='1'"), r"discount: .* a number; got '1'\."),
        (CONFIG_OF.format("policy_layers=(64.0,)"), r"policy_layers\[0\]: .* an int"),
    ],
)
def test_error_in_a_python_file_names_the_file(
    tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(str(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("learning_rate=1e-4", 1e-4),
        ("learning_rate=0", 0.0),
        ("total_steps=300_000", 300_000),
        ("total_steps=1e6", 1_000_000),
        ("scale_rewards=false", False),
        ("decay_clip_range=True", True),
        ("policy_layers=256,128", (256, 128)),
        ("policy_layers=[32]", (32,)),
        ("policy_layers=", ()),
        ("env_name=Pendulum-v1", "Pendulum-v1"),
        ("import_modules=ale_py,my.envs", ("ale_py", "my.envs")),
        ("callbacks=/my code/a.py:f, b.py:g", ("/my code/a.py:f", "b.py:g")),
        ('env_kwargs={"g": 9.8}', {"g": 9.8}),
        (
            'wrappers=[{name = "ActionRepeat", amount = 4}, {name = "ClipAction"}]',
            ({"name": "ActionRepeat", "amount": 4}, {"name": "ClipAction"}),
        ),
        (
            'wrappers=[{"name": "FrameHistory", "past_indices": [0, 2]}]',
            ({"name": "FrameHistory", "past_indices": [0, 2]},),
        ),
        ('wrappers=[{name = "MyWrapper", speed = 0.5}]', (MY_WRAPPER,)),
        ("wrappers=[]", ()),
    ],
)
def test_parsed_settings_have_the_type_of_their_key(
    setting: str, value: object
) -> None:
    result = getattr(apply_settings(BASE, [setting]), setting.partition("=")[0])
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("learning_rate", r"expected key=value, got 'learning_rate'"),
        ("learning_rate=fast", r"expected a number; got 'fast'"),
        ("learning_rate=nan", r"expected a number >= 0\.0; got nan"),
        ("total_steps=1.5", r"expected an int; got 1\.5"),
        ("total_steps=inf", r"expected an int; got inf"),
        ("scale_rewards=maybe", r"expected a bool \(true or false\); got 'maybe'"),
        ("policy_layers=a,b", r"\[0\]: .*an int, such as 64,64; got \['a', 'b'\]"),
        ("policy_layers=0", r"policy_layers\[0\]: expected an int >= 1, .* got \[0"),
        ("value_layers=65537", r"\[0\]: expected an int <= 65536, .* got \[65537"),
        ("policy_layers=1e400", r"expected an int, such as 64,64; got \[inf"),
        ("env_kwargs=3", r"expected a map, such as {\"name\": 1}; got"),
        ("wrappers=ActionRepeat", r"a map, such as \[\{name = .* got \['ActionRep"),
        ("wrappers=[]\nseed = 1", r"a map, such as \[\{name = .* got \['seed = 1'"),
        ("wrappers=[4]", r"wrappers\[0\]: .* such as \[\{name = .*; got \[4\]\."),
        ("wrappers=[{amount = 4}]", r"wrappers\[0\]: expected a name, or a table"),
        (
            'wrappers=[{name = "ActionRepeat", amount = 0}]',
            r"wrappers\[0\] \(ActionRepeat\): amount: expected an int .*; got 0\.",
        ),
        ("discount=1.01", r"expected a number <= 1\.0; got 1\.01"),
        ("num_envs=0", r"expected an int >= 1; got 0"),
        (f"num_envs=1{'0' * 400}", r"expected an int <= 65536; got 1000"),
        ("seed=-1", r"expected an int >= 0; got -1"),
        ("sequence_length=-1", r"expected an int >= 0; got -1"),
        ("activation=sigmoidal", r"expected one of elu, .*, tanh; got 'sigmoidal'"),
        ("objective=trust", r"expected clip, penalty, .*, got 'trust'"),
        ("learning_rate_schedule=cosine", r"expected constant, linear, kl_adaptive, p"),
        ("optimizer=adagrad", r"expected adam, adamw, rmsprop, sgd, package.module:f"),
        ("initial_kl_penalty=0", r"expected a number >= 0\.001; got 0"),
        ("on_server_lost=wait", r"expected one of raise, pad; got 'wait'"),
        ("on_fault=ignore", r"expected one of truncate, raise; got 'ignore'"),
        ("nonfinite=zero", r"expected one of raise, mask, pass; got 'zero'"),
        ("minibatch_size=60", r"expected a divisor of .* 2048, got 60"),
        (
            "recurrent_size=64",
            r"a multiple of the sequence length .* horizon = 128 .or set s.*, got 64",
        ),
        ("total_steps=2000", r"expected at least one iteration, .* got 2000"),
        ("env_name=", r"expected a str of length >= 1, such as CartPole-v1; got ''"),
        ("callbacks=[3]", r"callbacks\[0\]: expected a str, such as my.py:callback"),
        ("network=resnet", r"expected auto, mlp, cnn, package.*, got 'resnet'"),
        ("network=a:", r"expected auto, mlp, cnn, package"),
        ("network=:b", r"expected auto, mlp, cnn, package"),
        ("network=a b:c", r"expected auto, mlp, cnn, package"),
        ("network=a.:b", r"expected auto, mlp, cnn, package"),
        ("callbacks=\udcff.py:f", r"expected text in UTF-8, got .*udcff.py:f"),
        pytest.param(
            "wrappers=" + 2000 * "[", r"fewer nested levels, got \[", id="deep"
        ),
    ],
)
def test_error_for_an_invalid_setting_names_the_expected_value(
    setting: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^--set: .*{message}") as caught:
        apply_settings(BASE, [setting])
    # With recurrent_size, the error is about minibatch_size.
    if not setting.startswith("recurrent_size"):
        assert setting.partition("=")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("sequence_length", "message"),
    [
        (48, "sequence_length: expected 0 or a divisor of horizon = 128, got 48"),
        (
            128,
            "minibatch_size: expected a multiple .* sequence_length = 128 .*, got 64",
        ),
    ],
)
def test_sequence_length_must_divide_horizon_and_minibatch_size(
    sequence_length: int, message: str
) -> None:
    config = BASE.replace(recurrent_size=8, sequence_length=32)
    assert config.replace(sequence_length=0, minibatch_size=256)
    with pytest.raises(ConfigError, match=message):
        config.replace(sequence_length=sequence_length)
    with pytest.raises(ConfigError, match="expected 0 with a custom network, a:b"):
        config.replace(network="a:b")
    # Without recurrence, sequence_length has no effect.
    assert BASE.replace(sequence_length=sequence_length)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected TOML or JSON"),
        ("[1]", r"expected a table of settings, got \[1\]"),
        ("{}", 'the key env_name, for example env_name = "CartPole-v1"'),
        ('{"env_name": "X", "import_modules": [1]}', r"import_modules\[0\]: .* a str"),
        (
            '{"env_name": "X", "discount": 2}',
            "discount: expected a number <= 1.0; got 2",
        ),
    ],
)
def test_error_in_a_json_file_names_the_file(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


def test_planned_steps_are_whole_iterations() -> None:
    config = BASE.replace(total_steps=5000)
    assert config.steps_per_iteration == 2048
    assert config.planned_steps == 2 * config.steps_per_iteration


def test_env_has_its_named_config_or_settings_that_suit_its_spaces() -> None:
    assert load_config("CartPole-v1") == CONFIGS["cartpole"]
    assert load_config("CartPole-v0") == Config(env_name="CartPole-v0")
    assert load_config("my_env.py:Walk").env_name == "my_env.py:Walk"
    pong = load_config("ALE/Pong-v5")
    assert (pong.env_kwargs, pong.import_modules) == ({"frameskip": 1}, ("ale_py",))
    vector = spaces.Box(-1.0, 1.0, (3,))
    image = spaces.Dict(
        {"a": vector, "b": spaces.Tuple([spaces.Box(0, 255, (9, 9, 3), np.uint8)])}
    )
    config = Config(env_name="X-v0")
    for box in (vector, spaces.Box(0, 10, (2,), np.int32)):  # Gaussian policies
        assert recommended_settings(vector, box) == {"gae_lambda": 0.9}
    for actions in (spaces.Discrete(2), spaces.Tuple([spaces.Discrete(2)])):
        assert config.replace(
            **recommended_settings(vector, actions)
        ).normalize_advantages
    assert (
        config.replace(**recommended_settings(image, spaces.Discrete(2))).num_envs == 8
    )
    mixed = recommended_settings(image, vector)
    assert mixed["entropy_coefficient"] == 0  # the noise would grow
    assert mixed["policy_layers"] == mixed["value_layers"] == (64, 64)
    pixels = spaces.Dict(
        {"action_mask": spaces.Tuple([spaces.MultiBinary(2)]), "b": image["b"]}
    )
    for only_images in (image["b"], pixels):
        settings = recommended_settings(only_images, spaces.Discrete(2))
        assert settings["policy_layers"] == settings["value_layers"] == ()
        assert settings["entropy_coefficient"] == 0.01
    # Without an image for convolutions: too small, bounds other than 0 and 255.
    for grid in (
        spaces.Box(0, 255, (7, 7, 3), np.uint8),
        spaces.Box(0, 255, (4, 128), np.uint8),
        spaces.Box(0, 10, (9, 9), np.uint8),
        spaces.Dict({"image": spaces.Box(0, 255, (7, 7, 3), np.uint8)}),
    ):
        assert config.replace(
            **recommended_settings(grid, spaces.Discrete(3))
        ).policy_layers


def test_env_kwargs_and_wrappers_are_equal_when_they_are_read(tmp_path: Path) -> None:
    given = {"range": (0.6, math.inf), "names": {"a": [True, None]}}
    wrapper = {"name": "TimeLimit", "max_episode_steps": 9}
    config = Config(env_name="Hopper-v5", env_kwargs=given, wrappers=(wrapper,))
    assert config.env_kwargs == {"range": [0.6, math.inf], "names": {"a": [True, None]}}
    path = tmp_path / "config.json"
    RunFolder(tmp_path).save_config(config)
    assert read_config(path) == config
    for odd, where in (
        ({"a": {1: 2}}, "['a']"),
        ({"a": np.bool_(True)}, "['a']"),
        ({"a": [np.zeros(3)]}, "['a'][0]"),
        ({"a": Path("b")}, "['a']"),
    ):
        message = f"^{re.escape(f'env_kwargs{where}')}: expected a number, string, bool"
        with pytest.raises(ConfigError, match=message):
            config.replace(env_kwargs=odd)
    with pytest.raises(ConfigError, match="env_kwargs: expected a str as a key"):
        config.replace(env_kwargs={1: 2})
