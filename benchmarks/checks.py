"""Figures beside goals. Nothing fails when a goal is missed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lltm.benchmark.report import Row, time_text


@dataclass
class Check:
    """A figure beside its goal."""

    what: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "met   " if self.met else "missed"
        return f"{verdict} {self.value:.3g} (goal {sign} {self.limit:g})  {self.what}"


@dataclass
class Bound:
    """The least time that a case can take, by what of it the machine does slowest."""

    by: str
    seconds: float
    share: float  # of this bound in the first contender's time


@dataclass
class CheckedRow(Row):
    checks: list[Check] = field(default_factory=list)
    bound: Bound | None = None

    def lines(self) -> Iterator[str]:
        yield from super().lines()
        if self.bound is not None:
            first, least = next(iter(self.seconds)), time_text(self.bound.seconds)
            share = f"share of it in {first}: {self.bound.share:.2f}"
            yield f"  bound: {least} by {self.bound.by}; {share}"
        for check in self.checks:
            yield f"  {check}"


def checked(row: Row) -> CheckedRow:
    return CheckedRow(**vars(row))


Checks = Sequence[tuple[str, Check]]  # each with the title of what it is about


def check_lines(checks: Checks) -> Iterator[str]:
    met = sum(check.met for _, check in checks)
    yield f"\nGoals: {met} of {len(checks)} met"
    for title, check in checks:
        yield f"  {check}; {title}"


def checks_as_json(checks: Checks) -> list[dict[str, Any]]:
    return [{"title": title, "met": check.met, **asdict(check)} for title, check in checks]
