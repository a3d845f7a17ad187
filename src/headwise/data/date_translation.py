"""Dates and amounts of money in words of three languages, each token with what it stands for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError, suggest
from ..masking.pattern_base import check_whole_number
from ..masking.sequence_info import SequenceInfo
from ..model_spec import ModelSpec, ProcessorSpec
from ..ops.counter_rng import RandomStreams
from .synthetic_task import Drawn, Generated, Shape, check_space, options, tallied, translator
from .task import IGNORED, Batch, Tally

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


# SECTION: dates: translation of dates and amounts of money between English, ISO and Chinese.

SUBJECTS = ("date", "amount")
PAD, BEGIN, END, UNKNOWN = range(4)
SPECIAL = ("<pad>", "<begin>", "<end>", "<unknown>", *(f"<{language}>" for language in LANGUAGES))
WORDS = (*"0123456789 -,.", *MONTHS, *CURRENCIES, *(currency.code for currency in CURRENCIES.values()))
WORDS += (*DIGITS, *"〇两", *POWERS[1:], *"万年月日元角分美欧")
VOCABULARY = (*SPECIAL, *WORDS)
PIECES = "[A-Za-z]+|[^A-Za-z]"  # a word is one token, and so is any other character


class Translated(NamedTuple):
    """What is known of an example: its subject, the direction ("en-zh"), both texts, and the alignment.

    A link (s, t) says that the token at place t of the labels translates the one at place s of the source.
    """

    subject: str
    direction: str
    source: str
    target: str
    links: tuple[tuple[int, int], ...]


@dataclass(frozen=True, repr=False)
class Dates(Generated):
    """Dates and amounts, said in one language, wanted in another, which a tag before them names.

    A date is any day of `years`, first and last included. An amount has a number of digits before the point, up to
    `digits`, is rich in zeros, and is one of `currencies`. What is held out is the date, or the amount in whatever
    currency: it occurs in no language of training.

    >>> for one in Dates().batch(0, 3).gold:
    ...     print(one.direction, one.source, "->", one.target)
    en-iso 22 June 2057 -> 2057-06-22
    zh-en 八千零九十元三角 -> 8,090.30 yuan
    zh-iso 一九四三年十月十七日 -> 1943-10-17
    """

    name: ClassVar[str] = "dates"
    subjects: tuple[str, ...] = SUBJECTS
    languages: tuple[str, ...] = tuple(LANGUAGES)
    years: tuple[int, ...] = (1900, 2099)
    digits: int = 5
    currencies: tuple[str, ...] = tuple(CURRENCIES)

    def __post_init__(self) -> None:
        super().__post_init__()
        known = {"subjects": SUBJECTS, "languages": LANGUAGES, "currencies": CURRENCIES}
        for knob, least in {"subjects": 1, "languages": 2, "currencies": 1}.items():
            _check_words(knob, getattr(self, knob), known[knob], least)
        years = options("years", self.years, 1000)
        if len(years) != 2 or not years[0] <= years[1] <= 9999:
            raise SpecError(f"years={self.years} is no range within 1000 .. 9999; give the first and the last year")
        if check_whole_number("digits", self.digits, 1) > 8:
            raise SpecError(f"digits={self.digits} need words beyond 万; use at most 8")
        for subject in self.subjects:
            check_space(self, self._count(subject), "use more years, or more digits")

    def _count(self, subject: str) -> int:
        """How many different dates or amounts there are."""
        return self._days if subject == "date" else 10 ** (self.digits + 2) - 1

    @property
    def _days(self) -> int:
        first, last = np.datetime64(f"{self.years[0]}-01-01"), np.datetime64(f"{self.years[1]}-12-31")
        return int((last - first).astype(np.int64)) + 1

    @property
    def directions(self) -> tuple[tuple[str, str], ...]:
        """From which language to which."""
        return tuple((a, b) for a in self.languages for b in self.languages if a != b)

    @property
    def chance(self) -> Mapping[str, float]:
        """Any token; as a whole, any date or amount of the right subject, well written in the right language."""
        ways = {"date": 1, "amount": len(self.currencies)}
        right = [1 / (self._count(subject) * ways[subject]) for subject in self.subjects]
        return {"accuracy": 1 / len(VOCABULARY), "exact_match": sum(right) / len(right)}

    def model(self) -> ModelSpec:
        """Two layers each, 128 wide."""
        return translator(self.name, len(VOCABULARY), Shape(width=128, heads=4, layers=2, feed=512))

    def draw(self, draws: RandomStreams) -> Drawn:
        subject = draws.choice([SUBJECTS.index(name) for name in self.subjects])
        currency = draws.choice([list(CURRENCIES).index(name) for name in self.currencies])
        direction = draws.choice(range(len(self.directions)))
        first = int(np.datetime64(f"{self.years[0]}-01-01").astype(np.int64))
        day, cents = first + draws.integers(self._days, 1)[:, 0], self._cents(draws)
        number = np.where(subject == 0, day, cents)
        # A mark for -1 would be that of nothing, and days before 1970 are negative.
        content = np.stack([subject, np.abs(number), number < 0], 1).astype(np.int64)
        told = {"subject": subject, "number": number, "currency": currency, "direction": direction}
        return {"content": content, "fits": (subject == 0) | (cents > 0), **told}

    def _cents(self, draws: RandomStreams) -> np.ndarray:
        """Amounts of 0 .. `digits` digits before the point; of all but the first, one in three is made zero."""
        count = draws.choice(range(self.digits + 1))[:, None]
        places = np.arange(self.digits + 2) - 2
        digit = draws.integers(10, len(places)) * (draws.integers(3, len(places)) > 0)
        leading = 1 + draws.integers(9, 1)
        first = (places == count - 1) & (places >= 0)
        return np.where(first, leading, np.where(places < count, digit, 0)) @ 10 ** np.arange(len(places))

    def show(self, drawn: Drawn) -> Batch:
        number = {token: n for n, token in enumerate(VOCABULARY)}
        gold, sources, targets = [], [], []
        for subject, of, currency, direction in zip(
            *(drawn[name].tolist() for name in ("subject", "number", "currency", "direction")), strict=True
        ):
            one = Amount(of, list(CURRENCIES)[currency]) if subject else day_of(of)
            source, target = self.directions[direction]
            said, wanted = LANGUAGES[source](one), LANGUAGES[target](one)
            known = (SUBJECTS[subject], f"{source}-{target}", joined(said), joined(wanted), links(said, wanted))
            gold.append(Translated(*known))
            sources.append([number[f"<{target}>"], *(number[token] for token, _ in said)])
            targets.append([number[token] for token, _ in wanted])
        source, source_tokens = _padded(sources, PAD)
        labels, _ = _padded([[*row, END] for row in targets], IGNORED)
        x, tokens = _padded([[BEGIN, *row] for row in targets], PAD)
        return Batch(x, labels, tokens=tokens, source=source, source_tokens=source_tokens, gold=gold)

    def prompt(self, batch: Batch) -> tuple[Tensor, SequenceInfo | None]:
        """The token that begins every answer."""
        return batch.x[:, :1], None

    @property
    def answers(self) -> int:
        """As long as 二〇二七年十二月二十七日, or as nines, a unit and nine-and-ninety hundredths; and the end."""
        return max(13, 2 * self.digits + 7)

    @property
    def end(self) -> int:
        """What stands behind every answer."""
        return END

    def score(self, generated: Sequence[Sequence[int]], batch: Batch) -> Tally:
        """How often the whole answer is right, by direction and by subject."""
        wanted = [[token for token in row if token not in (END, IGNORED)] for row in batch.labels.tolist()]
        right = torch.tensor([list(said) == want for said, want in zip(generated, wanted, strict=True)])
        names = {one.direction for one in batch.gold} | {one.subject for one in batch.gold}
        slices = {
            name: torch.tensor([name in (one.direction, one.subject) for one in batch.gold]) for name in sorted(names)
        }
        return tallied("exact_match", right, torch.ones_like(right), slices)

    @property
    def tokenizer(self) -> str:
        """Splits what is typed, such as "<zh>20 November 2026", into the tokens of this task."""
        return json.dumps(_tokenizer(), ensure_ascii=False)

    @property
    def usage(self) -> ProcessorSpec:
        """A tag that is typed is the token; every answer begins and ends."""
        return ProcessorSpec(begin=(BEGIN,), end=(END,), specials="read", tokenizer=self.tokenizer)

    def text(self, ids: Iterable[int]) -> str:
        """As it is written, tags included, without what begins, ends and fills rows."""
        return "".join(VOCABULARY[one] for one in ids if one not in (PAD, BEGIN, END, IGNORED))


def day_of(number: int) -> Date:
    """The day so many days after 1 January 1970.

    >>> day_of(0), day_of(-1)
    (Date(year=1970, month=1, day=1), Date(year=1969, month=12, day=31))
    """
    return Date(*map(int, str(np.datetime64(number, "D")).split("-")))


def links(source: Said, target: Said) -> tuple[tuple[int, int], ...]:
    """Which tokens stand for the same: (place in the source behind its tag, place in the target).

    >>> links([("November", ("m1", "m0"))], [("-", ()), ("1", ("m1",)), ("1", ("m0",))])
    ((1, 1), (1, 2))
    """
    found: dict[str, list[int]] = {}
    for place, (_, means) in enumerate(source, 1):
        for mean in means:
            found.setdefault(mean, []).append(place)
    pairs = [(s, t) for t, (_, means) in enumerate(target) for mean in means for s in found.get(mean, ())]
    return tuple(dict.fromkeys(pairs))


def _padded(rows: list[list[int]], fill: int) -> tuple[Tensor, SequenceInfo | None]:
    """Rows side by side, and their tokens where they differ in length."""
    lengths = [len(row) for row in rows]
    out = torch.tensor([row + [fill] * (max(lengths) - len(row)) for row in rows])
    return out, None if min(lengths) == max(lengths) else SequenceInfo.from_batch(out, lengths=lengths)


def _tokenizer() -> dict[str, object]:
    own = {"single_word": False, "lstrip": False, "rstrip": True, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": n, "content": token, **own} for n, token in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": PIECES}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {token: n for n, token in enumerate(VOCABULARY)},
            "unk_token": SPECIAL[UNKNOWN],
        },
    }


def _check_words(knob: str, words: tuple[str, ...], known: Iterable[str], least: int) -> None:
    """Refuse what is unknown, said twice, or too few."""
    known = tuple(known)
    for word in words:
        if word not in known:
            raise SpecError(f"{knob}={words!r} holds {word!r}; {suggest(str(word), known)}")
    if len(set(words)) != len(words) or len(words) < least:
        raise SpecError(f"{knob}={words!r} must name {least} or more, each once; use some of {', '.join(known)}")
