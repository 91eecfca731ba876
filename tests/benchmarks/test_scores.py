"""Scores of configs over several seeds: runs, measures and the document."""

import json
import math
import os
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import typer

from benchmarks.scores.command import _read, _run, main
from benchmarks.scores.document import aggregate, measured, table_rows, write_document
from benchmarks.scores.run_one import Score, read_score
from benchmarks.scores.tasks import RANDOM_RETURNS, TASKS, Task
from ppo.config.named_configs import CONFIGS, EXPECTED_RESULTS, expected_result
from ppo.evaluation.statistics import bootstrap_interval, interquartile_mean
from tests.benchmarks.harness_cases import process_of
from tests.ppo.runs import eagerly

ROOT = Path(__file__).parents[2]
(CHEETAH,) = (task for task in TASKS if task.name == "cheetah-1M")


def test_expected_results_are_the_measured_ones() -> None:
    rows = json.loads((ROOT / "docs" / "scores.json").read_text())
    for name, (returns, seconds) in EXPECTED_RESULTS.items():
        budget = CONFIGS[name].total_steps
        (task,) = (
            task.name
            for task in TASKS
            if (task.config, task.total_steps, task.variant) == (name, budget, "")
        )
        measured_rows = [row for row in rows if row["task"] == task]
        finals = [row["final"] for row in measured_rows]
        numbers = re.findall(r"-?[\d,.]*\d", returns)
        expected = [float(number.replace(",", "")) for number in numbers]
        found = [np.mean(finals), min(finals), max(finals)]
        assert found[: len(expected)] == pytest.approx(expected, rel=0.011), name
        assert len(expected) == (1 if min(finals) == max(finals) else 3)
        assert round(np.median([row["seconds"] for row in measured_rows])) == seconds


def test_results_are_expected_only_with_the_measured_settings() -> None:
    pendulum = CONFIGS["pendulum"]
    expected = ("-154 (-160 to -148)", "2 min")
    assert expected_result(pendulum.replace(seed=3)) == expected
    assert expected_result(CONFIGS["cartpole"]) == ("500", "37 s")
    assert expected_result(pendulum.replace(total_steps=10_240)) == ("", "")
    assert expected_result(CONFIGS["humanoid"]) == ("", "")


def score(seed: int, best: float, task: str = "cheetah-1M") -> Score:
    return Score(
        task=task,
        seed=seed,
        env_name="HalfCheetah-v5",
        final=best - 100.0,
        final_std=30.0,
        best=best,
        curve=[[50_000, 0.5 * best], [1_000_000, best]],
        train_return=best - 200.0,
        steps=999_424,
        seconds=70.0 + seed,
        versions={"gymnasium": "1.4.0"},
        settings={each.name: each.settings for each in TASKS}[task],
        max_kl=0.01 * seed,
    )


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_each_task_trains_its_config_for_its_budget(task: Task) -> None:
    config = pickle.loads(pickle.dumps(task)).make_config(3)  # in another process
    assert config.seed == 3
    assert config.total_steps == task.total_steps
    assert config.evaluate_every * 20 == task.total_steps
    assert config.discount == CONFIGS[task.config].discount
    assert [other.name for other in TASKS].count(task.name) == 1
    assert task.anchors.startswith(f"{task.measure} ")


def test_the_interval_reflects_the_differences_between_seeds() -> None:
    low, high = bootstrap_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    # The mean of five draws from 1..5 has a standard deviation of sqrt(2 / 5).
    assert low == pytest.approx(3.0 - 1.96 * math.sqrt(0.4), abs=0.1)
    assert high == pytest.approx(3.0 + 1.96 * math.sqrt(0.4), abs=0.1)
    assert bootstrap_interval([1.0, 2.0, 3.0, 4.0, 5.0]) == (low, high)


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end() -> None:
    assert interquartile_mean([9.0, 1.0, 2.0]) == 4.0
    assert interquartile_mean([900.0, 1.0, 2.0, 4.0, -900.0]) == pytest.approx(7 / 3)
    both = interquartile_mean(np.array([[1, 2, 3, 9], [5, 5, 5, 5]]))
    assert both.tolist() == [2.5, 5.0]


def test_the_bootstrap_resamples_the_seeds_of_each_task_separately() -> None:
    # Without strata, the mean of [0, 0, 10, 10] would vary from 0 to 10.
    assert bootstrap_interval([0.0, 0.0], [10.0, 10.0]) == (5.0, 5.0)
    low, high = bootstrap_interval(
        [0.0, 0.0, 0.0], [8.0, 9.0, 10.0], statistic=interquartile_mean
    )
    assert 3.5 < low < high < 5.1


def test_the_aggregate_of_all_tasks_is_normalised() -> None:
    (pendulum,) = (task for task in TASKS if task.name == "pendulum-300k")
    worse = RANDOM_RETURNS["HalfCheetah-v5"] / 2 + CHEETAH.goal / 2
    scores = {
        CHEETAH.name: [score(seed, 100.0)._replace(final=worse) for seed in range(2)],
        pendulum.name: [
            score(seed, 100.0, pendulum.name)._replace(final=pendulum.goal)
            for seed in range(2)
        ],
    }
    text = aggregate(scores)
    assert "2 rows and 4 runs: interquartile mean 0.750, 95 % interval 0.750 to" in text
    assert aggregate({}) == "No scores."
    assert {task.make_config(0).env_name for task in TASKS} <= RANDOM_RETURNS.keys()


def test_measures_use_the_final_return_each_seeds_best_or_the_best_mean() -> None:
    early = score(0, 900.0)._replace(final=100.0, curve=[(1, 900.0), (2, 0.0)])
    late = score(1, 800.0)._replace(
        final=300.0, curve=[(1, 10.0), (2, 800.0), (3, 9.0)]
    )
    assert measured("E", [early, late]) == [100.0, 300.0]
    assert measured("B", [early, late]) == [900.0, 800.0]
    assert measured("M", [early, late]) == [900.0, 10.0]  # 455, not 850


def test_rows_show_whether_the_goal_is_reached_and_by_how_many_seeds() -> None:
    reached = [score(seed, 6600.0 + seed) for seed in range(5)]
    (row,) = table_rows({"cheetah-1M": reached})
    assert row[:3] == ["HalfCheetah-v5", "1M", "E 6500"]
    assert row[4:7] == ["6,502", "6,602", "6,602"]
    assert row[7:] == [
        *("1.6", "6,501 to 6,503"),
        *("5 of 5", "6,500", "0.04", "yes", "72"),
    ]
    assert table_rows({"cheetah-1M": reached[:2]})[0][-2] == "so far"
    assert table_rows({"cheetah-1M": reached[:1]})[0][7:9] == ["-", "-"]
    missed = [score(seed, 6599.0) for seed in range(5)]
    assert table_rows({"cheetah-1M": missed})[0][-2] == "no"


def test_rows_with_other_settings_are_marked_and_unknown_kl_is_a_dash() -> None:
    old = score(0, 6600.0)._replace(settings=None, max_kl=None)
    (row,) = table_rows({"cheetah-1M": [old, score(1, 6600.0)]})
    assert row[1] == "1M †"
    assert row[11] == "-"
    settings = CHEETAH.settings
    other = old._replace(settings=settings | {"epochs": 3})
    assert table_rows({"cheetah-1M": [other]})[0][1] == "1M †"
    # A missing setting counts as off, and a missing text setting as its current value.
    assert not CHEETAH.is_made_by({k: v for k, v in settings.items() if k != "epochs"})
    assert CHEETAH.is_made_by({k: v for k, v in settings.items() if k != "objective"})
    # Settings contain no seed, step budget or disabled features.
    assert {"discount": 0.99}.items() <= settings.items()
    assert not {"seed", "total_steps", "max_restarts", "recurrent_size"} & {*settings}


def test_the_document_matches_its_scores(tmp_path: Path) -> None:
    """If this fails, run scripts/benchmark_scores.py.

    The options are --no-train --document docs/scores.md.
    """
    docs = Path(__file__).parents[2] / "docs"
    scores = _read([], docs / "scores.json")
    copy = tmp_path / "scores.md"
    copy.write_text((docs / "scores.md").read_text("utf-8"), encoding="utf-8")
    write_document(copy, scores)
    assert copy.read_text("utf-8") == (docs / "scores.md").read_text("utf-8")
    # Compute one row independently of the code that writes the table.
    raw = json.loads((docs / "scores.json").read_text())
    runs = [run for run in raw if run["task"] == "double_pendulum-1M"]
    curve = np.mean([[mean for _, mean in run["curve"]] for run in runs], axis=0)
    numbers = [np.mean([run[key] for run in runs]) for key in ("final", "best")]
    expected = " | ".join(f"{number:,.0f}" for number in [*numbers, curve.max()])
    assert copy.read_text("utf-8").count(f" | {expected} | ") == 1


def test_saved_scores_are_kept_until_runs_with_newer_settings_replace_them(
    tmp_path: Path,
) -> None:
    old = [score(seed, 10.0)._replace(settings=None) for seed in range(2)]
    walker = score(0, 20.0, "walker-1M")
    path = tmp_path / "scores.json"
    path.write_text(json.dumps([run._asdict() for run in [*old, walker]]))
    assert _read([], path)["cheetah-1M"] == old
    (tmp_path / "0").mkdir()
    newer = score(0, 30.0)
    (tmp_path / "0" / "result.json").write_text(json.dumps(newer._asdict()))
    scores = _read([(CHEETAH, 0, tmp_path / "0"), (CHEETAH, 1, tmp_path / "1")], path)
    assert scores["cheetah-1M"] == [newer]
    assert scores["walker-1M"] == [walker]


def test_writing_the_tables_keeps_the_rest_of_the_document(tmp_path: Path) -> None:
    path = tmp_path / "scores.md"
    path.write_text(
        "# Before\n<!-- scores: begin -->\nold\n<!-- scores: end -->\nAfter"
    )
    for _ in range(2):  # the second time replaces the first tables
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


def test_each_run_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.scores.command.run_one", process_of)
    jobs = [(CHEETAH, seed, Path()) for seed in range(2)]
    assert len({os.getpid(), *_run(jobs, num_processes=1)}) == 3


@eagerly()
def test_finished_runs_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Task(
        config="cartpole",
        total_steps=4_096,
        measure="E",
        num_seeds=2,
        goal=1.0,
        anchors="E none",
        changes={
            "evaluation_episodes": 4,
            "curve_episodes": 2,
            "num_splits": 1,
            "epochs": 1,
            "minibatch_size": 2_048,
        },
    )
    assert tiny.name == "cartpole-4k"
    monkeypatch.setattr("benchmarks.scores.command.TASKS", (tiny,))
    monkeypatch.setattr("benchmarks.scores.document.TASKS", (tiny,))
    # Train in this process, because another one would load TensorFlow again.
    monkeypatch.setattr("ppo.cli.options.start_tensorflow", lambda *_: None)
    monkeypatch.setattr(
        "concurrent.futures.ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1)
    )
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
    # A run without a result was interrupted, and is resumed.
    folder = tmp_path / "cartpole-4k" / "0"
    (folder / "result.json").unlink()
    (folder / "from-before").touch()
    main(None, seeds=1, runs=tmp_path, processes=1)
    assert (resumed := read_score(folder)) is not None
    assert (folder / "from-before").exists()
    assert (resumed.curve, resumed.final) == (first.curve, first.final)
    monkeypatch.setattr(
        "benchmarks.scores.command.run_one", None
    )  # not to be called again
    main(None, seeds=1, runs=tmp_path, processes=1)
