"""Valid and faulty callbacks for tests; some tests check the line numbers."""

from typing import Any

seen: list[Any] = []


def records(run: Any, metrics: Any, rollout: Any) -> Any:
    seen.append((run, dict(metrics), rollout.reward.copy()))
    metrics["own/put"], metrics["evaluation_x"] = run.counters.iteration, 1.0
    return {"returned": 10 * run.counters.iteration, "mean_return": -1.0, "steps": 7}


class CountsCalls:
    def __init__(self) -> None:
        self.calls = 0
        seen.append(self)

    def __call__(self, run: Any, metrics: Any, rollout: Any) -> Any:
        self.calls += 1
        if self.calls == 2:
            run.stop()
        return {"calls": self.calls, "doubled": 2 * metrics.get("returned", 0)}


def raises(run: Any, metrics: Any, rollout: Any) -> Any:
    if run.counters.iteration == 2:
        raise ValueError("in\niteration 2")  # line 28


def breaks_the_config(run: Any, metrics: Any, rollout: Any) -> Any:
    run.config.replace(num_envs=0)  # line 32


def returns_text(run: Any, metrics: Any, rollout: Any) -> Any:  # line 35
    return {"words": "many"}


def returns_a_list(run: Any, metrics: Any, rollout: Any) -> Any:  # line 39
    return [1, 2, 3]


def takes_two_arguments(run: Any, metrics: Any) -> Any:  # line 43
    return {}


class NeedsArgument:
    def __init__(self, argument: Any) -> None:  # line 48
        pass

    def __call__(self, run: Any, metrics: Any, rollout: Any) -> Any:
        pass


class NotCallable:  # line 55
    pass


def returns_integer_keys(run: Any, metrics: Any, rollout: Any) -> Any:  # line 59
    return {0: 1.0}


def resets_envs(run: Any, metrics: Any, rollout: Any) -> Any:
    run.env.reset()


def steps_envs(run: Any, metrics: Any, rollout: Any) -> Any:
    run.env.step([0] * run.env.num_envs)


def sets_level(run: Any, metrics: Any, rollout: Any) -> Any:
    run.env.set_attr("level", [run.counters.iteration + 1] * run.env.num_envs)


class RewardsTheSecondEnv:
    """Changes rewards before the update; before the third one, to infinity."""

    def before_update(self, run: Any, rollout: Any) -> Any:
        rollout.reward[:, 1] = 5.0 if run.counters.iteration < 2 else float("inf")
        names = ("own/bonus", "mean_return", "reward_scale")
        return dict.fromkeys(names, run.counters.iteration)

    def __call__(self, run: Any, metrics: Any, rollout: Any) -> Any:
        seen.append((metrics["own/bonus"], rollout.reward.copy()))


def returns_surrogates(run: Any, metrics: Any, rollout: Any) -> Any:  # line 87
    return {"\ud800": 1.0}


class OnlyRewards:
    def before_update(self, run: Any, rollout: Any) -> Any:
        rollout.reward[:] = 2.0


class TakesNoRollout:  # line 96
    def before_update(self, run: Any) -> Any:
        pass


def closes_envs(run: Any, metrics: Any, rollout: Any) -> Any:
    run.env.close()


def returns_letters(run: Any, metrics: Any, rollout: Any) -> Any:
    return dict.fromkeys("zyxwvuabc", 1.0)
