"""How old the policy is that collected what is learned from."""

__all__ = ["PolicyLag"]


class PolicyLag:
    """Counts the updates between acting and learning.

    Every batch step is stamped with the number of updates that the policy had seen when
    it acted. A trainer that collects, then learns, then collects anew has a lag of 0;
    one that learns while it collects, or learns from a rollout twice, has not.
    """

    def __init__(self) -> None:
        self._num_updates = 0
        self._stamps: list[int] = []

    def begin(self) -> None:
        """Forget the batch steps so far: a new rollout begins."""
        self._stamps.clear()

    def stamp(self) -> None:
        """Note that the policy has acted once more."""
        self._stamps.append(self._num_updates)

    def learned(self) -> float:
        """Count an update with the rollout; returns its mean lag, in updates."""
        lag = self._num_updates - sum(self._stamps) / max(len(self._stamps), 1)
        self._num_updates += 1
        return lag
