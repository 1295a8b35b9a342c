"""What a long measurement has done so far, kept in its result file so that it can go on there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from icecache.eval.comparison import Comparison, DriftRow, HeadRow, TaskRow, TextRow
from icecache.eval.errors import EvalError


class Ledger:
    """The rows of a comparison, written to `path` after each addition; in memory alone for None.

    A file that is there is taken up and its rows stay. `EvalError` unless its config has the same
    values under the names `alike`, and the same for what both have in the mapping "read", from
    names to digests of what is read.
    """

    def __init__(
        self, path: Path | None, config: Mapping[str, Any], alike: Sequence[str] = ()
    ) -> None:
        self._path = path
        self.comparison = Comparison(config=config)
        if path is not None and path.exists() and path.stat().st_size:
            found = Comparison.read(path)
            for name in alike:
                _agree(path, name, found.config.get(name), config[name])
            known, read = found.config.get("read", {}), config.get("read", {})
            for name in known.keys() & read.keys():
                _agree(path, f"the text {name}", known[name], read[name])
            self.comparison = replace(found, config={**config, "read": {**known, **read}})

    def text_row(self, text: str, policy: str, budget: int | None, equal: str) -> TextRow | None:
        """The row of one policy at one budget, if it was measured."""
        wanted = (text, policy, budget, equal)
        for row in self.comparison.texts:
            if (row.text, row.policy, row.budget, row.equal) == wanted:
                return row
        return None

    def has_task(
        self, task: str, context: int, instance: int, policy: str, budget: int | None
    ) -> bool:
        wanted = (task, context, instance, policy, budget)
        return any(
            (row.task, row.context, row.instance, row.policy, row.budget) == wanted
            for row in self.comparison.tasks
        )

    def has_drift(self, text: str, budget: int) -> bool:
        return any((row.text, row.budget) == (text, budget) for row in self.comparison.drift)

    def add(
        self,
        *,
        texts: Sequence[TextRow] = (),
        tasks: Sequence[TaskRow] = (),
        drift: Sequence[DriftRow] = (),
        heads: Sequence[HeadRow] = (),
    ) -> None:
        """All of one measurement at once: a file never holds a part of one."""
        self.comparison.texts.extend(texts)
        self.comparison.tasks.extend(tasks)
        self.comparison.drift.extend(drift)
        self.comparison.heads.extend(heads)
        if self._path is not None:
            self.comparison.write(self._path)


def _agree(path: Path, name: str, there: Any, here: Any) -> None:
    if there != here:
        raise EvalError(
            f"{path} holds a comparison with {name} {there!r}, this one has {here!r}: "
            "give another file, or delete it"
        )
