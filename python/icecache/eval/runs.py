"""What is evaluated: policies at budgets, with the options that every evaluation forces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from icecache.config import IceConfig
from icecache.eval.errors import EvalError
from icecache.policies import POLICIES, LayerFactory, make_policy, policy_config

FORCED: dict[str, int] = {
    "sink_tokens": 32,
    "window_tokens": 64,
    "dense_layers": 0,
    "dense_below": 0,
}
"""The same for every policy, so that they differ in what they find beyond sink and window."""


@dataclass(frozen=True)
class Run:
    """One policy at one budget; `budget` is None where it makes no difference."""

    policy: str
    budget: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.policy if self.budget is None else f"{self.policy} at {self.budget}"

    @property
    def seeded(self) -> bool:
        """Whether `seed` makes a difference."""
        return POLICIES[self.policy].seeded

    def config(self, **options: Any) -> IceConfig:
        return policy_config(self.policy, **self._options(options))

    def factory(self, **options: Any) -> LayerFactory:
        return make_policy(self.policy, **self._options(options))

    def _options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        budget = {} if self.budget is None else {"token_budget": self.budget}
        return {"token_budget": 64, **FORCED, **self.options, **budget, **options}


FULL = Run("full")


def plan(
    policies: Iterable[str], budgets: Iterable[int], options: Mapping[str, Any] | None = None
) -> list[Run]:
    """The runs of `policies` at `budgets`. `options` (fields of `IceConfig`) are for "icecache".

    An unknown policy, an unknown or forced option or a bad value raises `EvalError`.
    """
    options = dict(options or {})
    forced = sorted({*FORCED, "token_budget"} & set(options))
    if forced:
        raise EvalError(f"{forced[0]} cannot be set: every evaluation uses one value")
    runs = []
    budgets = list(budgets)
    for policy in policies:
        if policy not in POLICIES:
            raise EvalError(f"a policy must be one of {list(POLICIES)}, got {policy!r}")
        mine = options if policy == "icecache" else {}
        for budget in budgets if POLICIES[policy].budgeted else [None]:
            run = Run(policy, budget, mine)
            try:
                run.config()
            except (TypeError, ValueError) as error:
                raise EvalError(str(error)) from error
            runs.append(run)
    return runs
