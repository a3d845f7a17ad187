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
from .synthetic_task import (
    ExampleArrays,
    ModelShape,
    SyntheticTask,
    check_num_examples,
    make_small_translator,
    parse_sizes,
    sum_by_slice,
)
from .task import IGNORE_INDEX, Batch, MetricSums

# A token and what of the meaning it stands for: "y3" is the thousands of a year, "n-1" the tenths of an amount, "unit"
# its currency. Tokens of two languages are translations of each other where they share one.
TokenizedPhrase = list[tuple[str, tuple[str, ...]]]

MONTHS = ("January", "February", "March", "April", "May", "June", "July")
MONTHS += ("August", "September", "October", "November", "December")
CHINESE_DIGITS, CHINESE_YEAR_DIGITS = "零一二三四五六七八九", "〇一二三四五六七八九"
CHINESE_POWERS = ("", "十", "百", "千")


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
    subunit: str


CURRENCIES: Mapping[str, Currency] = {
    "dollars": Currency("USD", "美元", "美分"),
    "euros": Currency("EUR", "欧元", "欧分"),
    "yuan": Currency("CNY", "元", "角分"),
}


def format_english(value: Date | Amount) -> TokenizedPhrase:
    """20 November 2026; 1,234.50 dollars.

    >>> join_tokens(format_english(Date(2026, 11, 20))), join_tokens(format_english(Amount(123450, "dollars")))
    ('20 November 2026', '1,234.50 dollars')
    """
    if isinstance(value, Amount):
        return [*_format_decimal(value.cents, ","), *make_plain_token(" "), (value.currency, ("unit",))]
    month = (MONTHS[value.month - 1], ("m1", "m0"))
    return [
        *_tag_digits(str(value.day), "d"),
        *make_plain_token(" "),
        month,
        *make_plain_token(" "),
        *_tag_digits(str(value.year), "y"),
    ]


def format_iso(value: Date | Amount) -> TokenizedPhrase:
    """2026-11-20 (ISO 8601); USD 1234.50 (codes of ISO 4217).

    >>> join_tokens(format_iso(Date(2026, 1, 2))), join_tokens(format_iso(Amount(5, "yuan")))
    ('2026-01-02', 'CNY 0.05')
    """
    if isinstance(value, Amount):
        return [(CURRENCIES[value.currency].code, ("unit",)), *make_plain_token(" "), *_format_decimal(value.cents, "")]
    month, day = (_tag_digits(f"{number:02d}", letter) for number, letter in ((value.month, "m"), (value.day, "d")))
    return [*_tag_digits(str(value.year), "y"), *make_plain_token("-"), *month, *make_plain_token("-"), *day]


def format_chinese(value: Date | Amount) -> TokenizedPhrase:
    """二〇二六年十一月二十日; 一千二百三十四元五角, 一千二百三十四美元五十美分.

    Years are said digit by digit, as 一九〇七. In amounts, zeros at the end of a number or before 万 are not said, and
    others as one 零, however many; so is a missing 角 between 元 and 分. 十 is 一十 inside a number. 两 stands for 二
    where a number begins with it before 千, 万 or its unit. 角 and 分 go on with the number of 元, while 美分 and 欧分
    begin one of their own.

    >>> join_tokens(format_chinese(Date(2026, 11, 20))), join_tokens(format_chinese(Amount(123450, "yuan")))
    ('二〇二六年十一月二十日', '一千二百三十四元五角')
    >>> join_tokens(format_chinese(Amount(2_000_205, "yuan"))), join_tokens(format_chinese(Amount(20_012, "dollars")))
    ('两万零二元零五分', '二百美元十二美分')
    """
    if isinstance(value, Amount):
        return (
            _format_yuan(value.cents)
            if value.currency == "yuan"
            else _format_units_and_cents(value.cents, CURRENCIES[value.currency])
        )
    year = _spell_digits(str(value.year), "y", digits=CHINESE_YEAR_DIGITS)
    return [
        *year,
        *make_plain_token("年"),
        *format_chinese_numeral(value.month, "m"),
        *make_plain_token("月"),
        *format_chinese_numeral(value.day, "d"),
        *make_plain_token("日"),
    ]


LANGUAGES: Mapping[str, Callable[[Date | Amount], TokenizedPhrase]] = {
    "en": format_english,
    "iso": format_iso,
    "zh": format_chinese,
}


def format_chinese_numeral(number: int, letter: str, last: int = 0) -> TokenizedPhrase:
    """A number from 1 below 10**8 in Chinese; its last digit stands for letter + last.

    >>> [join_tokens(format_chinese_numeral(n, "n")) for n in (10, 110, 1005, 1050, 100_010, 12_000_345)]
    ['十', '一百一十', '一千零五', '一千零五十', '十万零一十', '一千二百万零三百四十五']
    """
    out: TokenizedPhrase = []
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
                out.append((CHINESE_DIGITS[digit], means))
            out += [(CHINESE_POWERS[place % 4], means)] if place % 4 else []
        if place == 4:
            out, zeros = [*out, ("万", means)], ()
    return out


def _use_counting_two(said: TokenizedPhrase) -> TokenizedPhrase:
    """两 where a number that counts something begins with 二 and 千, 万 or nothing follows."""
    if said[0][0] == "二" and (len(said) == 1 or said[1][0] in "千万"):
        return [("两", said[0][1]), *said[1:]]
    return said


def _format_yuan(cents: int) -> TokenizedPhrase:
    whole, (tenths, hundredths) = cents // 100, divmod(cents % 100, 10)
    out = [*_use_counting_two(format_chinese_numeral(whole, "n")), ("元", ("unit",))] if whole else []
    if tenths:
        out += [*_spell_digits(str(tenths), "n", -1), ("角", ("n-1",))]
    elif whole and hundredths:
        out += _spell_digits("0", "n", -1)
    if hundredths:
        out += [*_spell_digits(str(hundredths), "n", -2), ("分", ("n-2",))]
    return out if whole else [*_use_counting_two(out[:1]), *out[1:]]


def _format_units_and_cents(cents: int, currency: Currency) -> TokenizedPhrase:
    whole, rest = divmod(cents, 100)
    out: TokenizedPhrase = []
    for number, last, unit in ((whole, 0, currency.unit), (rest, -2, currency.subunit)):
        if number:
            out += [
                *_use_counting_two(format_chinese_numeral(number, "n", last)),
                *((token, ("unit",)) for token in unit),
            ]
    return out


def _format_decimal(cents: int, comma: str) -> TokenizedPhrase:
    whole = f"{cents // 100:,}" if comma else str(cents // 100)
    places = iter(reversed(range(len(whole) - whole.count(","))))
    said: TokenizedPhrase = [(token, () if token == "," else (f"n{next(places)}",)) for token in whole]
    return [*said, *make_plain_token("."), *_tag_digits(f"{cents % 100:02d}", "n", -2)]


def _tag_digits(text: str, letter: str, last: int = 0) -> TokenizedPhrase:
    return [(digit, (f"{letter}{last + len(text) - 1 - n}",)) for n, digit in enumerate(text)]


def _spell_digits(text: str, letter: str, last: int = 0, digits: str = CHINESE_DIGITS) -> TokenizedPhrase:
    return [(digits[int(digit)], means) for digit, means in _tag_digits(text, letter, last)]


def make_plain_token(token: str) -> TokenizedPhrase:
    """A token that stands for nothing by itself."""
    return [(token, ())]


def join_tokens(phrase: TokenizedPhrase) -> str:
    """As it is written."""
    return "".join(token for token, _ in phrase)


# --- dates ---------------------------------------------------------------------------------------------

SUBJECTS = ("date", "amount")
PAD_ID, BEGIN_ID, END_ID, UNKNOWN_ID = range(4)
SPECIAL_TOKENS = ("<pad>", "<begin>", "<end>", "<unknown>", *(f"<{language}>" for language in LANGUAGES))
TEXT_TOKENS = (*"0123456789 -,.", *MONTHS, *CURRENCIES, *(currency.code for currency in CURRENCIES.values()))
TEXT_TOKENS += (*CHINESE_DIGITS, *"〇两", *CHINESE_POWERS[1:], *"万年月日元角分美欧")
VOCABULARY = (*SPECIAL_TOKENS, *TEXT_TOKENS)
TOKEN_PATTERN = "[A-Za-z]+|[^A-Za-z]"  # a word is one token, and so is any other character


class TranslationAnnotation(NamedTuple):
    """What is known of an example: its subject, the direction ("en-zh"), both texts, and the alignment.

    A link (s, t) says that the token at place t of the labels translates the one at place s of the source.
    """

    subject: str
    direction: str
    source: str
    target: str
    links: tuple[tuple[int, int], ...]


@dataclass(frozen=True, repr=False)
class DateTranslation(SyntheticTask):
    """Dates and amounts, said in one language, wanted in another, which a tag before them names.

    A date is any day of `years`, first and last included. An amount has a number of digits before the point, up to
    `digits`, is rich in zeros, and is one of `currencies`. What is held out is the date, or the amount in whatever
    currency: it occurs in no language of training.

    >>> for one in DateTranslation().batch(0, 3).gold:
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
            _check_choices(knob, getattr(self, knob), known[knob], least)
        years = parse_sizes("years", self.years, 1000)
        if len(years) != 2 or not years[0] <= years[1] <= 9999:
            raise SpecError(f"years={self.years} is no range within 1000 .. 9999; give the first and the last year")
        if check_whole_number("digits", self.digits, 1) > 8:
            raise SpecError(f"digits={self.digits} need words beyond 万; use at most 8")
        for subject in self.subjects:
            check_num_examples(self, self._num_values(subject), "use more years, or more digits")

    def _num_values(self, subject: str) -> int:
        """How many different dates or amounts there are."""
        return self._num_days if subject == "date" else 10 ** (self.digits + 2) - 1

    @property
    def _num_days(self) -> int:
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
        right = [1 / (self._num_values(subject) * ways[subject]) for subject in self.subjects]
        return {"accuracy": 1 / len(VOCABULARY), "exact_match": sum(right) / len(right)}

    def model(self) -> ModelSpec:
        """Two layers each, 128 wide."""
        return make_small_translator(self.name, len(VOCABULARY), ModelShape(width=128, heads=4, layers=2, feed=512))

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        subject = random.choice([SUBJECTS.index(name) for name in self.subjects])
        currency = random.choice([list(CURRENCIES).index(name) for name in self.currencies])
        direction = random.choice(range(len(self.directions)))
        first = int(np.datetime64(f"{self.years[0]}-01-01").astype(np.int64))
        day, cents = first + random.integers(self._num_days, 1)[:, 0], self._draw_cents(random)
        number = np.where(subject == 0, day, cents)
        # A mark for -1 would be that of nothing, and days before 1970 are negative.
        content = np.stack([subject, np.abs(number), number < 0], 1).astype(np.int64)
        told = {"subject": subject, "number": number, "currency": currency, "direction": direction}
        return {"content": content, "fits": (subject == 0) | (cents > 0), **told}

    def _draw_cents(self, draws: RandomStreams) -> np.ndarray:
        """Amounts of 0 .. `digits` digits before the point; of all but the first, one in three is made zero."""
        count = draws.choice(range(self.digits + 1))[:, None]
        places = np.arange(self.digits + 2) - 2
        digit = draws.integers(10, len(places)) * (draws.integers(3, len(places)) > 0)
        leading = 1 + draws.integers(9, 1)
        first = (places == count - 1) & (places >= 0)
        return np.where(first, leading, np.where(places < count, digit, 0)) @ 10 ** np.arange(len(places))

    def to_batch(self, examples: ExampleArrays) -> Batch:
        number = {token: n for n, token in enumerate(VOCABULARY)}
        gold, sources, targets = [], [], []
        for subject, of, currency, direction in zip(
            *(examples[name].tolist() for name in ("subject", "number", "currency", "direction")), strict=True
        ):
            one = Amount(of, list(CURRENCIES)[currency]) if subject else date_of_day_number(of)
            source, target = self.directions[direction]
            said, wanted = LANGUAGES[source](one), LANGUAGES[target](one)
            known = (
                SUBJECTS[subject],
                f"{source}-{target}",
                join_tokens(said),
                join_tokens(wanted),
                align_tokens(said, wanted),
            )
            gold.append(TranslationAnnotation(*known))
            sources.append([number[f"<{target}>"], *(number[token] for token, _ in said)])
            targets.append([number[token] for token, _ in wanted])
        source, source_tokens = _pad_rows(sources, PAD_ID)
        labels, _ = _pad_rows([[*row, END_ID] for row in targets], IGNORE_INDEX)
        x, tokens = _pad_rows([[BEGIN_ID, *row] for row in targets], PAD_ID)
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
        return END_ID

    def score(self, generated: Sequence[Sequence[int]], batch: Batch) -> MetricSums:
        """How often the whole answer is right, by direction and by subject."""
        wanted = [[token for token in row if token not in (END_ID, IGNORE_INDEX)] for row in batch.labels.tolist()]
        right = torch.tensor([list(said) == want for said, want in zip(generated, wanted, strict=True)])
        names = {one.direction for one in batch.gold} | {one.subject for one in batch.gold}
        slices = {
            name: torch.tensor([name in (one.direction, one.subject) for one in batch.gold]) for name in sorted(names)
        }
        return sum_by_slice("exact_match", right, torch.ones_like(right), slices)

    @property
    def tokenizer(self) -> str:
        """Splits what is typed, such as "<zh>20 November 2026", into the tokens of this task."""
        return json.dumps(_make_tokenizer(), ensure_ascii=False)

    @property
    def usage(self) -> ProcessorSpec:
        """A tag that is typed is the token; every answer begins and ends."""
        return ProcessorSpec(begin=(BEGIN_ID,), end=(END_ID,), specials="read", tokenizer=self.tokenizer)

    def text(self, ids: Iterable[int]) -> str:
        """As it is written, tags included, without what begins, ends and fills rows."""
        return "".join(VOCABULARY[one] for one in ids if one not in (PAD_ID, BEGIN_ID, END_ID, IGNORE_INDEX))


def date_of_day_number(number: int) -> Date:
    """The day so many days after 1 January 1970.

    >>> date_of_day_number(0), date_of_day_number(-1)
    (Date(year=1970, month=1, day=1), Date(year=1969, month=12, day=31))
    """
    return Date(*map(int, str(np.datetime64(number, "D")).split("-")))


def align_tokens(source: TokenizedPhrase, target: TokenizedPhrase) -> tuple[tuple[int, int], ...]:
    """Which tokens stand for the same: (place in the source behind its tag, place in the target).

    >>> align_tokens([("November", ("m1", "m0"))], [("-", ()), ("1", ("m1",)), ("1", ("m0",))])
    ((1, 1), (1, 2))
    """
    found: dict[str, list[int]] = {}
    for place, (_, means) in enumerate(source, 1):
        for mean in means:
            found.setdefault(mean, []).append(place)
    pairs = [(s, t) for t, (_, means) in enumerate(target) for mean in means for s in found.get(mean, ())]
    return tuple(dict.fromkeys(pairs))


def _pad_rows(rows: list[list[int]], fill: int) -> tuple[Tensor, SequenceInfo | None]:
    """Rows side by side, and their tokens where they differ in length."""
    lengths = [len(row) for row in rows]
    out = torch.tensor([row + [fill] * (max(lengths) - len(row)) for row in rows])
    return out, None if min(lengths) == max(lengths) else SequenceInfo.from_batch(out, lengths=lengths)


def _make_tokenizer() -> dict[str, object]:
    own = {"single_word": False, "lstrip": False, "rstrip": True, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": n, "content": token, **own} for n, token in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": TOKEN_PATTERN},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {token: n for n, token in enumerate(VOCABULARY)},
            "unk_token": SPECIAL_TOKENS[UNKNOWN_ID],
        },
    }


def _check_choices(option: str, words: tuple[str, ...], known: Iterable[str], minimum: int) -> None:
    """Refuse what is unknown, said twice, or too few."""
    known = tuple(known)
    for word in words:
        if word not in known:
            raise SpecError(f"{option}={words!r} holds {word!r}; {suggest(str(word), known)}")
    if len(set(words)) != len(words) or len(words) < minimum:
        raise SpecError(f"{option}={words!r} must name {minimum} or more, each once; use some of {', '.join(known)}")
