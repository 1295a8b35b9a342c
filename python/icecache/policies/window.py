"""StreamingLLM (Xiao et al., arXiv 2309.17453): sink tokens and a recent window, nothing else."""

from __future__ import annotations

from icecache.policies.dense import Choice, DenseLayer, Positions, latest


class WindowLayer(DenseLayer):
    """The whole budget is spent on a longer window.

    Keys keep the positions they were rotated with, as in every other policy here.
    """

    def choose(self, at: Positions) -> Choice | None:
        return Choice(latest(at.middle, self.config.token_budget), search_rows=0.0)
