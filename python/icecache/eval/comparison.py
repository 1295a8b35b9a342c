"""What a comparison of policies measured, as rows, and their file.

What a step costs is the mean over the last 8 tokens of a text, which are fed one by one.
Bytes count the rows of a cache of the model's dtype; a mean, bound or code of a token counts as the
part of a row that it takes. They are those of one decoded position, all layers together, whichever
machine holds them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from icecache.eval.errors import EvalError


@dataclass(frozen=True, kw_only=True)
class TextRow:
    """One policy on one text, compared with full attention position by position."""

    policy: str
    budget: int | None
    """Tokens beyond sink and window, per KV head; None where it makes no difference."""
    equal: str
    """What `budget` stands for. "tokens": the policy attends to so many exactly. "bytes": it has
    a budget at which it reads as much as icecache does at `budget`, or nearly: see `read_bytes`."""
    spent: int | None
    """The budget that it ran with."""
    text: str
    positions: int
    """Positions compared."""
    kl: float
    """Mean KL(full || policy) of the next-token distributions, in nats."""
    kl_stderr: float
    """Its standard error, positions taken as independent; NaN for one position."""
    perplexity: float
    agreement: float
    """Share of positions with the same most probable token as full attention."""
    exact_tokens: float
    """Tokens attended exactly per KV head (sink and window counted, the union over the query heads
    of a group), mean over layers."""
    read_bytes: float
    """Read by a step, to find what to attend to and to attend."""
    moved_bytes: float
    """Sent to a device by a step, if the model were on one."""
    held_bytes: float
    """Held on that device: what the method keeps there, and the slots of fetched rows."""


@dataclass(frozen=True, kw_only=True)
class TaskRow:
    """One policy on one instance of a task that has a right answer."""

    policy: str
    budget: int | None
    task: str
    instance: int
    context: int
    """Tokens before the question."""
    right: bool
    """Whether greedy decoding gives exactly the right answer."""
    logprob: float
    """Sum of the log-probabilities of the right answer's tokens, in nats."""
    full_right: bool
    """The same under full attention, which is the best that is asked for."""
    full_logprob: float


@dataclass(frozen=True, kw_only=True)
class DriftRow:
    """icecache after a short prefill, far into decoding."""

    variant: str
    """"inserted": as it is. "not inserted": what leaves the window is lost. "rebuilt": its index is
    built anew every 256 tokens."""
    budget: int
    text: str
    start: int
    """Position of the first token of the stretch."""
    positions: int
    kl: float
    kl_stderr: float


@dataclass(frozen=True, kw_only=True)
class HeadRow:
    """One KV head under one policy on one text, mean over some positions."""

    policy: str
    budget: int | None
    text: str
    layer: int
    head: int
    mass: float
    """True share of the full softmax on the tokens attended exactly, mean over the group."""
    error: float
    """Mean over the group of |output - exact output| / |exact output|, for the same queries."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that one run of `icecache compare` measured; `config` says how to repeat it.

    `config` has at least "model", "context", "tokens", "budgets", "policies" (name to one sentence
    and whether it is deployable: `{"quest": {"what": ..., "deployable": true}}`) and "versions".
    """

    config: Mapping[str, Any]
    texts: list[TextRow] = field(default_factory=list)
    tasks: list[TaskRow] = field(default_factory=list)
    drift: list[DriftRow] = field(default_factory=list)
    heads: list[HeadRow] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """As JSON, one row a line; a file that is there is replaced when the new one is whole.
        `EvalError` if it cannot be written."""
        parts = [f'"config": {json.dumps(self.config, indent=1)}']
        for name in _KINDS:
            rows = ",\n".join(json.dumps(asdict(row)) for row in getattr(self, name))
            parts.append(f'"{name}": [\n{rows}\n]')
        whole = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            whole.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
            whole.replace(path)
        except OSError as error:
            raise EvalError(f"cannot write {path}: {error}") from error

    @classmethod
    def read(cls, path: Path) -> Comparison:
        """The inverse of `write`; `EvalError` if the file is none."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            rows = {name: [kind(**row) for row in found[name]] for name, kind in _KINDS.items()}
            if not isinstance(found["config"], dict):
                raise TypeError("its config is no mapping")
            return cls(config=found["config"], **rows)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise EvalError(f"{path} holds no comparison: {error}") from error


_KINDS: dict[str, Any] = {"texts": TextRow, "tasks": TaskRow, "drift": DriftRow, "heads": HeadRow}
