"""Text from envs and peers is sanitised, and does not leak private information."""

from __future__ import annotations

import logging
import shlex
import uuid
from pathlib import Path

import pytest

from envserve.errors import CallError, EnvsBusy, EnvStartError, RemoteProtocolError
from envserve.lane import Fault
from envserve.settings import HostSettings
from envserve.slab import Status
from envserve.spaces import codec
from envserve.text import (
    LogThrottle,
    clone_folder,
    did_you_mean,
    install_command,
    nearest_name,
    one_line,
    printable,
    without_folders,
    words_without_numbers,
)
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.error_body import ErrorBody, exception_of
from envserve.wire.handshake import Welcome
from envserve.wire.message import Message, encode
from envserve.wire.result_report import ResultReport
from tests.envserve.raw_client import RawClient, errors_in
from tests.envserve.session_fakes import FakeServer, make_attach, make_welcome

#: Sets a terminal's title, clears the screen, and reverses the writing direction.
HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202egnp\u2066\x9b31m\r"
TRACEBACK = """Traceback (most recent call last):
  File "/srv/ann/my project/sim.py", line 3, in step
    open("/srv/ann/data/level.xml")
FileNotFoundError: No such file: '/srv/ann/data/level.xml' (see http://a/b/c)
"""


def is_fit(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


def test_one_line_escapes_and_cuts_text() -> None:
    assert one_line("a\nb\x1b[0m \u202e") == r"a\nb\x1b[0m \u202e"
    assert one_line("\x00" * 500, 200) == r"\x00" * 50
    assert one_line("\u00e9\u4e2d") == "\u00e9\u4e2d"
    assert printable("a\n\tb\r\n") == "a\n\\tb\n"


def test_without_folders_removes_only_folders() -> None:
    shown = without_folders(TRACEBACK)
    assert 'File "sim.py", line 3' in shown
    assert "'level.xml' (see http://a/b/c)" in shown
    assert "ann" not in shown
    for text in ("1/2 of a/b", "12/3/2026", "ALE/Pong-v5", "tcp://sim:1", "/"):
        assert without_folders(text) == text
    assert without_folders("in /usr/lib/python3.11/x.py:3") == "in x.py:3"


def test_texts_that_differ_in_numbers_have_the_same_words() -> None:
    text = (
        "Env {}: joint arm_{} of <Sim at {:#x}> is at [{} nan -{}e-05], id {}, pid {}"
    )
    ids = [str(uuid.uuid4()) for _ in range(20)]
    found = {
        words_without_numbers(text.format(n, n, n * 7919, n / 7, n, id_, n**9))
        for n, id_ in enumerate(ids)
    }
    assert len(found) == 1
    other = words_without_numbers(text.replace("joint", "wheel"))
    assert other not in found
    frames = [TRACEBACK, TRACEBACK.replace("line 3", "line 4")]
    assert len({*map(words_without_numbers, frames)}) == 2
    assert len(words_without_numbers("word " * 10_000)) == 50


def test_one_log_line_of_each_kind_is_admitted_per_second() -> None:
    throttle = LogThrottle()
    times = [0.0, 0.1, 0.9, 1.0, 1.5, 5.0]
    passed = [throttle.admit("busy", now) for now in times]
    assert passed[:3] == ["", None, None]
    assert passed[3] == " (and 2 more in the last 1.0 s)"
    assert passed[4:] == [None, " (and 1 more in the last 4.0 s)"]
    assert throttle.admit("other", 0.2) == ""


def test_rejections_are_logged_once_per_second_and_kind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = FakeServer()
    busy = make_attach(num_envs=10**4).encode()
    unknown = make_attach(env_name="x" * 200).encode()
    with caplog.at_level(logging.INFO, "envserve.session"):
        for number in range(3000):
            body = unknown if number % 2 else busy
            message = Message(
                MessageType.ATTACH, session=number + 1, boot=server.boot, body=body
            )
            server.receive((0, b"r", ""), encode(message), number / 1000)
    lines = [text for text in caplog.messages if text.startswith("rejected")]
    assert len(lines) == 6
    assert lines[-1].endswith("(and 499 more in the last 1.0 s)")
    assert all(len(line) < 400 for line in lines)


@pytest.mark.parametrize("kind", [128, 138, 200, 255])
def test_message_types_of_servers_are_dropped(kind: int) -> None:
    server = FakeServer()
    assert not server.replies_to(kind, request=1)
    assert server.protocol.num_dropped_messages == 1


# Host information that clients receive.


@pytest.mark.parametrize("shows", [False, True])
def test_clients_receive_paths_only_if_the_operator_allows_it(shows: bool) -> None:
    policy = HostSettings(num_workers=2, exposed=frozenset({"x"}), debug_errors=shows)
    raw = RawClient(FakeServer(policy))
    raw.send(raw.step(1))
    outcomes = [raw.pool.finish(block) for block in (0, 1)]
    outcomes[0] = outcomes[0]._replace(
        faults=(Fault(0, Status.ENV_ERROR, TRACEBACK, is_violation=False),)
    )
    outcomes[1] = outcomes[1]._replace(
        error=EnvStartError("at /opt/x.py", remote_traceback=TRACEBACK)
    )
    (result,) = raw.deliver_outcomes(outcomes)
    report = ResultReport.decode(result.report)
    raw.send(raw.call(0, "call", "x", seq=2))
    failed = Fault(0, Status.ENV_ERROR, TRACEBACK, is_violation=False)
    (called,) = raw.deliver_outcomes([raw.pool.finish(0)._replace(faults=(failed,))])
    texts = [
        *(fault.text for fault in report.faults),
        *(text for e in report.errors.values() for text in (e.text, e.traceback)),
        *(fault.text for fault in ResultReport.decode(called.report).faults),
    ]
    assert len(texts) == 4
    for text in texts:
        assert ("/opt/" in text or "/srv/ann/" in text) is shows
        assert "sim.py" in text or "x.py" in text


# Text from a server.


def test_errors_from_a_server_contain_no_escape_sequences() -> None:
    for code in ErrorCode:
        body = ErrorBody(code=code, text=HOSTILE, traceback=HOSTILE + "\n" + HOSTILE)
        fields = codec.decode(body.encode()) | {"text": HOSTILE, "holder": HOSTILE}
        fields |= {"traceback": HOSTILE + "\n" + HOSTILE}
        error = exception_of(ErrorBody.decode(codec.encode(fields)), "tcp://sim:1")
        assert is_fit(str(error)), code
        if isinstance(error, EnvsBusy):
            assert is_fit(error.holder)
        if code is ErrorCode.CALL_FAILED:
            assert isinstance(error, CallError)
            assert "\n" in error.remote_traceback


def test_reports_from_a_server_contain_no_escape_sequences() -> None:
    fault = [int(Status.ENV_ERROR), False, HOSTILE, [0]]
    error = {"code": 1, "text": HOSTILE, "traceback": HOSTILE}
    frame = codec.encode({"infos": {}, "faults": [fault], "errors": [[[1], error]]})
    report = ResultReport.decode(frame)
    assert is_fit(report.faults[0].text)
    assert is_fit(report.errors[1].text + report.errors[1].traceback)


def test_names_of_a_server_are_short_and_printable() -> None:
    hostile = codec.decode(make_welcome().encode()) | {"env_names": [HOSTILE]}
    assert is_fit(Welcome.decode(codec.encode(hostile)).env_names[0])
    long = hostile | {"env_names": ["x" * 201]}
    with pytest.raises(RemoteProtocolError, match="length <= 200"):
        Welcome.decode(codec.encode(long))


def test_the_client_suggests_similar_names() -> None:
    server = FakeServer()
    body = make_attach(env_name="Fake-v7").encode()
    (error,) = errors_in(server.replies_to(MessageType.ATTACH, body=body))
    assert "did you mean" not in error.text
    assert did_you_mean("Fake-v7", ["Fake-v0"]) == "; did you mean Fake-v0?"
    assert did_you_mean("walk-v1", ["a:Walk-v0", "b"]) == "; did you mean a:Walk-v0?"
    assert did_you_mean("zzz", ["Fake-v0"]) == "; there is only Fake-v0"
    assert did_you_mean("zzz", [f"Fake-v{n}" for n in range(9)]) == ""


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        *(("helth", "health"), ("eval", "evaluate"), ("step_timout", "step_timeout")),
        *(("rate", "learning_rate"), ("lr", ""), ("", "")),
        *(("nope", ""), ("configs", ""), ("entropie", "entropy")),
    ],
)
def test_only_similar_names_are_suggested(word: str, nearest: str) -> None:
    known = ["evaluate", "hopper", "health", "entropy", "step_timeout"]
    assert nearest_name(word, [*known, "learning_rate", "start"]) == nearest


def test_the_command_that_installs_an_extra_works_on_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[2]
    assert clone_folder() == root
    assert shlex.split(install_command("page")) == [
        *("pip", "install", "-e", f"{root}[page]")
    ]
    # A client receives a command that can be run in the clone.
    assert without_folders(install_command("page")) == "pip install '.[page]'"
    monkeypatch.setattr("envserve.text.__file__", str(tmp_path / "x" / "text.py"))
    assert clone_folder() is None
    command = "pip install 'envserve[page]'"
    assert install_command("page") == without_folders(command) == command
