"""StreamingLLM (Xiao et al., arXiv 2309.17453): sink tokens and a recent window, nothing else."""

from __future__ import annotations

from icecache.policies.dense import Choice, DenseLayer, Positions


class WindowLayer(DenseLayer):
    """The whole budget is spent on a longer window.

    Keys keep the positions they were rotated with, as in every other policy here.
    """

    def choose(self, at: Positions) -> Choice | None:
        number = at.middle.cumsum(dim=1)  # of a token in the middle, from 1
        last = number[:, -1:] - self.config.token_budget
        return Choice(number > last, search_rows=0.0)
