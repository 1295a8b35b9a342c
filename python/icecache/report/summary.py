"""What the rows say: means over the texts, which policy keeps the answers, and which is best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, TypeVar

from icecache.eval.comparison import Comparison, DriftRow, TaskRow, TextRow
from icecache.report.numbers import byte_count, listed, number, percent, times, with_error

FULL = "full"
ICECACHE = "icecache"
OWN = (ICECACHE, "icecache-reuse")
"""icecache and its variants: the next best policy is one that is none of them."""
_SAME = 1e-6
"""KL of rounding."""
KEPT_KL = 0.01
"""A policy keeps the answers if its mean KL is at most this, in nats."""


@dataclass(frozen=True, kw_only=True)
class Mean:
    """One policy at one budget, mean over all texts of the comparison."""

    policy: str
    budget: int | None
    equal: str
    kl: float
    kl_stderr: float
    agreement: float
    exact_tokens: float
    read_bytes: float
    moved_bytes: float
    held_bytes: float

    @property
    def kept(self) -> bool:
        return self.kl <= KEPT_KL


@dataclass(frozen=True, kw_only=True)
class TaskMean:
    """One policy at one budget, mean over the tasks that full attention can do."""

    policy: str
    budget: int | None
    right: float
    """Share of the instances that full attention gets right, mean over tasks."""
    loss: float
    """Log-probability of the right answer under full attention, less that here, in nats."""


Row = TypeVar("Row", Mean, TextRow)
_SPENT = 1.25
"""A policy that attends to so many times what the median one does is not at equal tokens."""


def is_deployable(config: Mapping[str, Any], policy: str) -> bool:
    """Whether a user could run it: full attention and oracles are there for comparison only."""
    return policy != FULL and bool(config.get("policies", {}).get(policy, {}).get("deployable", 1))


def shown_name(config: Mapping[str, Any], policy: str) -> str:
    """The policy, marked if it is there for comparison only."""
    fit = policy == FULL or is_deployable(config, policy)
    return policy if fit else f"{policy} (not deployable)"


def policies(comparison: Comparison) -> list[str]:
    """Of all rows, in the order of the config."""
    rows: list[Any] = [*comparison.texts, *comparison.tasks, *comparison.heads]
    found = dict.fromkeys(row.policy for row in rows)
    known = [name for name in comparison.config.get("policies", {}) if name in found]
    return list(dict.fromkeys([*known, *found]))


def budgets(rows: Iterable[Any]) -> list[int]:
    """All of the rows, from the smallest."""
    return sorted({row.budget for row in rows if row.budget is not None})


def means(rows: Sequence[TextRow]) -> list[Mean]:
    """Over texts; a policy that some text lacks has none."""
    texts = {row.text for row in rows}
    groups: dict[tuple[str, int | None, str], list[TextRow]] = {}
    for row in rows:
        groups.setdefault((row.policy, row.budget, row.equal), []).append(row)
    return [
        Mean(
            policy=policy,
            budget=budget,
            equal=equal,
            kl=fmean(row.kl for row in group),
            kl_stderr=math.sqrt(sum(row.kl_stderr**2 for row in group)) / len(group),
            agreement=fmean(row.agreement for row in group),
            exact_tokens=fmean(row.exact_tokens for row in group),
            read_bytes=fmean(row.read_bytes for row in group),
            moved_bytes=fmean(row.moved_bytes for row in group),
            held_bytes=fmean(row.held_bytes for row in group),
        )
        for (policy, budget, equal), group in groups.items()
        if {row.text for row in group} == texts
    ]


def kept_from(found: Sequence[Mean]) -> Mean | None:
    """The smallest budget of one policy at which it keeps the answers, and at all larger ones."""
    last = None
    for mean in sorted(found, key=lambda mean: mean.budget or 0, reverse=True):
        if not mean.kept:
            break
        last = mean
    return last


def contestants(
    rows: Sequence[Row], config: Mapping[str, Any], budget: int, equal: str
) -> list[Row]:
    """Deployable policies at `budget`, the best first; icecache is its own measure of bytes. At
    equal tokens without those that attend to more."""
    found = [row for row in rows if row.budget == budget and row.equal == equal]
    if found and equal == "bytes" and ICECACHE not in {row.policy for row in found}:
        found += [row for row in rows if (row.policy, row.budget) == (ICECACHE, budget)]
    fit = [row for row in found if is_deployable(config, row.policy) and math.isfinite(row.kl)]
    if fit and equal == "tokens":
        most = _SPENT * median(row.exact_tokens for row in fit)
        fit = [row for row in fit if row.exact_tokens <= most]
    return sorted(fit, key=lambda row: row.kl)


def left_out(
    rows: Sequence[Mean], config: Mapping[str, Any], budget: int, equal: str
) -> str | None:
    """Who is not in a ranking, and why."""
    at_tokens = [row for row in rows if (row.budget, row.equal) == (budget, "tokens")]
    ranked = {row.policy for row in contestants(rows, config, budget, equal)}
    others = [r for r in at_tokens if is_deployable(config, r.policy) and r.policy not in ranked]
    if not others:
        return None
    if equal == "bytes":
        return f"Read more at any budget, or not measured: {listed([r.policy for r in others])}."
    each = [
        f"{row.policy} ({row.exact_tokens:,.0f} tokens)" if math.isfinite(row.kl) else row.policy
        for row in others
    ]
    return f"Attend to more than the budget, or have no KL: {listed(each)}."


def missing(comparison: Comparison) -> str | None:
    """What a comparison that was stopped lacks: rows of some texts that others have."""
    texts = dict.fromkeys(row.text for row in comparison.texts)
    cells = {(r.policy, r.budget) for r in comparison.texts if r.equal == "tokens"}
    has = {(r.text, r.policy, r.budget) for r in comparison.texts if r.equal == "tokens"}
    lacking = [text for text in texts if any((text, *cell) not in has for cell in cells)]
    if not lacking:
        return None
    return (
        f"Incomplete: {len(has)} of {len(cells) * len(texts)} rows are there. Not all policies and "
        f"budgets were measured on {listed(lacking)}. What is said of means below is said of those "
        "that were measured on every text."
    )


def standing(ranked: Sequence[Mean]) -> str:
    """Who is best of the deployable policies, and how far icecache is from the next best."""
    best = ranked[0]
    text = f"{best.policy} is best, KL {with_error(best.kl, best.kl_stderr)}"
    other = _other(ranked)
    if ranked[-1].kl < _SAME:
        return "all are full attention."
    if other is None:
        return f"{text}; there is nothing to compare it with."
    has = with_error(other.kl, other.kl_stderr)
    if best.policy in OWN:
        text += f"; the best other method, {other.policy}, has {has}"
    else:
        text += f"; {other.policy} has {has}"
    if best.kl > 0:
        text += f", {times(other.kl / best.kl)} as far from full attention"
    if other.kl - best.kl < 2 * math.hypot(best.kl_stderr, other.kl_stderr):
        text += " (a difference of less than two standard errors)"
    return f"{text}."


def _other(ranked: Sequence[Any]) -> Any | None:
    """The next best that is not icecache if the best is, and icecache if the best is not."""
    mine = ranked[0].policy in OWN
    return next((row for row in ranked[1:] if (row.policy in OWN) != mine), None)


def pairs(comparison: Comparison, equal: str) -> str | None:
    """In how many pairs of budget and text icecache is best, and who is in the others."""
    rows, ahead, behind = comparison.texts, 0, []
    for text in dict.fromkeys(row.text for row in rows):
        here = [row for row in rows if row.text == text]
        for budget in budgets(here):
            ranked = contestants(here, comparison.config, budget, equal)
            mine = next((row for row in ranked if row.policy == ICECACHE), None)
            if mine is None or len(ranked) < 2 or ranked[-1].kl < _SAME:
                continue
            if ranked[0].kl == mine.kl:
                ahead += 1
            else:
                ratio = f", {times(mine.kl / ranked[0].kl)}" if ranked[0].kl > 0 else ""
                behind.append(f"{ranked[0].policy} is at {budget:,} tokens on {text}{ratio}")
    if not ahead + len(behind):
        return None
    text = "icecache has the lowest KL of all deployable policies in "
    text += f"{ahead} of {ahead + len(behind)} pairs of budget and text"
    return f"{text}: {listed(behind)}." if behind else f"{text}."


def keepers(comparison: Comparison, found: Sequence[Mean]) -> str | None:
    """Which deployable policy keeps the answers from which budget on, in one or two sentences."""
    at: dict[int | None, list[str]] = {}
    never = []
    for policy in policies(comparison):
        own = [mean for mean in found if mean.policy == policy and mean.equal == "tokens"]
        if not own or not is_deployable(comparison.config, policy):
            continue
        kept = kept_from(own)
        if kept is None:
            never.append(policy)
        else:
            at.setdefault(kept.budget, []).append(policy)
    if not at and not never:
        return None
    if not at:
        return "No deployable policy keeps the answers at any budget measured."
    order = sorted(at, key=lambda budget: -1 if budget is None else budget)
    first, *later = [
        (listed(at[budget]), "at any budget" if budget is None else f"from {budget:,} tokens on")
        for budget in order
    ]
    verb = "keeps" if len(at[order[0]]) == 1 else "keep"
    text = f"{first[0]} {verb} the answers {first[1]}"
    text = "; ".join([text, *(f"{names} {since}" for names, since in later)]) + "."
    return f"{text} At no budget measured: {listed(never)}." if never else text


def costs(found: Sequence[Mean]) -> str | None:
    """What icecache costs at the smallest budget at which it keeps the answers, or the largest."""
    own = [mean for mean in found if (mean.policy, mean.equal) == (ICECACHE, "tokens")]
    if not own:
        return None
    mean = kept_from(own) or max(own, key=lambda mean: mean.budget or 0)
    full = next((mean for mean in found if mean.policy == FULL), None)
    at = "" if mean.budget is None else f"At a budget of {mean.budget:,} "
    text = f"{at}icecache agrees with full attention on the most probable token at "
    text += (
        f"{percent(mean.agreement)} of the positions. A step reads {byte_count(mean.read_bytes)}"
    )
    if full and full.read_bytes > 0:
        text += f" ({percent(mean.read_bytes / full.read_bytes)} of full attention)"
    text += f", moves {byte_count(mean.moved_bytes)} to a device and holds "
    text += f"{byte_count(mean.held_bytes)} there"
    if full:
        text += f" (full attention: {byte_count(full.held_bytes)})"
    return text + "."


def can_be_done(rows: Sequence[TaskRow]) -> list[str]:
    """The tasks of which full attention gets an instance right."""
    return list(dict.fromkeys(row.task for row in rows if row.full_right))


def task_means(rows: Sequence[TaskRow]) -> list[TaskMean]:
    """Over the tasks that can be done; a policy that lacks one has none."""
    tasks = can_be_done(rows)
    groups: dict[tuple[str, int | None], dict[str, list[TaskRow]]] = {}
    for row in rows:
        if row.full_right:
            group = groups.setdefault((row.policy, row.budget), {})
            group.setdefault(row.task, []).append(row)
    return [
        TaskMean(
            policy=policy,
            budget=budget,
            right=fmean(fmean(row.right for row in group[task]) for task in tasks),
            loss=fmean(fmean(loss(row) for row in group[task]) for task in tasks),
        )
        for (policy, budget), group in groups.items()
        if len(group) == len(tasks)
    ]


def loss(row: TaskRow) -> float:
    """Of log-probability of the right answer, against full attention, in nats."""
    return row.full_logprob - row.logprob


def task_standing(found: Sequence[TaskMean], config: Mapping[str, Any], budget: int) -> str | None:
    """The best deployable policy on the tasks, and icecache or the next best."""
    here = [mean for mean in found if mean.budget == budget]
    ranked = [mean for mean in here if is_deployable(config, mean.policy)]
    if not ranked:
        return None
    ranked.sort(key=lambda mean: (-mean.right, mean.loss))
    best, other = ranked[0], _other(ranked)
    text = f"{best.policy} is best: {_answers(best)}"
    if other is None:
        return f"{text}."
    name = f"the best other method, {other.policy}" if best.policy in OWN else other.policy
    return f"{text}; {name}: {_answers(other)}."


def _answers(mean: TaskMean) -> str:
    return f"{percent(mean.right)} right, {number(mean.loss, 2)} nats of log-probability lost"


def drift_standing(rows: Sequence[DriftRow]) -> list[str]:
    """The last stretch of each text and budget against an index built anew."""
    lines = []
    for text, budget in dict.fromkeys((row.text, row.budget) for row in rows):
        here = [row for row in rows if (row.text, row.budget) == (text, budget)]
        last = max(row.start for row in here)
        kl = {row.variant: row.kl for row in here if row.start == last}
        if "inserted" not in kl:
            continue
        line = f"{text}, from position {last:,} on, budget {budget:,}: KL {number(kl['inserted'])}"
        for variant, words in (
            ("rebuilt", "with an index built anew"),
            ("not inserted", "if what leaves the window is lost"),
        ):
            if variant in kl:
                line += f", {number(kl[variant])} {words}"
        if kl.get("rebuilt", 0) > 0:
            line += f" ({times(kl['inserted'] / kl['rebuilt'])} that of the index built anew)"
        lines.append(f"{line}.")
    return lines
