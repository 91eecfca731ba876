"""Values of settings: tables, as a file gives them back, and what is wrong with one."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from ppo.errors import suggestion

__all__ = ["Table", "Tables", "in_words"]

#: What others call these settings.
_ALIASES = {
    **{"lr": "learning_rate", "gamma": "discount", "lam": "gae_lambda"},
    **{"env": "env_name", "env_id": "env_name", "n_envs": "num_envs"},
    **{"timesteps": "total_steps", "total_timesteps": "total_steps"},
    **{"n_steps": "horizon", "num_steps": "horizon", "rollout_length": "horizon"},
    **{"n_epochs": "epochs", "update_epochs": "epochs", "batch_size": "minibatch_size"},
    **{"ent_coef": "entropy_coefficient", "vf_coef": "value_coefficient"},
    **{"clip_coef": "clip_range", "clip_range_vf": "value_clip_range"},
    **{"max_grad_norm": "max_gradient_norm", "target_kl": "max_kl"},
    **{"hidden_sizes": "policy_layers", "net_arch": "policy_layers"},
}


def _plain(value: Any) -> Any:
    """Return a value as the folder of a run will give it back: with lists, no tuples.

    Raises:
        PydanticCustomError: it holds what JSON has no word for.
    """
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise PydanticCustomError("plain", "expected names, numbers, text, truth or lists")


Table = Annotated[
    Mapping[str, Any], AfterValidator(_plain), Field(examples=['{"name": 1}'])
]
Tables = Annotated[
    tuple[Annotated[Mapping[str, Any], AfterValidator(_plain)], ...],
    Field(strict=False, examples=['[{name = "ActionRepeat", amount = 4}]']),
]


def in_words(error: ErrorDetails, fields: Mapping[str, FieldInfo]) -> str:
    """Say which key is wrong, what was expected, and what was got."""
    key, indices = "".join(map(str, error["loc"][:1])), error["loc"][1:]
    if error["type"] == "extra_forbidden":
        near = suggestion(_ALIASES.get(key, key), fields)
        return f"unknown key {key!r}.{near} `ppo configs NAME` lists all keys."
    if error["type"] == "missing":
        return f'expected a key {key}, such as {key} = "CartPole-v1".'
    expected = re.sub(r"^\w+ should (be|have|match) ", "expected ", error["msg"])
    expected = expected.replace("greater than or equal to", "at least")
    expected = expected.replace("less than or equal to", "at most")
    field = fields.get(key)
    if field is not None and field.examples:
        expected += f", such as {field.examples[0]}"
    where = "".join([key, *(f"[{index}]" for index in indices), ": " if key else ""])
    return f"{where}{expected}, got {error['input']!r}."
