"""Runs of configs over seeds: what is run, and what is made of what they come to."""

import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import typer

from benchmarks.scores.document import (
    interquartile_mean,
    summarize,
    table_rows,
    write_document,
)
from benchmarks.scores.many import main
from benchmarks.scores.run_one import Score, read_score
from benchmarks.scores.tasks import TASKS, Task
from ppo.configs import CONFIGS, EXPECTED_RETURNS


def test_what_is_expected_is_expected_of_a_config() -> None:
    assert set(EXPECTED_RETURNS) <= set(CONFIGS)


def score(seed: int, best: float, task: str = "cheetah-1M") -> Score:
    return Score(
        task=task,
        seed=seed,
        env_name="HalfCheetah-v5",
        final=best - 100.0,
        final_std=30.0,
        best=best,
        curve=[(50_000, 0.5 * best), (1_000_000, best)],
        train_return=best - 200.0,
        steps=999_424,
        seconds=70.0 + seed,
        versions={"gymnasium": "1.4.0"},
    )


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_each_task_trains_its_config_for_its_budget(task: Task) -> None:
    config = pickle.loads(pickle.dumps(task)).make_config(3)  # in another process
    assert config.seed == 3
    assert config.total_steps == task.total_steps
    assert config.evaluate_every * 20 == task.total_steps
    assert config.discount == CONFIGS[task.config].discount
    assert [other.name for other in TASKS].count(task.name) == 1


@pytest.mark.parametrize(
    ("scores", "mean"),
    [
        ([7.0], 7.0),
        ([1.0, 3.0], 2.0),
        ([0.0, 1.0, 5.0], (0.25 * 0 + 1.0 + 0.25 * 5) / 1.5),
        ([1.0, 2.0, 4.0, 100.0], 3.0),
        ([9.0, 2.0, -50.0, 4.0, 999.0], (0.75 * 2 + 4 + 0.75 * 9) / 2.5),
    ],
)
def test_interquartile_mean_cuts_a_quarter_off_at_each_end(
    scores: list[float], mean: float
) -> None:
    assert interquartile_mean(scores) == pytest.approx(mean)


def test_summary_of_seeds() -> None:
    summary = summarize([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (summary.num_seeds, summary.mean, summary.iqm) == (5, 3.0, 3.0)
    assert summary.std == pytest.approx(math.sqrt(2.5))
    # The mean of five draws from 1..5 has a standard deviation of sqrt(2 / 5).
    assert summary.low == pytest.approx(3.0 - 1.96 * math.sqrt(0.4), abs=0.1)
    assert summary.high == pytest.approx(3.0 + 1.96 * math.sqrt(0.4), abs=0.1)
    assert summarize([1.0, 2.0, 3.0, 4.0, 5.0]) == summary
    assert np.isnan(summarize([1.0]).std)


def test_rows_say_whether_the_goal_is_reached_and_by_how_many_seeds() -> None:
    reached = [score(seed, 6000.0 + seed) for seed in range(5)]
    (row,) = table_rows({"cheetah-1M": reached})
    assert row[:4] == ["HalfCheetah-v5", "1M", "B", "5820"]
    assert row[5:] == [
        *("6,002", "1.6", "6,002", "6,001 to 6,003"),
        *("5 of 5", "6,000", "yes", "72"),
    ]
    assert table_rows({"cheetah-1M": reached[:2]})[0][-2] == "so far"
    assert table_rows({"cheetah-1M": reached[:1]})[0][6:9] == ["-", "6,000", "-"]
    missed = [score(seed, 5819.0) for seed in range(5)]
    assert table_rows({"cheetah-1M": missed})[0][-2] == "no"


def test_the_document_keeps_what_is_around_its_tables(tmp_path: Path) -> None:
    path = tmp_path / "scores.md"
    path.write_text(
        "# Before\n<!-- scores: begin -->\nold\n<!-- scores: end -->\nAfter"
    )
    for _ in range(2):  # what it has written it replaces
        write_document(path, {"cheetah-1M": [score(0, 6000.0)]})
        text = path.read_text()
        assert text.startswith("# Before\n")
        assert text.endswith("\nAfter")
        assert "old" not in text
        assert text.count("| HalfCheetah-v5 | 1M |") == 2  # the task, and its seed
        assert "Measured with gymnasium 1.4.0." in text
    path.write_text("no marks")
    with pytest.raises(ValueError, match="scores: begin"):
        write_document(path, {})


def test_an_unknown_task_suggests_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match=r"Did you mean cheetah-1M\?"):
        main(["cheeta-1M"], runs=tmp_path)


def test_what_has_ended_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Task(
        config="cartpole",
        total_steps=4_096,
        metric="E",
        num_seeds=2,
        goal=1.0,
        anchor="none",
        changes={
            "evaluation_episodes": 4,
            "curve_episodes": 2,
            "num_splits": 1,
            "jit_compile": False,  # compiling would take longest
        },
    )
    assert tiny.name == "cartpole-4k"
    monkeypatch.setattr("benchmarks.scores.many.TASKS", (tiny,))
    monkeypatch.setattr("benchmarks.scores.document.TASKS", (tiny,))
    document = tmp_path / "scores.md"
    document.write_text("<!-- scores: begin -->\n<!-- scores: end -->\n")
    main(None, seeds=1, runs=tmp_path, document=document, processes=1)
    first = read_score(tmp_path / "cartpole-4k" / "0")
    assert first is not None
    assert first.steps == 4_096
    assert [steps for steps, _ in first.curve] == [2_048, 4_096]
    assert first.best == max(mean for _, mean in first.curve)
    assert 8.0 < first.final < 500.0
    assert json.loads((tmp_path / "scores.json").read_text())[0]["seed"] == 0
    assert (tmp_path / "scores.png").stat().st_size > 1000
    monkeypatch.setattr(
        "benchmarks.scores.many.run_one", None
    )  # not to be called again
    main(None, seeds=1, runs=tmp_path, document=document, processes=1)
