"""ArkVale (Chen et al., NeurIPS 2024): pages by a bounding volume of their keys, recalled."""

from __future__ import annotations

from icecache.policies.pages import PageLayer


class ArkValeLayer(PageLayer):
    """Pages of 32, each in a box.

    Of its bounding volumes the box: a ball around the mean of the keys came less close to full
    attention on the text for tuning. On a device: the boxes, and pages recalled from the host.
    Which pages stay there decides what is moved, not what is attended to, and is left out.
    """

    PAGE = 32
