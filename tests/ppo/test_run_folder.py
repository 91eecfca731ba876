"""Run folders: creating, opening, errors, and metrics files."""

import errno
import logging
import math
import os
import resource
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from ppo.config import Config
from ppo.errors import ConfigError, RunFolderError, RunLockedError, RunWriteError
from ppo.run_folder.folder import RunFolder
from ppo.run_folder.metrics import MetricsWriter, tensorboard_tag
from tests.ppo.runs import ppo, rows_of

CONFIG = Config(env_name="CartPole-v1")


def test_a_new_run_folder_contains_the_config(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "a" / "b", CONFIG)
    run, config = RunFolder.open(tmp_path / "a" / "b")
    assert config == CONFIG
    assert run.path == tmp_path / "a" / "b"


def test_a_saved_config_and_its_name_are_flushed_to_disk(
    tmp_path: Path, flushed_inodes: list[int]
) -> None:
    RunFolder(tmp_path).save_config(CONFIG)
    (path,) = tmp_path.iterdir()
    assert flushed_inodes == [path.stat().st_ino, tmp_path.stat().st_ino]


@pytest.mark.parametrize("name", ["thesis.tex", "config.json"])
def test_a_folder_with_files_is_not_used(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"colour": "red"}')
    with pytest.raises(RunFolderError, match="expected a new or empty folder"):
        RunFolder.create(tmp_path, CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert "red" in (tmp_path / name).read_text()
    for file in (name, "\udcff"):  # TensorFlow cannot write to the latter
        with pytest.raises(RunFolderError, match="cannot create the folder"):
            RunFolder.create(tmp_path / file, CONFIG)


def test_a_run_that_never_started_can_be_created_again(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, CONFIG)
    # The run may have been killed during its first iteration.
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "tensorboard").mkdir()
    changed = CONFIG.replace(seed=3)
    RunFolder.create(tmp_path, changed)
    assert RunFolder.open(tmp_path)[1] == changed


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("nowhere/thesis.tex", "", "expected a run folder, found none"),
        ("run/thesis.tex", "", r"contains no config\.json"),
        (
            "run/config.json",
            '{"env_name": "X", "hue": 3}',
            r"config\.json: unknown key 'hue'",
        ),
    ],
)
def test_a_folder_without_a_valid_run_cannot_be_opened(
    file: str, text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(text)
    with pytest.raises((ConfigError, RunFolderError), match=message):
        RunFolder.open(tmp_path / "run")


def test_metrics_are_written_as_json_lines_and_tensorboard_events(
    tmp_path: Path,
) -> None:
    config = CONFIG.replace(algorithm="sac")  # which has a setting `tau`
    with MetricsWriter(tmp_path, config) as writer:
        writer.write(10, {"loss": 0.5, "mean_return": math.nan})
    (events,) = (tmp_path / "tensorboard").iterdir()
    for tag in (b"rollout/mean_return", b"losses/loss", b"config", b"_hparams_/sess"):
        assert tag in events.read_bytes()
    assert b"\x03tau" in events.read_bytes()  # a hyperparameter
    with MetricsWriter(tmp_path, config) as writer:  # a second one appends
        writer.write(20, {"loss": 0.25, "mean_return": 1e40})  # above float32
    assert rows_of(tmp_path) == [
        {"steps": 10, "loss": 0.5, "mean_return": None},
        {"steps": 20, "loss": 0.25, "mean_return": 1e40},
    ]


@pytest.mark.parametrize(("resumed_from", "count"), [((0, 0), 1), ((1, 16), 0)])
def test_hyperparameters_are_written_only_when_a_run_starts_from_step_0(
    resumed_from: tuple[int, int], count: int, tmp_path: Path
) -> None:
    with MetricsWriter(tmp_path, CONFIG, resumed_from=resumed_from):
        pass
    files = (tmp_path / "tensorboard").iterdir()
    assert sum(b"_hparams_" in file.read_bytes() for file in files) == count


def test_tensorboard_tags_are_grouped() -> None:
    tags = [
        *("evaluation/return_std", "losses/kl_penalty", "losses/explained_variance"),
        *("normalization/observation_mean_max", "normalization/reward_scale"),
        *("rollout/lost_episodes", "time/rollout_seconds", "time/steps_per_second"),
    ]
    names = [tag.partition("/")[2] for tag in tags]
    names[0] = "evaluation_return_std"
    assert [*map(tensorboard_tag, names)] == tags


@pytest.mark.parametrize("kept", ["metrics.jsonl", "checkpoints", "notes"])
def test_only_a_folder_without_results_is_removed(tmp_path: Path, kept: str) -> None:
    run = RunFolder.create(tmp_path / "run", CONFIG)
    with MetricsWriter(run.path, CONFIG):  # as after an interrupt during compilation
        pass
    (run.path / kept).write_text("x")
    assert not run.remove_if_unused()
    assert run.config_path.exists()
    (run.path / kept).unlink()
    assert run.remove_if_unused()
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_removed_is_kept(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    run = RunFolder.create(tmp_path / "link", CONFIG)
    assert not run.remove_if_unused()
    assert run.config_path.exists()


def test_a_write_error_other_than_a_full_disk_has_its_own_message(
    tmp_path: Path,
) -> None:
    run = RunFolder.create(tmp_path / "run", CONFIG)
    (run.path / "evaluation.json.partial").mkdir()
    with pytest.raises(RunWriteError) as caught:
        run.save_evaluation({})
    expected = f"{run.path}: cannot be written, Is a directory; make it writable."
    assert str(caught.value) == expected


def test_a_lock_that_cannot_be_written_is_a_write_error(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", CONFIG)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # like a full disk
    try:
        with pytest.raises(RunWriteError, match="File too large"), run.locked():
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("name", "locale"), [("\udcff", "utf-8"), ("ü", "latin-1")])
def test_a_run_in_a_folder_that_is_not_utf_8_is_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, locale: str
) -> None:
    run = RunFolder(tmp_path / name)
    run.path.mkdir()
    encode = partial(str.encode, encoding=locale, errors="surrogateescape")
    monkeypatch.setattr(os, "fsencode", encode)
    message = r"its path, .* or the locale \(LC_ALL\) is not UTF-8; rename the file"
    with pytest.raises(RunWriteError, match=message), run.locked():
        pass
    with pytest.raises(RunWriteError, match=message):
        run.check_folders("tensorboard")  # as `ppo visualize` does


def test_a_partial_config_of_a_killed_process_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "config.json.partial").write_text("{")
    run = RunFolder.create(tmp_path, Config(env_name="CartPole-v1"))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", "envs.json", "lock"}
    (tmp_path / "config.json.partial").write_text("{")
    assert run.remove_if_unused()
    assert not tmp_path.exists()


def test_one_process_at_a_time_trains_a_run(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", CONFIG)
    holder = f"by process {os.getpid()} on {socket.gethostname()}"
    with run.locked(), run.locked():  # the command, and the function that it calls
        with pytest.raises(RunLockedError, match=holder), RunFolder(run.path).locked():
            pass
        for arguments in ("--resume", run.path), ("CartPole-v1", "--run-dir", run.path):
            code, _, error = ppo("train", *arguments)
            assert (code, error.count("\n")) == (1, 1)
            assert holder in error
        assert RunFolder.read(run.path)[1] == CONFIG
        assert not RunFolder(run.path).remove_if_unused()
        assert run.remove_if_unused()


def test_a_killed_process_releases_its_run(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", CONFIG)
    code = (
        "import pathlib, sys, ppo.run_folder.folder as f\n"
        "with f.RunFolder(pathlib.Path(sys.argv[1])).locked(): print(input('locked'))"
    )
    command = [sys.executable, "-c", code, str(run.path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.read(6) == b"locked"
        with (
            pytest.raises(RunLockedError, match=f"process {process.pid} "),
            run.locked(),
        ):
            pass
        process.kill()
    with run.locked():
        pass


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    run = RunFolder.create(tmp_path / "run", CONFIG)
    monkeypatch.setattr("fcntl.flock", flock)
    with caplog.at_level(logging.WARNING, "envserve"), run.locked():
        pass
    (warning,) = caplog.messages
    assert "this file system has no locks (No locks available)" in warning
