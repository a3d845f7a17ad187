"""The task "dates": translate dates and amounts of money between English, ISO
notation and Chinese.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer as SubwordTokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor

from ...attention.masking.sequence_info import SequenceInfo
from ...kernels.counter_rng import RandomStreams
from ...models.batch import IGNORE_INDEX, Batch
from ...models.model_spec import ModelSpec, ProcessorSpec
from ...util.errors import SpecError, suggest
from .synthetic_task import (
    ExampleArrays,
    ModelShape,
    Ranges,
    SyntheticTask,
    make_small_translator,
    parse_sizes,
    sum_by_slice,
)
from .task import MetricSums

# --- Writing dates and amounts --------------------------------------------------------------------

# Tokens, each with the parts of the meaning that it expresses: "y3" is the thousands digit of a
# year, "n-1" the tenths of an amount, "unit" its currency. Tokens of two languages are aligned if
# they share a part.
TokenizedPhrase = list[tuple[str, tuple[str, ...]]]

MONTHS = ("January", "February", "March", "April", "May", "June", "July")
MONTHS += ("August", "September", "October", "November", "December")
CHINESE_DIGITS = "零一二三四五六七八九"
CHINESE_YEAR_DIGITS = "〇一二三四五六七八九"
CHINESE_POWERS = ("", "十", "百", "千")


class Date(NamedTuple):
    """A date of the Gregorian calendar."""

    year: int
    month: int
    day: int


class Amount(NamedTuple):
    """An amount of money in hundredths of a currency."""

    cents: int
    currency: str


# ISO 4217 code, and the Chinese names of the unit and of its hundredth (of the yuan: tenth and
# hundredth).
CURRENCIES = {
    "dollars": ("USD", "美元", "美分"),
    "euros": ("EUR", "欧元", "欧分"),
    "yuan": ("CNY", "元", "角分"),
}


def format_english(value: Date | Amount) -> TokenizedPhrase:
    """English, as in "20 November 2026" and "1,234.50 dollars".

    >>> join_tokens(format_english(Amount(123450, "dollars")))
    '1,234.50 dollars'
    """
    if isinstance(value, Amount):
        return [*_format_decimal(value.cents, ","), (" ", ()), (value.currency, ("unit",))]
    month = (MONTHS[value.month - 1], ("m1", "m0"))
    day = _tag_digits(str(value.day), "d")
    return [*day, (" ", ()), month, (" ", ()), *_tag_digits(str(value.year), "y")]


def format_iso(value: Date | Amount) -> TokenizedPhrase:
    """ISO notation, as in "2026-11-20" (ISO 8601) and "USD 1234.50" (ISO 4217).

    >>> join_tokens(format_iso(Date(2026, 1, 2))), join_tokens(format_iso(Amount(5, "yuan")))
    ('2026-01-02', 'CNY 0.05')
    """
    if isinstance(value, Amount):
        return [
            (CURRENCIES[value.currency][0], ("unit",)),
            (" ", ()),
            *_format_decimal(value.cents, ""),
        ]
    month = _tag_digits(f"{value.month:02d}", "m")
    day = _tag_digits(f"{value.day:02d}", "d")
    return [*_tag_digits(str(value.year), "y"), ("-", ()), *month, ("-", ()), *day]


def format_chinese(value: Date | Amount) -> TokenizedPhrase:
    """Chinese, as in "二〇二六年十一月二十日", "一千二百三十四元五角" and "一千二百三十四美元五十美分".

    Years are written digit by digit, as in 一九〇七. In amounts, zeros at the end of a number or before
    万 are omitted, and any other run of zeros is a single 零; so is a missing 角 between 元 and 分. 十 is
    written 一十 inside a number. 两 replaces 二 at the start of a number before 千, 万 or the unit. 角 and
    分 continue the number of 元; 美分 and 欧分 have a separate number.

    >>> join_tokens(format_chinese(Amount(2_000_205, "yuan")))
    '两万零二元零五分'
    """
    if isinstance(value, Date):
        year = _spell_digits(str(value.year), "y", digits=CHINESE_YEAR_DIGITS)
        month = format_chinese_numeral(value.month, "m")
        day = format_chinese_numeral(value.day, "d")
        return [*year, ("年", ()), *month, ("月", ()), *day, ("日", ())]
    units, hundredths = divmod(value.cents, 100)
    number = _count(units, 0)
    if value.currency != "yuan":
        _, unit, subunit = CURRENCIES[value.currency]
        cents = _count(hundredths, -2)
        return [*_name_unit(number, unit), *_name_unit(cents, subunit)]
    tenth, hundredth = divmod(hundredths, 10)
    out = [*number, ("元", ("unit",))] if units else []
    if tenth:
        out += [*_spell_digits(str(tenth), "n", -1), ("角", ("n-1",))]
    elif units and hundredth:
        out += _spell_digits("0", "n", -1)
    if hundredth:
        out += [*_spell_digits(str(hundredth), "n", -2), ("分", ("n-2",))]
    return out if units else [*_use_counting_two(out[:1]), *out[1:]]


LANGUAGES: Mapping[str, Callable[[Date | Amount], TokenizedPhrase]] = {
    "en": format_english,
    "iso": format_iso,
    "zh": format_chinese,
}


def format_chinese_numeral(number: int, letter: str, last: int = 0) -> TokenizedPhrase:
    """Format an integer from 1 to 10**8 - 1 as a Chinese numeral; its last digit expresses the part
    f"{letter}{last}".

    >>> [join_tokens(format_chinese_numeral(n, "n")) for n in (10, 1005, 1050, 12_000_345)]
    ['十', '一千零五', '一千零五十', '一千二百万零三百四十五']
    """
    out: TokenizedPhrase = []
    zeros: tuple[str, ...] = ()
    digits = str(number)
    for place, digit in zip(reversed(range(len(digits))), map(int, digits), strict=True):
        parts = (f"{letter}{place + last}",)
        if digit == 0:
            zeros += parts
        else:
            if zeros:
                out.append(("零", zeros))
                zeros = ()
            if out or digit > 1 or place % 4 != 1:
                out.append((CHINESE_DIGITS[digit], parts))
            if place % 4:
                out.append((CHINESE_POWERS[place % 4], parts))
        if place == 4:
            out.append(("万", parts))
            zeros = ()
    return out


def _count(number: int, last: int) -> TokenizedPhrase:
    """Format a number of units; empty for 0."""
    return _use_counting_two(format_chinese_numeral(number, "n", last)) if number else []


def _use_counting_two(numeral: TokenizedPhrase) -> TokenizedPhrase:
    """Write an initial 二 as 两 if 千, 万 or nothing follows, as Chinese does when counting."""
    if numeral[0][0] == "二" and (len(numeral) == 1 or numeral[1][0] in "千万"):
        return [("两", numeral[0][1]), *numeral[1:]]
    return numeral


def _name_unit(numeral: TokenizedPhrase, unit: str) -> TokenizedPhrase:
    return [*numeral, *((token, ("unit",)) for token in unit)] if numeral else []


def _format_decimal(cents: int, comma: str) -> TokenizedPhrase:
    integer: TokenizedPhrase = []
    place = 0
    for token in reversed(f"{cents // 100:{comma}}"):
        integer.insert(0, (token, () if token == "," else (f"n{place}",)))
        place += token != ","
    return [*integer, (".", ()), *_tag_digits(f"{cents % 100:02d}", "n", -2)]


def _tag_digits(text: str, letter: str, last: int = 0) -> TokenizedPhrase:
    return [(digit, (f"{letter}{last + len(text) - 1 - n}",)) for n, digit in enumerate(text)]


def _spell_digits(
    text: str, letter: str, last: int = 0, digits: str = CHINESE_DIGITS
) -> TokenizedPhrase:
    return [(digits[int(digit)], parts) for digit, parts in _tag_digits(text, letter, last)]


def join_tokens(phrase: TokenizedPhrase) -> str:
    """Join the text of a phrase."""
    return "".join(token for token, _ in phrase)


# --- The task -------------------------------------------------------------------------------------

SUBJECTS = ("date", "amount")
PAD_ID, BEGIN_ID, END_ID, UNKNOWN_ID = range(4)
TAGS = {language: f"<{language}>" for language in LANGUAGES}
SPECIAL_TOKENS = ("<pad>", "<begin>", "<end>", "<unknown>", *TAGS.values())
CODES = [code for code, _, _ in CURRENCIES.values()]
TEXT_TOKENS = (*"0123456789 -,.", *MONTHS, *CURRENCIES, *CODES)
TEXT_TOKENS += (*CHINESE_DIGITS, *"〇两", *CHINESE_POWERS[1:], *"万年月日元角分美欧")
VOCABULARY = (*SPECIAL_TOKENS, *TEXT_TOKENS)
ID_OF_TOKEN = {token: n for n, token in enumerate(VOCABULARY)}
# Tokens are words of Latin letters, and single other characters.
TOKEN_PATTERN = "[A-Za-z]+|[^A-Za-z]"


class TranslationAnnotation(NamedTuple):
    """Annotation of an example: its subject, the direction such as "en-zh", both texts, and the
    alignment.

    A link (s, t) means that token t of the labels translates token s of the source.
    """

    subject: str
    direction: str
    source: str
    target: str
    links: tuple[tuple[int, int], ...]


@dataclass(frozen=True, repr=False)
class DateTranslation(SyntheticTask):
    """Translate dates and amounts of money; a tag before the source names the target language.

    Dates are drawn from `years` = (first, last), both included. Amounts have at most `digits`
    digits before the point, contain many zeros, and are in one of `currencies`. A held-out date or
    number does not occur in training in any language or currency.

    >>> for example in DateTranslation().batch(0, 3).gold:
    ...     print(example.direction, example.source, "->", example.target)
    en-iso 22 June 2057 -> 2057-06-22
    zh-en 八千零九十元三角 -> 8,090.30 yuan
    zh-iso 一九四三年十月十七日 -> 1943-10-17
    """

    name: ClassVar[str] = "dates"
    shape = ModelShape(width=128, heads=4, layers=2, feed=512)
    ranges: ClassVar[Ranges] = {"digits": (1, 8)}  # Chinese numerals beyond 万 are missing
    subjects: tuple[str, ...] = SUBJECTS
    languages: tuple[str, ...] = tuple(LANGUAGES)
    years: tuple[int, ...] = (1900, 2099)
    digits: int = 5
    currencies: tuple[str, ...] = tuple(CURRENCIES)

    def __post_init__(self) -> None:
        super().__post_init__()
        choices = {"subjects": SUBJECTS, "languages": LANGUAGES, "currencies": CURRENCIES}
        for option, allowed in choices.items():
            _check_choices(option, getattr(self, option), allowed, 1 + (option == "languages"))
        years = parse_sizes("years", self.years, 1000)
        if len(years) != 2 or not years[0] <= years[1] <= 9999:
            raise SpecError(
                f"years={self.years} must be the first and the last year, from 1000 to 9999; use "
                "years=(1900, 2099)"
            )
        count = min(map(self._num_values, self.subjects))
        self.check_extent(self.answers, count, "use more years, or more digits")

    def _num_values(self, subject: str) -> int:
        """Count different dates, or different numbers in an amount."""
        return self._num_days if subject == "date" else 10 ** (self.digits + 2) - 1

    @property
    def _num_days(self) -> int:
        return int(np.datetime64(f"{self.years[1] + 1}-01-01").astype(np.int64)) - self._first_day

    @property
    def _first_day(self) -> int:
        """Days from 1970 to the first date."""
        return int(np.datetime64(f"{self.years[0]}-01-01").astype(np.int64))

    @property
    def directions(self) -> tuple[tuple[str, str], ...]:
        """All pairs (source language, target language)."""
        return tuple(permutations(self.languages, 2))

    @property
    def num_ids(self) -> int:
        return len(VOCABULARY)

    @property
    def chance(self) -> Mapping[str, float]:
        """Accuracy of guessing any token; exact match of guessing any well-formed date or amount as
        required.
        """
        num_units = {"date": 1, "amount": len(self.currencies)}
        counts = [self._num_values(subject) * num_units[subject] for subject in self.subjects]
        exact_match = sum(1 / count for count in counts) / len(counts)
        return {"accuracy": 1 / len(VOCABULARY), "exact_match": exact_match}

    def model(self) -> ModelSpec:
        """Encoder and decoder of two layers each, with 128 channels."""
        return make_small_translator(self.name, self.num_ids, self.shape)

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        subject = random.choice([SUBJECTS.index(name) for name in self.subjects])
        currency = random.choice([list(CURRENCIES).index(name) for name in self.currencies])
        direction = random.choice(range(len(self.directions)))
        day = self._first_day + random.integers(self._num_days, 1)[:, 0]
        cents = self._draw_cents(random)
        number = np.where(subject == 0, day, cents)
        # Days before 1970 are negative. The sign is a separate column, because -1 means padding
        # in "content".
        content = np.stack([subject, np.abs(number), number < 0], 1).astype(np.int64)
        meaning = np.stack([subject, number, currency, direction], 1)
        return {"content": content, "fits": (subject == 0) | (cents > 0), "meaning": meaning}

    def _draw_cents(self, random: RandomStreams) -> np.ndarray:
        """Amounts with 0 to `digits` digits before the point; a third of all digits but the first
        is set to zero.
        """
        count = random.choice(range(self.digits + 1))[:, None]
        places = np.arange(self.digits + 2) - 2
        digit = random.integers(10, len(places)) * (random.integers(3, len(places)) > 0)
        leading = 1 + random.integers(9, 1)
        first = (places == count - 1) & (places >= 0)
        digits = np.where(first, leading, np.where(places < count, digit, 0))
        return digits @ 10 ** np.arange(len(places))

    def to_batch(self, examples: ExampleArrays) -> Batch:
        gold: list[TranslationAnnotation] = []
        sources: list[list[int]] = []
        targets: list[list[int]] = []
        for subject, number, currency, direction in examples["meaning"].tolist():
            value = Date(*map(int, str(np.datetime64(number, "D")).split("-")))
            if subject:
                value = Amount(number, list(CURRENCIES)[currency])
            source_language, target_language = self.directions[direction]
            source = LANGUAGES[source_language](value)
            target = LANGUAGES[target_language](value)
            annotation = TranslationAnnotation(
                SUBJECTS[subject],
                f"{source_language}-{target_language}",
                join_tokens(source),
                join_tokens(target),
                align_tokens(source, target),
            )
            gold.append(annotation)
            tag = ID_OF_TOKEN[TAGS[target_language]]
            sources.append([tag, *(ID_OF_TOKEN[token] for token, _ in source)])
            targets.append([ID_OF_TOKEN[token] for token, _ in target])
        source_ids, source_tokens = _pad_rows(sources, PAD_ID)
        labels, _ = _pad_rows([[*row, END_ID] for row in targets], IGNORE_INDEX)
        x, tokens = _pad_rows([[BEGIN_ID, *row] for row in targets], PAD_ID)
        return Batch(x, labels, tokens, source_ids, source_tokens, gold)

    def prompt(self, batch: Batch) -> tuple[Tensor, SequenceInfo | None]:
        """Return the start token of every answer."""
        return batch.x[:, :1], None

    @property
    def answers(self) -> int:
        """Length of the longest answer with its end token: 二〇二七年十二月二十七日, or a Chinese amount of
        nines.
        """
        return max(13, 2 * self.digits + 7)

    @property
    def end(self) -> int:
        """Id of the token that ends every answer."""
        return END_ID

    def score(self, generated: Sequence[Sequence[int]], batch: Batch) -> MetricSums:
        """Exact match of whole answers, overall, by direction and by subject."""
        correct: list[bool] = []
        for answer, labels in zip(generated, batch.labels.tolist(), strict=True):
            reference = [token for token in labels if token not in (END_ID, IGNORE_INDEX)]
            correct.append(list(answer) == reference)
        names: list[str] = []
        for example in batch.gold:
            names += (example.direction, example.subject)
        slices: dict[str, Tensor] = {}
        for name in sorted(set(names)):
            slices[name] = torch.tensor([name in example[:2] for example in batch.gold])
        is_correct = torch.tensor(correct)
        return sum_by_slice("exact_match", is_correct, torch.ones_like(is_correct), slices)

    @property
    def tokenizer(self) -> str:
        """JSON of a tokenizer that splits text such as "<zh>20 November 2026" into the tokens of
        this task.
        """
        tokenizer = SubwordTokenizer(WordLevel(ID_OF_TOKEN, unk_token=SPECIAL_TOKENS[UNKNOWN_ID]))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN_PATTERN), "isolated")
        tokenizer.decoder = decoders.Fuse()
        tokenizer.add_special_tokens([AddedToken(token, rstrip=True) for token in SPECIAL_TOKENS])
        return json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False)

    @property
    def usage(self) -> ProcessorSpec:
        """Processor that reads a typed "<zh>" as the special token, and starts and ends every
        answer.
        """
        return ProcessorSpec(
            bos=(BEGIN_ID,), eos=(END_ID,), parse_special=True, tokenizer=self.tokenizer
        )

    def text(self, ids: Iterable[int]) -> str:
        """Text of ids with language tags, without padding, start and end tokens."""
        hidden = (PAD_ID, BEGIN_ID, END_ID, IGNORE_INDEX)
        return "".join(VOCABULARY[token_id] for token_id in ids if token_id not in hidden)


def align_tokens(source: TokenizedPhrase, target: TokenizedPhrase) -> tuple[tuple[int, int], ...]:
    """Pairs (source index, target index) of tokens that share a part of the meaning; index 0 of the
    source is its tag.

    >>> align_tokens([("November", ("m1", "m0"))], [("-", ()), ("1", ("m1",)), ("1", ("m0",))])
    ((1, 1), (1, 2))
    """
    pairs: dict[tuple[int, int], None] = {}  # in their order
    for t, (_, parts) in enumerate(target):
        for part, (s, (_, source_parts)) in product(parts, enumerate(source, 1)):
            if part in source_parts:
                pairs[s, t] = None
    return tuple(pairs)


def _pad_rows(rows: list[list[int]], fill: int) -> tuple[Tensor, SequenceInfo | None]:
    """Padded rows [B, T], and their positions and segments if they differ in length."""
    lengths = [len(row) for row in rows]
    out = torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, rows)), True, fill)
    if min(lengths) == max(lengths):
        return out, None
    return out, SequenceInfo.from_batch(out, lengths=lengths)


def _check_choices(
    option: str, words: tuple[str, ...], choices: Iterable[str], minimum: int
) -> None:
    """Raise SpecError for unknown or repeated words, and for fewer than `minimum`."""
    choices = tuple(choices)
    for word in words:
        if word not in choices:
            raise SpecError(
                f"{option}={words!r} has the unknown entry {word!r}; {suggest(str(word), choices)}"
            )
    if len(set(words)) != len(words) or len(words) < minimum:
        raise SpecError(
            f"{option}={words!r} must name {minimum} or more, each once; choose from "
            f"{', '.join(choices)}"
        )
