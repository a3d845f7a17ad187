"""Numbers as text: one function for each kind of quantity.

NaN and None are what was not measured, and are written "-".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

NOT_MEASURED = "-"
NO_SPREAD = "no spread"  # instead of an interval whose ends are equal
SMALLEST_FIXED = 0.01  # magnitudes that two decimals can show
LARGEST_FIXED = 10_000.0
UNIT_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")


def is_missing(value: float | None) -> bool:
    """Return True for None and NaN."""
    return value is None or math.isnan(value)


def format_numbers(values: Sequence[float | None]) -> list[str]:
    """Return numbers of one kind alike: with two decimals, or all in scientific form.

    >>> format_numbers([0.5, 0.0, 12.345]), format_numbers([0.000123, -0.5, math.nan])
    (['0.50', '0.00', '12.35'], ['1.23e-04', '-5.00e-01', '-'])
    """
    sizes = [abs(value) for value in values if value and math.isfinite(value)]
    is_fixed = all(SMALLEST_FIXED <= size < LARGEST_FIXED for size in sizes)
    form = ".2f" if is_fixed else ".2e"
    return [NOT_MEASURED if is_missing(value) else format(value, form) for value in values]


def format_number(value: float | None) -> str:
    """Return a number with about four significant digits.

    >>> [format_number(value) for value in (0.12345, 12.3456, 12345.6, 1e-7, 3, math.nan)]
    ['0.1235', '12.346', '12,346', '1.0e-07', '3', '-']
    """
    if value is None or math.isnan(value):
        return NOT_MEASURED
    if value == int(value) if math.isfinite(value) else False:
        return f"{int(value):,}" if abs(value) < 1e6 else format_count(value)
    size = abs(value)
    if size >= 1e6 or size < 1e-4:
        return f"{value:.1e}"
    return format(value, ",.0f" if size >= 1000 else ".3f" if size >= 1 else ".4f")


def format_count(number: float) -> str:
    """Return a count with a unit prefix if it has more than four digits.

    >>> (
    ...     format_count(67108864),
    ...     format_count(999),
    ...     format_count(2 * 10**15),
    ...     format_count(2345 * 10**27),
    ... )
    ('67.11 M', '999', '2.00 P', '2.34e30')
    """
    if abs(number) < 10_000:
        return f"{number:,.0f}"
    digits = str(abs(int(number)))
    power = (len(digits) - 1) // 3
    if power >= len(UNIT_PREFIXES):
        return f"{digits[0]}.{digits[1:3]}e{len(digits) - 1}"
    return f"{number / 1000**power:.2f} {UNIT_PREFIXES[power]}"


def format_bytes(num_bytes: float | None) -> str:
    """Return a number of bytes with a decimal unit.

    >>> format_bytes(192), format_bytes(31104), format_bytes(302_000_000)
    ('192 B', '31.10 kB', '302.00 MB')
    """
    if num_bytes is None or math.isnan(num_bytes):
        return NOT_MEASURED
    if 1000 <= num_bytes < 10_000:
        return f"{num_bytes / 1000:.2f} kB"
    number = format_count(num_bytes)
    return f"{number}B" if number[-1].isalpha() else f"{number} B"


def format_seconds(seconds: float | None) -> str:
    """Return a time with about three digits in the unit that suits it.

    >>> [format_seconds(value) for value in (8.2e-6, 0.0029134, 12.5, 150, 5400)]
    ['8.2 us', '2.91 ms', '12.5 s', '2.5 min', '1.5 h']
    """
    if seconds is None or math.isnan(seconds):
        return NOT_MEASURED
    if seconds >= 90:
        return f"{seconds / 60:.1f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
    scale, unit = next((pair for pair in units if seconds >= pair[0]), units[-1])
    value = seconds / scale
    places = 0 if value >= 100 else 1 if value >= 10 or unit in ("us", "ns") else 2
    return f"{value:.{places}f} {unit}"


def format_share(share: float | None) -> str:
    """Return a share in per cent.

    >>> format_share(0.917), format_share(0.0042)
    ('92 %', '0.42 %')
    """
    if share is None or math.isnan(share):
        return NOT_MEASURED
    return f"{100 * share:.0f} %" if not share or abs(share) >= 0.01 else f"{100 * share:.2g} %"


def format_p(p: float | None) -> str:
    """Return a p-value.

    >>> format_p(0.0312), format_p(1e-7), format_p(math.nan)
    ('0.031', '< 0.001', '-')
    """
    if p is None or math.isnan(p):
        return NOT_MEASURED
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def format_interval(value: float, low: float, high: float, sign: str = "") -> str:
    """Return a value with its interval.

    >>> format_interval(0.000123, 0.0001, 0.00015), format_interval(0.5, 0.5, 0.5)
    ('0.000123 [0.0001, 0.00015]', '0.5 [no spread]')
    """
    if is_missing(value):
        return NOT_MEASURED
    form = f"{sign}.4g" if abs(value) < 10_000 else f"{sign},.0f"
    ends = f"{low:{form}}, {high:{form}}" if low < high else NO_SPREAD
    return f"{value:{form}} [{ends}]"
