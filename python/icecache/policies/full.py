"""Full attention: every token, at every step."""

from __future__ import annotations

from icecache.policies.dense import Choice, DenseLayer, Positions


class FullLayer(DenseLayer):
    """What the other policies are measured against."""

    def choose(self, at: Positions) -> Choice | None:
        return None
