"""Studies of several seeds: processes that finish, fail, stop and resume."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from envserve.python_process import python_command
from ppo.cli.options import user_command
from ppo.cli.stop_signals import StopSignals
from ppo.run_folder.folder import RunFolder
from ppo.run_folder.trust import EnvSource
from tests.ppo.runs import ppo

SETTINGS = ("--set", "total_steps=64", "--set", "num_envs=1", "--set", "horizon=64")
#: Beginning of a script that tests run instead of `ppo train --resume RUN`, which would
#: load TensorFlow; each test appends the rest.
RUN = """
import json, os, signal, sys
from pathlib import Path
folder = Path(sys.argv[-1])
config = json.loads((folder / "config.json").read_text())
seed = config["seed"]
with (folder / "starts").open("a") as file:
    file.write("start\\n")
def load():  # as the run does with its checkpoint and the options
    for word in sys.argv:
        if word.startswith("--set="):
            _, key, value = word.split("=", 2)
            config[key] = json.loads(value)
    (folder / "config.json").write_text(json.dumps(config))
def end(mean_return, steps=64, **more):
    load()
    row = {"steps": steps, "iteration": 1, "mean_return": 0.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\\n")
    result = {"steps": steps, "mean_return": mean_return, **more}
    (folder / "evaluation.json").write_text(json.dumps(result))
"""
ALL_BUT_ONE = RUN + "end(10.0 * seed) if seed != 8 else sys.exit('Error: no luck')"
#: Each process waits for SIGTERM; one sends SIGINT to the study, once or twice.
STOPPED = """
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
study = os.getppid()
for _ in range(COUNT if seed == 8 else 1):
    if seed == 8:
        os.kill(study, signal.SIGINT)
    signal.sigwait({signal.SIGTERM})
"""


def starts(folder: Path) -> list[int]:
    """Return how many times each seed was started."""
    files = [folder / f"seed-{seed}" / "starts" for seed in (7, 8, 9)]
    return [len(f.read_text().splitlines()) if f.exists() else 0 for f in files]


def study(folder: Path, *arguments: object) -> Sequence[object]:
    seeds = ("--seeds", "3", "--seed", "7", "--at-once", "2")
    return ("train", "CartPole-v1", *seeds, *SETTINGS, "--run-dir", folder, *arguments)


def run_instead(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Run code instead of `ppo train` for each seed."""
    monkeypatch.setattr(
        "ppo.cli.seeds.main_command",
        lambda _, *words, **__: python_command(code, *words),
    )


def test_four_seeds_with_the_actions_of_the_config_have_an_interquartile_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actions = "actions='sample' if seed == 8 else 'mode'"  # as by `evaluate --sampled`
    run_instead(monkeypatch, RUN + f"end(10.0 * seed, {actions})")
    seeds = ("--seeds", "5", "--seed", "7", "--at-once", "5")
    code, output, _ = ppo(
        "train", "CartPole-v1", *seeds, *SETTINGS, "--run-dir", tmp_path / "study"
    )
    assert code == 1
    assert "Mean return 92.5 over 4 of 5 seeds" in output  # 70, 90, 100 and 110
    assert "Interquartile mean 95.0, 95 % interval 7" in output


def test_a_failed_seed_is_reported_and_resumed_while_the_others_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = "\n(folder / 'words').write_text(' '.join(sys.argv[2:6]))"
    run_instead(monkeypatch, ALL_BUT_ONE + log)
    folder = tmp_path / "my study"
    code, output, _ = ppo(*study(folder, "--num-workers", 4, "--intra-op-threads", 1))
    assert code == 1
    words = "--num-workers=4 --intra-op-threads=2 --intra-op-threads 1"
    assert (folder / "seed-7" / "words").read_text() == words
    assert "  seeds  7, 8, 9; 2 at a time\n" in output
    assert "seed 8 failed: Error: no luck\n" in output
    assert "seed 9: mean return 90.0\n" in output
    assert "Mean return 80.0 over 2 of 3 seeds, std 14.1, 95 % interval" in output
    assert "interval 70.0 to 90.0, lowest 70.0\n" in output
    assert f"Resume with: {user_command('ppo')} train --resume '{folder}'\n" in output
    assert (folder / "mean_return.png").read_bytes().startswith(b"\x89PNG")
    run_instead(
        monkeypatch, RUN + "end(10.0 * seed); print('ended\\nNext:\\n  ppo plot')"
    )
    code, output, _ = ppo("train", "--resume", folder, "--set", "learning_rate=0.1")
    assert code == 0
    assert "Mean return 80.0 over 3 of 3 seeds, std 10.0" in output
    assert "Resume with" not in output
    assert starts(folder) == [1, 2, 1]
    configs = [folder / f"seed-{seed}" / "config.json" for seed in (7, 8, 9)]
    rates = [json.loads(path.read_text())["learning_rate"] for path in configs]
    assert rates[0] == rates[2] != rates[1] == 0.1  # two seeds had finished before
    # With more total steps, all seeds are started again.
    code, output, _ = ppo("train", "--resume", folder, "--set", "total_steps=128")
    assert code == 1
    assert starts(folder) == [2, 3, 2]
    assert "seed 7 failed: ended\n" in output
    configs = [folder / name / "config.json" for name in ("", "seed-7", "seed-9")]
    values = [json.loads(path.read_text()) for path in configs]
    assert [each["seed"] for each in values] == [7, 7, 9]
    assert [each["total_steps"] for each in values] == [128, 128, 128]


def test_settings_that_no_seed_can_use_leave_the_study_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_instead(monkeypatch, ALL_BUT_ONE)
    ppo(*study(tmp_path / "study"))
    settings = [*tmp_path.rglob("config.json"), *tmp_path.rglob("envs.json")]
    before = [path.read_text() for path in settings]
    changes = ("--set", "policy_layers=[3]", "--import", "a.py")
    (tmp_path / "a.py").touch()
    monkeypatch.chdir(tmp_path)
    code, *_ = ppo("train", "--resume", tmp_path / "study", *changes)
    assert (code, starts(tmp_path / "study")) == (1, [1, 2, 1])
    assert [path.read_text() for path in settings] == before
    log = "load(); (folder / 'words').write_text(' '.join(sys.argv[4:]))"
    run_instead(monkeypatch, RUN + log)
    ppo("train", "--resume", tmp_path / "study", *changes)
    words = (tmp_path / "study" / "seed-8" / "words").read_text()
    assert words.startswith("--set=policy_layers=[3] --connect=local")
    assert f"--import={tmp_path / 'a.py'} --trust" in words


def test_seeds_do_not_import_modules_that_the_study_does_not_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user was asked only about the code that the study names."""
    run_instead(monkeypatch, ALL_BUT_ONE)
    ppo(*study(tmp_path / "study"))
    seed = RunFolder(tmp_path / "study" / "seed-8")
    seed.save_env_source(EnvSource(import_modules=("unknown_module",)))
    ppo("train", "--resume", tmp_path / "study")
    assert starts(tmp_path / "study") == [1, 2, 1]
    assert seed.env_source() == EnvSource()


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("os.kill(os.getpid(), 9)", "killed by signal 9; last output: at step 9"),
        ("raise ValueError('it failed\\n in b')", "ValueError: it failed"),
    ],
    ids=["signal", "traceback"],
)
def test_a_failed_seed_is_reported_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, reason: str
) -> None:
    run_instead(monkeypatch, f"{RUN}print('at step 9', flush=True)\n{end}")
    code, output, _ = ppo(*study(tmp_path / "study"))
    assert code == 1
    assert f"seed 7 failed: {reason}\n" in output


def test_the_other_seeds_finish_if_the_folder_of_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = "import shutil\nshutil.rmtree(folder) if seed == 8 else end(seed)"
    run_instead(monkeypatch, RUN + removed)
    code, output, _ = ppo(*study(tmp_path / "study"))
    assert code == 1
    assert "seed 8 failed: exit code 0\n" in output
    assert "Mean return 8.0 over 2 of 3 seeds" in output


def test_seeds_that_a_callback_ended_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "study"
    run_instead(monkeypatch, RUN + "end(5.0, 0)")
    assert ppo(*study(folder))[0] == 1  # has an evaluation, but not one after training
    run_instead(monkeypatch, RUN + "end(5.0, 0, total_steps=64)")
    (folder / "seed-7-kept").mkdir()
    for _ in range(2):
        code, output, _ = ppo("train", "--resume", folder)
        assert code == 0, output
        assert "Mean return 5.0 over 3 of 3 seeds" in output
        path = folder / "seed-7" / "evaluation.json"
        final = json.loads(path.read_text())
        # As by `ppo evaluate --sampled --checkpoint 32`.
        later = {"steps": 32, "mean_return": 1.0, "actions": "sample", "final": final}
        path.write_text(json.dumps(later))
    assert starts(folder) == [2, 2, 2]
    for words in (
        ("--resume", folder, "--metrics-port", "0"),
        ("CartPole-v1", "--run-dir", folder, "--restartable"),
    ):
        code, _, error = ppo("train", *words)
        assert code == 2
        assert "cannot be combined with several seeds" in error
    code, _, error = ppo("evaluate", folder)
    assert code == 2
    assert error.startswith(f"Error: {folder}: expected the folder of a single run,")


@pytest.mark.parametrize(("count", "expected"), [(1, 0), (2, 130)])
def test_the_first_signal_stops_all_seeds_and_the_second_one_at_once(
    count: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = RUN + STOPPED.replace("COUNT", str(count))
    run_instead(monkeypatch, stopped)
    code, output, error = ppo(*study(tmp_path / "study"))
    assert code == expected, error
    assert "failed" not in output
    command = f"{user_command('ppo')} train --resume"
    hint = f"Resume with: {command} {tmp_path / 'study'}\n"
    assert hint in (error if count == 2 else output)
    assert starts(tmp_path / "study")[1:] == [1, 0]


def test_a_signal_before_the_first_seed_starts_ends_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = itertools.chain([False], itertools.repeat(True))
    monkeypatch.setattr(StopSignals, "has_fired", lambda _: next(results))
    monkeypatch.setenv("PATH", "")
    code, output, error = ppo(*study(tmp_path / "study"))
    assert code == 0, error
    assert user_command("ppo") != "ppo"
    assert f"Resume with: {user_command('ppo')} train --resume" in output
    assert starts(tmp_path / "study") == [0, 0, 0]


def test_monitoring_options_are_rejected_for_a_study(tmp_path: Path) -> None:
    code, _, error = ppo(*study(tmp_path / "study", "--film"))
    assert code == 2
    assert "omit these options or --seeds" in error
    code, _, error = ppo("train", "CartPole-v1", "--at-once", "2")
    assert code == 2
    assert "--at-once requires --seeds" in error
    code, _, error = ppo("train", "--resume", tmp_path, "--seeds", "3")
    assert code == 2
    assert "omit --run-dir, --seed and --seeds" in error
    assert list(tmp_path.iterdir()) == []
