"""Quest (Tang et al., arXiv 2406.10774): pages by the minimum and maximum of their keys."""

from __future__ import annotations

from icecache.policies.pages import PageLayer


class QuestLayer(PageLayer):
    """Pages of 16.

    Published for models without grouped heads; the first two layers, full there, select here as
    with every policy. On a device: everything, and two rows of bounds a page.
    """

    PAGE = 16
