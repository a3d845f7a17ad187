"""Dates and amounts of money in words of three languages, each token with what it stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

# A token and what of the meaning it stands for: "y3" is the thousands of a year, "n-1" the tenths of an amount, "unit"
# its currency. Tokens of two languages are translations of each other where they share one.
Said = list[tuple[str, tuple[str, ...]]]

MONTHS = ("January", "February", "March", "April", "May", "June", "July")
MONTHS += ("August", "September", "October", "November", "December")
DIGITS, OF_YEARS = "零一二三四五六七八九", "〇一二三四五六七八九"
POWERS = ("", "十", "百", "千")


class Date(NamedTuple):
    """A day."""

    year: int
    month: int
    day: int


class Amount(NamedTuple):
    """So many hundredths of a currency."""

    cents: int
    currency: str


class Currency(NamedTuple):
    """Its code (ISO 4217), and in Chinese its name and that of its hundredth; the yuan's are tenths and hundredths."""

    code: str
    unit: str
    small: str


CURRENCIES: Mapping[str, Currency] = {
    "dollars": Currency("USD", "美元", "美分"),
    "euros": Currency("EUR", "欧元", "欧分"),
    "yuan": Currency("CNY", "元", "角分"),
}


def english(one: Date | Amount) -> Said:
    """20 November 2026; 1,234.50 dollars.

    >>> joined(english(Date(2026, 11, 20))), joined(english(Amount(123450, "dollars")))
    ('20 November 2026', '1,234.50 dollars')
    """
    if isinstance(one, Amount):
        return [*_decimal(one.cents, ","), *plain(" "), (one.currency, ("unit",))]
    month = (MONTHS[one.month - 1], ("m1", "m0"))
    return [*_digits(str(one.day), "d"), *plain(" "), month, *plain(" "), *_digits(str(one.year), "y")]


def iso(one: Date | Amount) -> Said:
    """2026-11-20 (ISO 8601); USD 1234.50 (codes of ISO 4217).

    >>> joined(iso(Date(2026, 1, 2))), joined(iso(Amount(5, "yuan")))
    ('2026-01-02', 'CNY 0.05')
    """
    if isinstance(one, Amount):
        return [(CURRENCIES[one.currency].code, ("unit",)), *plain(" "), *_decimal(one.cents, "")]
    month, day = (_digits(f"{number:02d}", letter) for number, letter in ((one.month, "m"), (one.day, "d")))
    return [*_digits(str(one.year), "y"), *plain("-"), *month, *plain("-"), *day]


def chinese(one: Date | Amount) -> Said:
    """二〇二六年十一月二十日; 一千二百三十四元五角, 一千二百三十四美元五十美分.

    Years are said digit by digit, as 一九〇七. In amounts, zeros at the end of a number or before 万 are not said, and
    others as one 零, however many; so is a missing 角 between 元 and 分. 十 is 一十 inside a number. 两 stands for 二
    where a number begins with it before 千, 万 or its unit. 角 and 分 go on with the number of 元, while 美分 and 欧分
    begin one of their own.

    >>> joined(chinese(Date(2026, 11, 20))), joined(chinese(Amount(123450, "yuan")))
    ('二〇二六年十一月二十日', '一千二百三十四元五角')
    >>> joined(chinese(Amount(2_000_205, "yuan"))), joined(chinese(Amount(20_012, "dollars")))
    ('两万零二元零五分', '二百美元十二美分')
    """
    if isinstance(one, Amount):
        return _yuan(one.cents) if one.currency == "yuan" else _western(one.cents, CURRENCIES[one.currency])
    year = _spelt(str(one.year), "y", digits=OF_YEARS)
    return [*year, *plain("年"), *numeral(one.month, "m"), *plain("月"), *numeral(one.day, "d"), *plain("日")]


LANGUAGES: Mapping[str, Callable[[Date | Amount], Said]] = {"en": english, "iso": iso, "zh": chinese}


def numeral(number: int, letter: str, last: int = 0) -> Said:
    """A number from 1 below 10**8 in Chinese; its last digit stands for letter + last.

    >>> [joined(numeral(n, "n")) for n in (10, 110, 1005, 1050, 100_010, 12_000_345)]
    ['十', '一百一十', '一千零五', '一千零五十', '十万零一十', '一千二百万零三百四十五']
    """
    out: Said = []
    zeros: tuple[str, ...] = ()
    digits = [int(digit) for digit in str(number)]
    for place, digit in zip(reversed(range(len(digits))), digits, strict=True):
        means = (f"{letter}{place + last}",)
        if digit == 0:
            zeros += means
        else:
            out += [("零", zeros)] if zeros else []
            zeros = ()
            if out or digit > 1 or place % 4 != 1:
                out.append((DIGITS[digit], means))
            out += [(POWERS[place % 4], means)] if place % 4 else []
        if place == 4:
            out, zeros = [*out, ("万", means)], ()
    return out


def _counted(said: Said) -> Said:
    """两 where a number that counts something begins with 二 and 千, 万 or nothing follows."""
    if said[0][0] == "二" and (len(said) == 1 or said[1][0] in "千万"):
        return [("两", said[0][1]), *said[1:]]
    return said


def _yuan(cents: int) -> Said:
    whole, (tenths, hundredths) = cents // 100, divmod(cents % 100, 10)
    out = [*_counted(numeral(whole, "n")), ("元", ("unit",))] if whole else []
    if tenths:
        out += [*_spelt(str(tenths), "n", -1), ("角", ("n-1",))]
    elif whole and hundredths:
        out += _spelt("0", "n", -1)
    if hundredths:
        out += [*_spelt(str(hundredths), "n", -2), ("分", ("n-2",))]
    return out if whole else [*_counted(out[:1]), *out[1:]]


def _western(cents: int, currency: Currency) -> Said:
    whole, rest = divmod(cents, 100)
    out: Said = []
    for number, last, unit in ((whole, 0, currency.unit), (rest, -2, currency.small)):
        if number:
            out += [*_counted(numeral(number, "n", last)), *((token, ("unit",)) for token in unit)]
    return out


def _decimal(cents: int, comma: str) -> Said:
    whole = f"{cents // 100:,}" if comma else str(cents // 100)
    places = iter(reversed(range(len(whole) - whole.count(","))))
    said: Said = [(token, () if token == "," else (f"n{next(places)}",)) for token in whole]
    return [*said, *plain("."), *_digits(f"{cents % 100:02d}", "n", -2)]


def _digits(text: str, letter: str, last: int = 0) -> Said:
    return [(digit, (f"{letter}{last + len(text) - 1 - n}",)) for n, digit in enumerate(text)]


def _spelt(text: str, letter: str, last: int = 0, digits: str = DIGITS) -> Said:
    return [(digits[int(digit)], means) for digit, means in _digits(text, letter, last)]


def plain(token: str) -> Said:
    """A token that stands for nothing by itself."""
    return [(token, ())]


def joined(said: Said) -> str:
    """As it is written."""
    return "".join(token for token, _ in said)
