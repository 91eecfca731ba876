"""The exception hierarchy and the exceptions' messages."""

from __future__ import annotations

import inspect
import traceback
from dataclasses import dataclass
from typing import Any

import pytest

from envserve import errors
from envserve.errors import CallError, EnvError, EnvserveError, EnvStartError
from envserve.lane import Block, Fault
from envserve.slab import Status
from envserve.spaces.codec import CodecError
from envserve.wire.result_report import ResultReport
from envserve.worker.worker_report import decode_report, encode_report, fault_from_error


def test_every_error_is_public_and_derives_from_envserve_error() -> None:
    defined = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert defined.keys() == set(errors.__all__)
    assert all(issubclass(error, EnvserveError) for error in defined.values())


@pytest.mark.parametrize(
    ("ours", "builtin"),
    [
        (errors.SpaceError, TypeError),
        (errors.ActionError, ValueError),
        (errors.UnknownEnv, LookupError),
        (errors.WrapperError, ValueError),
        (CodecError, EnvserveError),
        (CodecError, ValueError),
        (errors.EnvTimeout, TimeoutError),
        (errors.ConnectError, ConnectionError),
        (errors.ServerLost, ConnectionError),
    ],
)
def test_errors_also_derive_from_the_matching_builtin(
    ours: type[Exception], builtin: type[Exception]
) -> None:
    assert issubclass(ours, builtin)


def test_local_and_remote_protocol_errors_are_distinct() -> None:
    assert not issubclass(errors.LocalProtocolError, errors.RemoteProtocolError)
    assert not issubclass(errors.RemoteProtocolError, errors.LocalProtocolError)
    assert issubclass(errors.LocalProtocolError, errors.ProtocolError)


def test_env_error_shows_the_workers_traceback_after_the_message() -> None:
    error = EnvError("Env 3: raised", env_index=3, remote_traceback="Traceback: x\n\n")
    assert str(error) == "Env 3: raised\n\nIn the worker:\nTraceback: x"
    assert error.env_index == 3
    assert error.remote_traceback == "Traceback: x\n\n"


@pytest.mark.parametrize("ours", [EnvError, EnvStartError, CallError])
@pytest.mark.parametrize("kind", [MemoryError, OSError, KeyError, UnicodeDecodeError])
def test_env_error_is_also_the_envs_builtin_exception(
    ours: type[EnvError], kind: type[Exception]
) -> None:
    error = ours("Env 3: raised", remote_traceback=f"{kind.__name__}: x")
    assert isinstance(error, kind)
    assert str(error).startswith("Env 3: raised")


def with_note(error: Exception) -> Exception:
    error.add_note("while loading the map")
    return error


@pytest.mark.parametrize(
    ("raised", "cause"),
    [
        (KeyError("a"), "KeyError: 'a'"),
        (
            ValueError("scene.xml:\n  line 3\n\nsee the manual"),
            "ValueError: scene.xml:",
        ),
        (with_note(MemoryError("8 GiB")), "MemoryError: 8 GiB"),
        (SyntaxError("odd", ("a.py", 1, 1, "  x y\n")), "SyntaxError: odd"),
        (
            ExceptionGroup("two", [ValueError("b"), KeyError("c")]),
            "ExceptionGroup: two (2 sub-exceptions)",
        ),
    ],
)
def test_the_cause_of_a_traceback_names_the_exception(
    raised: Exception, cause: str
) -> None:
    with pytest.raises(type(raised)) as caught:
        raise raised
    text = "".join(traceback.format_exception(caught.value))
    for part in (text, text.partition("\n")[2]):  # the start may be cut
        assert Fault(0, Status.ENV_ERROR, part).cause == cause
        error = EnvError("Env 0", remote_traceback=part)
        assert isinstance(error, type(raised)) != isinstance(raised, ExceptionGroup)


class RemoteError(ValueError):
    """An exception whose attributes are those of a remote object."""

    def __getattr__(self, name: str) -> Any:
        return {"code": 3}[name]


class SilentError(RemoteError):
    def __str__(self) -> str:
        raise RuntimeError("the server is gone")


@dataclass(frozen=True)
class FrozenError(Exception):
    code: int


@pytest.mark.parametrize(
    ("kind", "arguments", "cause"),
    [
        (FrozenError, [3], f"{__name__}.FrozenError: 3"),
        (RemoteError, ["no route"], f"{__name__}.RemoteError: no route"),
        (SilentError, [], f"{__name__}.SilentError: <exception str() failed>"),
        (SyntaxError, ["odd", ("a.py", 1, [], "x")], "SyntaxError: odd (a.py, line 1)"),
    ],
)
def test_an_exception_that_cannot_be_formatted_is_reported(
    kind: type[Exception], arguments: list[Any], cause: str
) -> None:
    with pytest.raises(kind) as caught:
        raise kind(*arguments)
    fault = fault_from_error(0, caught.value)
    assert fault.cause == cause
    assert "test_errors.py" in fault.detail


@pytest.mark.parametrize("num_rows", [1, 16, 100])
@pytest.mark.parametrize("text", ["x" * 100_000, "x\n" * 1000, "x" * 5000])
def test_a_long_message_hides_neither_the_frames_nor_the_cause(
    num_rows: int, text: str
) -> None:
    with pytest.raises(ValueError, match="x") as caught:
        raise ValueError(text)
    faults = [fault_from_error(row, caught.value) for row in range(num_rows)]
    assert "test_errors.py" in faults[0].detail
    report = encode_report(num_rows, 64, faults)
    outcome, _ = decode_report(report, Block(0, 0, num_rows, 0, 0), 64)
    sent = ResultReport.decode(ResultReport(faults=outcome.faults).encode())
    for fault in (*outcome.faults, *sent.faults):
        assert fault.cause.startswith("ValueError: x")


@pytest.mark.parametrize("kind", [EnvError, EnvStartError, CallError])
def test_env_error_without_a_traceback_is_its_message(kind: type[EnvError]) -> None:
    error = kind("Env 3: raised")
    assert str(error) == "Env 3: raised"
    assert error.env_index is None
    assert error.remote_traceback == ""
