"""Configs as text: TOML and JSON files, and `key=value` settings.

Every way in checks keys and types alike; an unknown key is an error that suggests the
nearest known one.
"""

import ast
import dataclasses
import difflib
import inspect
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from ppo.config import Config
from ppo.errors import ConfigError

__all__ = [
    "apply_settings",
    "config_from_mapping",
    "config_to_json",
    "describe_keys",
    "read_config",
    "suggestion",
]

_TYPES = get_type_hints(Config)
_TABLES = tuple[Mapping[str, Any], ...]


def read_config(path: Path) -> Config:
    """Read a config from a `.toml` or `.json` file.

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
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected keys and values, got {content!r}.")
    return config_from_mapping(content, where=f"{path}: ")


def config_to_json(config: Config) -> str:
    """Return the config as a JSON object, all keys included."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def describe_keys() -> dict[str, str]:
    """Return each key's meaning: the first sentence of its doc in `Config`."""
    (body,) = ast.parse(inspect.getsource(Config)).body
    assert isinstance(body, ast.ClassDef)
    meanings = {}
    for key, doc in zip(body.body, body.body[1:], strict=False):
        match key, doc:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                meanings[name] = " ".join(text.split()).split(". ")[0].rstrip(".")
    return meanings


def config_from_mapping(content: Mapping[str, Any], where: str = "") -> Config:
    """Make a config from parsed TOML or JSON.

    Args:
        content: keys and values; a key that is left out has its default.
        where: put in front of error messages.

    Raises:
        ConfigError: a key is unknown or a value has the wrong type or range.
    """
    for key in content:
        _check_key(key, where)
    if "env_name" not in content:
        raise ConfigError(f'{where}expected a key env_name, such as "CartPole-v1".')
    values = {key: _checked(key, value, where) for key, value in content.items()}
    try:
        return Config(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from None


def apply_settings(config: Config, settings: Iterable[str]) -> Config:
    """Change a config by settings such as `learning_rate=1e-4`.

    Numbers may be written as in Python (`300_000`, `1e6`), layers as `64,64`, truth as
    `true` and `false`, mappings as JSON, and wrappers as JSON or TOML.

    Raises:
        ConfigError: a setting is malformed, unknown, or out of range.
    """
    changes: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set: expected key=value, got {setting!r}.")
        _check_key(key, "--set: ")
        changes[key] = _parsed(key, text)
    return config.replace(**changes)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean X?` with the nearest known name, or an empty string.

    A name that contains the given one is nearer than any that is spelt alike, the more
    so if it begins with it.
    """
    names = list(known)
    containing = sorted(
        (known_name for known_name in names if name and name in known_name),
        key=lambda known_name: (not known_name.startswith(name), len(known_name)),
    )
    nearest = containing or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" Did you mean {nearest[0]}?" if nearest else ""


def _check_key(key: str, where: str) -> None:
    if key not in _TYPES:
        raise ConfigError(
            f"{where}unknown key {key!r}.{suggestion(key, _TYPES)} "
            "`ppo configs NAME` lists all keys."
        )


def _parsed(key: str, text: str) -> Any:
    """Turn the text of a setting into a value of the key's type."""
    wanted = _TYPES[key]
    text = text.strip()
    if wanted is str:
        return text
    if wanted is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        if wanted is int:
            return _checked(key, _integer(text), "--set: ")
        if wanted is float:
            return float(text)
        if wanted == tuple[int, ...]:
            sizes = text.strip("[]()").replace(",", " ").split()
            return tuple(_integer(size) for size in sizes)
        if wanted == tuple[str, ...]:
            return tuple(text.strip("[]()").replace(",", " ").split())
        if wanted == _TABLES:
            return _checked(key, _json_or_toml(text), "--set: ")
        return _checked(key, json.loads(text), "--set: ")
    except ValueError:
        raise _type_error(key, text, "--set: ") from None


def _json_or_toml(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        (value,) = tomllib.loads(f"value = {text}").values()
        return value


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)
    if not number.is_integer():  # infinity is none either
        raise ValueError(text)
    return int(number)


def _checked(key: str, value: Any, where: str) -> Any:
    """Check the type of a parsed value; widens int to float and list to tuple."""
    wanted = _TYPES[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if wanted is float and is_number:
        return float(value)
    if wanted is int and is_number and isinstance(value, int):
        return value
    if wanted in (bool, str) and isinstance(value, wanted):
        return value
    if wanted == tuple[int, ...] and isinstance(value, list):
        if all(isinstance(size, int) and size is not True for size in value):
            return tuple(value)
    elif wanted == tuple[str, ...] and isinstance(value, list):
        if all(isinstance(word, str) for word in value):
            return tuple(value)
    elif wanted == _TABLES and isinstance(value, list):
        if all(isinstance(table, Mapping) for table in value):
            return tuple(dict(table) for table in value)
    elif wanted == Mapping[str, Any] and isinstance(value, Mapping):
        return dict(value)
    raise _type_error(key, value, where)


def _type_error(key: str, value: Any, where: str) -> ConfigError:
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        tuple[int, ...]: "whole numbers such as 64,64",
        tuple[str, ...]: "names such as ale_py",
        _TABLES: 'tables such as [{name = "ActionRepeat", amount = 4}]',
    }
    wanted = names.get(_TYPES[key], 'a mapping such as {"name": 1}')
    return ConfigError(f"{where}{key}: expected {wanted}, got {value!r}.")
