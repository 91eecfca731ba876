"""Run folders and metrics: made, opened, refused, full."""

import json
import math
from pathlib import Path

import pytest

from ppo.config import Config
from ppo.errors import ConfigError, RunFolderError, RunWriteError
from ppo.run_folder.folder import RunFolder
from ppo.run_folder.metrics import MetricsWriter

CONFIG = Config(env_name="CartPole-v1")


def test_a_new_folder_holds_the_config(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "a" / "b", CONFIG)
    run, config = RunFolder.open(tmp_path / "a" / "b")
    assert config == CONFIG
    assert run.path == tmp_path / "a" / "b"


def test_a_folder_with_files_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunFolderError, match="expected a new or empty folder"):
        RunFolder.create(tmp_path, CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_of_another_run_suggests_to_resume_it(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, CONFIG)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(RunFolderError, match=f"--resume {tmp_path}"):
        RunFolder.create(tmp_path, CONFIG)


def test_a_run_that_never_began_may_be_started_again(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, CONFIG)
    changed = CONFIG.replace(seed=3)
    RunFolder.create(tmp_path, changed)
    assert RunFolder.open(tmp_path)[1] == changed


def test_a_foreign_config_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"colour": "red"}')
    with pytest.raises(RunFolderError, match="expected a new or empty folder"):
        RunFolder.create(tmp_path, CONFIG)
    assert "red" in (tmp_path / "config.json").read_text()


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="folder that can be created"):
        RunFolder.create(tmp_path / "file", CONFIG)


def test_a_missing_folder_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="found none"):
        RunFolder.open(tmp_path / "nowhere")


def test_a_foreign_folder_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunFolderError, match=r"found no config\.json"):
        RunFolder.open(tmp_path)


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"env_name": "X", "hue": 3}')
    with pytest.raises(ConfigError, match=r"config\.json: unknown key 'hue'"):
        RunFolder.open(tmp_path)


def test_an_evaluation_is_saved(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", CONFIG)
    run.save_evaluation({"mean_return": 3.0})
    saved = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert saved == {"mean_return": 3.0}


def test_metrics_are_a_line_per_row_and_events(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(10, {"loss": 0.5, "mean_return": math.nan})
        writer.write(20, {"loss": 0.25, "mean_return": 3.0})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"steps": 10, "loss": 0.5, "mean_return": None},
        {"steps": 20, "loss": 0.25, "mean_return": 3.0},
    ]
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"mean_return" in events.read_bytes()


def test_a_second_writer_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        with MetricsWriter(tmp_path) as writer:
            writer.write(step, {})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_only_a_folder_with_nothing_but_a_config_is_removed(tmp_path: Path) -> None:
    used = RunFolder.create(tmp_path / "used", CONFIG)
    (used.path / "metrics.jsonl").touch()
    assert not used.remove_if_unused()
    unused = RunFolder.create(tmp_path / "unused", CONFIG)
    assert unused.remove_if_unused()
    assert [path.name for path in tmp_path.iterdir()] == ["used"]
    assert used.config_path.exists()


def test_what_cannot_be_written_to_is_not_said_to_be_full(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", CONFIG)
    (run.path / "evaluation.json.partial").mkdir()
    with pytest.raises(RunWriteError) as caught:
        run.save_evaluation({})
    expected = f"{run.path}: cannot be written, Is a directory; make it writable."
    assert str(caught.value) == expected


def test_a_full_disk_is_an_error_that_says_so(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", CONFIG)
    (run.path / "metrics.jsonl").symlink_to("/dev/full")
    with (
        MetricsWriter(run.path) as writer,
        pytest.raises(
            RunWriteError, match=r"No space left on device; free some space\.$"
        ),
        run.writing(),
    ):
        writer.write(1, {"loss": 0.5})


def test_what_a_kill_left_of_writing_the_config_is_in_nobodys_way(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json.partial").write_text("{")
    run = RunFolder.create(tmp_path, Config(env_name="CartPole-v1"))
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    (tmp_path / "config.json.partial").write_text("{")
    assert run.remove_if_unused()
    assert not tmp_path.exists()
