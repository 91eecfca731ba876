"""Broken and hostile files in a run folder are reported as one-line errors."""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import tensorflow as tf

from ppo.config import Config
from ppo.config.named_configs import read_config
from ppo.errors import BadInputError, ConfigError, RunFolderError, RunWriteError
from ppo.run_folder import checkpoint
from ppo.run_folder.folder import RunFolder
from ppo.run_folder.metrics import MetricsWriter, truncate_events
from ppo.run_folder.metrics_file import last_iteration, read_metrics, truncate_after
from tests.ppo.runs import ppo, save_run

pytestmark = pytest.mark.usefixtures("one_launcher")

DEEP, LONG = 100_000, "9" * 400
#: Contents of any JSON file; None is a folder in place of the file.
CONTENTS: dict[str, bytes | None] = {
    "empty": b"",
    "binary": bytes(range(256)),
    "truncated": b'{"env_name": "CartPo',
    "deep": b'{"env_name": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep lists": b"[" * DEEP + b"]" * DEEP,
    "deep but valid": b'{"env_name": ' + b"[" * 800 + b"]" * 800 + b"}",
    "long number": f'{{"env_name": {LONG}, "steps": {LONG}}}'.encode(),
    "too long number": f'{{"env_name": {LONG * 20}}}'.encode(),
    "surrogate": rb'{"env_name": "\ud800", "steps": "\ud800", "\ud800": 1}',
    "list": b"[1, 2]",
    "number": b"NaN",
    "types": b'{"env_name": {}, "steps": [], "iteration": {}, "addresses": 3}',
    "escapes": b'{"env_name": "\\u001b[2J", "\\u001b[2J": 1}',
    "folder": None,
}
any_content = pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)


def write(path: Path, content: bytes | None) -> None:
    """Write a file, or make a folder in its place."""
    path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)


def check(read: Callable[[], object], *kinds: type[Exception]) -> None:
    """Read without an exception other than these; the error text must be writable."""
    text = ""
    try:
        read()
    except kinds as error:
        text = str(error)
    assert len(text) < 1000
    text.encode()


@any_content
def test_any_config_is_read_or_is_an_error(
    content: bytes | None, tmp_path: Path
) -> None:
    for name in ("config.json", "config.toml"):
        write(tmp_path / name, content)
        check(partial(read_config, tmp_path / name), ConfigError)
    check(lambda: RunFolder.open(tmp_path), BadInputError)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("env_kwargs", '{"a": ' * 300 + "1" + "}" * 300),
        ("env_kwargs", '{"a": ' + "[" * 40 + "]" * 40 + "}"),
        ("discount", LONG),
        ("total_steps", LONG),
        ("total_steps", "1e400"),
        ("learning_rate", "NaN"),
        ("learning_rate", "Infinity"),
        ("seed", "-Infinity"),
        ("env_name", r'"a\u0000b.py:Walk"'),
        ("env_name", f'"{LONG}"'),
        ("import_modules", r'["\udfff"]'),
        ("network", r'"\u001b]0;x\u0007:f"'),
        ("wrappers", '[{"name": {"a": 1}}]'),
        ("policy_layers", "[" + "1," * 10_000 + LONG + "]"),
    ],
)
def test_any_value_of_a_setting_is_an_error_of_one_line(
    key: str, value: str, tmp_path: Path
) -> None:
    text = f'{{"env_name": "CartPole-v1", "{key}": {value}}}'
    (tmp_path / "config.json").write_text(text)
    code, output, error = ppo("evaluate", tmp_path)
    assert (code, output) == (2, "")
    assert error.count("\n") == 1
    assert error.rstrip("\n").isprintable()


@any_content
def test_any_env_source_is_read_or_is_an_error(
    content: bytes | None, tmp_path: Path
) -> None:
    run = RunFolder.create(tmp_path / "run", Config(env_name="CartPole-v1"))
    write(run.env_source_path, content)
    check(run.env_source, RunFolderError)


@any_content
def test_any_metrics_are_read_or_are_an_error(
    content: bytes | None, tmp_path: Path
) -> None:
    run = RunFolder.create(tmp_path / "run", Config(env_name="CartPole-v1"))
    first = b'{"steps": 1, "mean_return": 2.0, "iteration": 1}\n'
    write(run.metrics_path, content and first + content + b"\n" + first)
    check(lambda: read_metrics(run.metrics_path), RunFolderError)
    check(lambda: last_iteration(run.metrics_path), RunFolderError)
    code, _, error = ppo("plot", run.path, "--out", tmp_path / "plot.png")
    assert (code, error.count("\n")) in [(0, 0), (2, 1)]
    check(lambda: truncate_after(run.metrics_path, 1), OSError)


@pytest.mark.parametrize(
    "row",
    [
        *('"steps": 1, "mean_return": "x"', '"steps": true, "mean_return": [1]'),
        *(f'"steps": {LONG}, "mean_return": 1', f'"steps": 1, "mean_return": {LONG}'),
        *('"steps": NaN, "mean_return": 1', '"steps": 1, "mean_return": Infinity'),
        *(f'"steps": 1, "iteration": {value}' for value in ("1e400", "null")),
    ],
)
def test_rows_with_values_other_than_numbers_are_ignored(
    row: str, tmp_path: Path
) -> None:
    run = RunFolder.create(tmp_path / "run", Config(env_name="CartPole-v1"))
    run.metrics_path.write_text(f'{{{row}}}\n{{"steps": 5, "mean_return": 2}}\n')
    assert [row["steps"] for row in read_metrics(run.metrics_path)] == [5]
    assert last_iteration(run.metrics_path) == 0
    assert ppo("plot", run.path)[0] == 0


@any_content
def test_any_metadata_of_a_checkpoint_is_read_or_is_an_error(
    content: bytes | None, tmp_path: Path
) -> None:
    (tmp_path / "00000001").mkdir()
    write(tmp_path / "00000001" / "counters.json", content)
    with pytest.raises(BadInputError, match=r"1/counters\.json: cannot read the cou"):
        checkpoint.read_counters(tmp_path)
    write(tmp_path / "00000001" / "evaluation.json", content)
    with pytest.raises(BadInputError, match=r"1/evaluation\.json: cannot read the e"):
        checkpoint.best_return(tmp_path)


@pytest.mark.parametrize("number", ["-1", "NaN", '"1"', "true", LONG, "1.5"])
def test_counters_are_counts(number: str, tmp_path: Path) -> None:
    (tmp_path / "00000001").mkdir()
    text = f'{{"iteration": 1, "steps": {number}}}'
    (tmp_path / "00000001" / "counters.json").write_text(text)
    with pytest.raises(BadInputError, match="cannot read the counters"):
        checkpoint.read_counters(tmp_path)


@pytest.mark.parametrize("file", ["state.index", "state.data-00000-of-00001"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: bytes(len(data)),
        lambda data: data[:1] * len(data),
        None,
    ],
)
def test_a_damaged_checkpoint_is_an_error(
    file: str, damage: Callable[[bytes], bytes] | None, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "00000001" / file
    write(path, damage and damage(path.read_bytes()))
    code, _, error = ppo("export", tmp_path / "run", tmp_path / "policy")
    assert code == 2, error
    assert error.count("\n") == 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint."""
    path = tmp_path_factory.mktemp("saved") / "run"
    save_run(path, Config(env_name="CartPole-v1", policy_layers=(4,)))
    assert tf.train.load_checkpoint(str(path / "checkpoints/00000001/state"))
    return path


def _make_huge_file(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)  # takes no space on the disk


SPECIAL: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
    "huge": _make_huge_file,
}
READERS: dict[str, tuple[object, ...]] = {
    "config.json": ("plot", "run"),
    "envs.json": ("export", "run", "policy"),
    "metrics.jsonl": ("plot", "run"),
    "checkpoints/00000001/counters.json": ("export", "run", "policy"),
    "checkpoints/00000001/state.index": ("export", "run", "policy"),
    "config.toml": ("train", "run/config.toml"),
}


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize("file", READERS)
def test_special_and_huge_files_are_not_read(
    file: str,
    make: Callable[[Path], None],
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved, "run")
    Path("run", file).unlink(missing_ok=True)
    make(Path("run", file))
    code, _, error = ppo(*READERS[file])
    assert (code, error.count("\n")) == (2, 1), error


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
def test_a_run_with_special_metrics_is_not_resumed(
    make: Callable[[Path], None], saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "run")
    make(tmp_path / "run" / "metrics.jsonl")
    code, _, error = ppo("train", "--resume", tmp_path / "run", "--num-workers", "1")
    assert code in (1, 2)
    assert "Traceback" not in error
    assert "metrics" in error


def test_pipes_are_not_opened_for_writing(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", Config(env_name="CartPole-v1"))
    os.mkfifo(run.path / "evaluation.json.partial")
    with pytest.raises(Exception, match="cannot be written"):
        run.save_evaluation({})


def test_files_that_a_run_writes_are_not_written_through_links(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    config = Config(env_name="CartPole-v1")
    run = RunFolder.create(tmp_path / "run", config)
    (run.path / "lock").unlink()
    for name in ("evaluation.json.partial", "lock"):
        (run.path / name).symlink_to(tmp_path / "precious")
    with pytest.raises(Exception, match="cannot be written"):
        run.save_evaluation({})
    with pytest.raises(Exception, match="cannot be written"), run.locked():
        pass
    run.metrics_path.symlink_to(tmp_path / "precious")
    for resumed_from in (None, (0, 0)):
        with pytest.raises(RunWriteError):
            MetricsWriter(run.path, config, resumed_from=resumed_from)
    run.metrics_path.unlink()
    restart = run.path / "tensorboard" / "events.out.tfevents.0000000007.0.restart"
    restart.symlink_to(tmp_path / "precious")
    with mock.patch("ppo.run_folder.metrics.time.time", return_value=7.5):
        truncate_events(restart.parent, 1)
    assert restart.is_file()
    run.metrics_path.write_text('{"steps": 1, "mean_return": 2.0}\n')
    (run.path / "mean_return.png").symlink_to(tmp_path / "precious")
    assert ppo("plot", run.path)[0] == 0
    assert (run.path / "mean_return.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "mine.png").symlink_to(tmp_path / "curves.png")
    assert ppo("plot", run.path, "--out", tmp_path / "mine.png")[0] == 0
    assert (tmp_path / "curves.png").exists()  # a link that the user named is followed
    (tmp_path / "loop.png").symlink_to("loop.png")
    assert ppo("plot", run.path, "--out", tmp_path / "loop.png")[0] == 0
    (run.path / "mean_return.png.partial").symlink_to(tmp_path / "precious")
    assert ppo("plot", run.path)[0] == 2
    assert (tmp_path / "precious").read_text() == "x"


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("algorithm", ("train", "--resume", "run")),
        ("checkpoints", ("train", "--resume", "run")),
        ("tensorboard", ("train", "--resume", "run")),
        ("tensorboard", ("visualize", "run")),
        ("films", ("visualize", "run")),
        ("seed-1", ("train", "--resume", "run")),
    ],
)
def test_folders_that_a_run_writes_may_not_be_links(
    name: str,
    command: tuple[str, ...],
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("run", "precious"):
        shutil.copytree(saved, folder)
    Path("precious/00000001.partial").mkdir()
    files = sorted(Path("precious").rglob("*"))
    shutil.rmtree(Path("run", name), ignore_errors=True)
    Path("run", name).symlink_to(Path("precious").absolute())
    code, _, error = ppo(*command)
    assert code == 1
    reason = f"run: cannot be written, {name} is a symbolic link; replace or remove it"
    assert f"{reason}, because only run itself can be a link." in error
    assert sorted(Path("precious").rglob("*")) == files


def test_files_and_links_among_the_checkpoints_are_removed_not_followed(
    tmp_path: Path,
) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "state").touch()
    (tmp_path / "run").mkdir()
    for name in ("00000000", "00000001", "00000002.partial"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "precious")
    (tmp_path / "run" / "00000003.partial").touch()
    state = tf.train.Checkpoint(x=tf.Variable(1.0))
    checkpoint.save(tmp_path / "run", checkpoint.Counters(1), state, keep=1)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["00000001"]
    assert [path.name for path in (tmp_path / "precious").iterdir()] == ["state"]


def test_a_broken_evaluation_of_a_seed_counts_as_unfinished(tmp_path: Path) -> None:
    config = Config(env_name="CartPole-v1", total_steps=2048)
    run = RunFolder.create(tmp_path / "seed-0", config)
    RunFolder(tmp_path).save_config(config)
    write(tmp_path / "seed-0" / "evaluation.json", CONTENTS["deep"])
    row = json.dumps({"steps": 2048, "mean_return": 1.0})
    (tmp_path / "seed-0" / "metrics.jsonl").write_text(f"{row}\n")
    with run.locked():  # so that the process of the seed fails before it trains
        code, output, error = ppo("train", "--resume", tmp_path, "--num-workers", "1")
    assert (code, error) == (1, "")
    assert "seed 0 failed: Error: " in output
    assert "this run is already being trained by" in output


def test_other_folders_and_files_named_like_seeds_are_errors(tmp_path: Path) -> None:
    config = Config(env_name="nosuch:Walk", total_steps=2048)
    RunFolder(tmp_path).save_config(config)
    for name in ("seed-best", "seed-07"):
        RunFolder.create(tmp_path / name, config)
    resume = ("train", "--resume", tmp_path, "--num-workers", "1")
    code, _, error = ppo(*resume)
    assert (code, error.count("\n")) == (2, 1)
    assert "found seed-07, seed-best; rename them" in error
    (tmp_path / "seed-3").touch()
    code, _, error = ppo(*resume)
    assert code == 1
    assert "seed-3: cannot be written, seed-3 is a symbolic link, or a file" in error


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("precious")])
def test_the_log_of_a_seed_is_not_written_to_a_link_or_pipe(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    config = Config(env_name="nosuch:Walk", total_steps=2048)
    run = RunFolder.create(tmp_path / "seed-0", config)
    RunFolder(tmp_path).save_config(config)
    (run.path / "precious").write_text("x")
    make(run.path / "output.log")
    code, _, error = ppo("train", "--resume", tmp_path, "--num-workers", "1")
    assert code == 1
    assert "cannot be written" in error
    assert (run.path / "precious").read_text() == "x"
