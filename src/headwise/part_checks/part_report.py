"""The result of checking a part: one row per check, printed as a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Errors are relative to |expected| + ERROR_OFFSET, so that values near zero are compared by their absolute error.
MAX_ERROR, ERROR_OFFSET = 1e-10, 0.1
MAX_FAILURES = 8  # printed for each check


@dataclass
class CheckResult:
    """One check: the number of comparisons, the largest error of those of tensors, and the failures, one line each.

    `skipped` are the specs that the check does not apply to, with the reasons.
    """

    name: str
    description: str
    comparisons: int = 0
    largest_error: float | None = None
    failures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def compare(self, label: str, actual: Any, expected: Any) -> None:
        """Compare two tensors within rounding, or two other values exactly."""
        self.comparisons += 1
        if not isinstance(expected, Tensor):
            if actual != expected:
                self.failures.append(f"{label}: {actual}, expected {expected}")
            return
        if actual.shape != expected.shape:
            self.failures.append(f"{label}: shape {list(actual.shape)}, expected {list(expected.shape)}")
            return
        error = measure_error(actual, expected)
        self.largest_error = error if self.largest_error is None else max(error, self.largest_error)
        if not error <= MAX_ERROR:
            self.failures.append(f"{label}: error {error:.2g}, at most {MAX_ERROR:g} is rounding")

    @property
    def outcome(self) -> str:
        """ "passed", "failed", or "does not apply" if nothing could be compared."""
        if self.failures:
            return "failed"
        return "passed" if self.comparisons else "does not apply"

    @property
    def data(self) -> dict[str, Any]:
        """The result as plain values."""
        return {
            "check": self.name,
            "outcome": self.outcome,
            "comparisons": self.comparisons,
            "largest_error": self.largest_error,
            "failures": list(self.failures),
            "skipped": list(self.skipped),
        }


def measure_error(actual: Tensor, expected: Tensor) -> float:
    """The largest |actual - expected| / (|expected| + 0.1); infinite if one is not finite where the other is.

    >>> round(measure_error(torch.tensor([0.9, 2.0]), torch.tensor([0.9, 2.1])), 4)
    0.0455
    """
    if not actual.numel():
        return 0.0
    actual, expected = actual.detach().double(), expected.detach().double()
    errors = (actual - expected).abs() / (expected.abs() + ERROR_OFFSET)
    equal = torch.where(actual == expected, torch.zeros_like(errors), errors)
    return torch.where(equal.isnan(), torch.full_like(equal, torch.inf), equal).max().item()


@dataclass(frozen=True)
class PartReport:
    """The results of all checks of a part, with the specs and backends that were used; printed as a table."""

    part: str
    specs: tuple[str, ...]
    backends: tuple[str, ...]
    impossible: tuple[str, ...]  # specs that the part cannot be used in, with the reasons
    results: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not any(result.failures for result in self.results)

    @property
    def data(self) -> dict[str, Any]:
        """The report as plain values."""
        return {
            "part": self.part,
            "passed": self.passed,
            "specs": list(self.specs),
            "backends": list(self.backends),
            "impossible": list(self.impossible),
            "results": [result.data for result in self.results],
        }

    def raise_if_failed(self) -> None:
        """Raise AssertionError with this report unless all checks passed."""
        if not self.passed:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        failed = sum(bool(result.failures) for result in self.results)
        count = len(self.results)
        lines = [
            f"{self.part}: {failed} of {count} checks failed" if failed else f"{self.part}: all {count} checks hold"
        ]
        lines += ["", *self._format_table(), "", f"specs      {'; '.join(self.specs)}"]
        lines += [f"backends   {', '.join(self.backends)}"]
        lines += [f"not used   {text}" for text in self.impossible]
        for result in self.results:
            lines += [f"skipped    {result.name}: {text}" for text in result.skipped]
        for result in self.results:
            lines += ["", f"{result.name} failed:"] if result.failures else []
            lines += [f"  {failure}" for failure in result.failures[:MAX_FAILURES]]
            if len(result.failures) > MAX_FAILURES:
                lines += [f"  and {len(result.failures) - MAX_FAILURES} more"]
        return "\n".join(lines)

    def _format_table(self) -> list[str]:
        rows = [("check", "compares", "comparisons", "largest error", "result")]
        for result in self.results:
            error = "-" if result.largest_error is None else f"{result.largest_error:.1e}"
            rows.append((result.name, result.description, f"{result.comparisons:,}", error, result.outcome))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        return [
            f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}  {row[4]}"
            for row in rows
        ]
