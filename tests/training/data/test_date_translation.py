"""Dates and amounts: every wording against a second implementation, alignments, held-out values."""

from __future__ import annotations

import random
import re
from collections import Counter
from datetime import date, timedelta
from decimal import Decimal

import pytest
from tokenizers import Tokenizer

from headwise.training.data import IGNORE_INDEX, SPLITS, make_task
from headwise.training.data.date_translation import (
    BEGIN_ID,
    CURRENCIES,
    END_ID,
    LANGUAGES,
    PAD_ID,
    UNKNOWN_ID,
    VOCABULARY,
    Amount,
    Date,
    DateTranslation,
    format_chinese_numeral,
    join_tokens,
)

NUMBERS = [
    *range(1, 1300),
    *range(9900, 11_200),
    *random.Random(0).sample(range(11_200, 10**8), 1500),
]
NUMBERS += [
    a * 10**n + b
    for a in (1, 2, 12, 20, 22)
    for n in range(1, 7)
    for b in (0, 1, 10, 2000)
    if b < 10**n
]
HUNDREDTHS = [
    *range(1, 300),
    *random.Random(1).sample(range(300, 10**10), 500),
    *(200, 20_000, 200_000, 2_000_000),
]


def spell(language: str, one: Date | Amount) -> str:
    return join_tokens(LANGUAGES[language](one))


# --- Chinese numbers, twice again -----------------------------------------------------------------


def written(number: int) -> str:
    """Every digit with its power, then what is not said is struck out: from the text alone, by
    rules on characters.
    """
    digits = str(number).rjust(8, "0")
    sections = [
        "".join(d + p for d, p in zip(part, "千百十个", strict=True))
        for part in (digits[:4], digits[4:])
    ]
    high, low = (re.sub("0.", "零", section).replace("个", "") for section in sections)
    high, low = high.rstrip("零"), low.rstrip("零")
    text = re.sub("零+", "零", (high + "万" if high else "") + low).strip("零")
    text = re.sub("^1十", "十", text)
    return "".join("零一二三四五六七八九"[int(c)] if c.isdecimal() else c for c in text)


def read(text: str) -> int:
    """The number that a Chinese numeral names."""
    total, section, digit = 0, 0, 0
    for c in text.replace("两", "二"):
        if c in "零一二三四五六七八九":
            digit = "零一二三四五六七八九".index(c)
        elif c == "万":
            total, section, digit = (section + digit) * 10_000, 0, 0
        else:
            section, digit = (
                section + max(digit, c == "十") * {"十": 10, "百": 100, "千": 1000}[c],
                0,
            )
    return total + section + digit


def test_numerals_are_as_written_otherwise_and_read_back():
    for number in NUMBERS:
        text = join_tokens(format_chinese_numeral(number, "n"))
        assert text == written(number)
        assert read(text) == number
        assert not re.search("零零|零[万十百千]|零$|^一十", text)


@pytest.mark.parametrize(
    ("cents", "currency", "text"),
    [
        (123_450, "yuan", "一千二百三十四元五角"),
        (123_450, "dollars", "一千二百三十四美元五十美分"),
        (200, "yuan", "两元"),
        (220, "yuan", "两元二角"),
        (202, "yuan", "两元零二分"),
        (222, "yuan", "两元二角二分"),
        (20, "yuan", "两角"),
        (2, "yuan", "两分"),
        (22, "yuan", "两角二分"),
        (2, "euros", "两欧分"),
        (202, "euros", "两欧元两欧分"),
        (20, "dollars", "二十美分"),
        (1000, "yuan", "十元"),
        (1200, "yuan", "十二元"),
        (2000, "yuan", "二十元"),
        (20_000, "yuan", "二百元"),
        (220_000, "yuan", "两千二百元"),
        (2_200_000, "yuan", "两万二千元"),
        (1_200_000, "yuan", "一万二千元"),
        (12_000_000, "yuan", "十二万元"),
        (2_000_000_000, "yuan", "两千万元"),
        (1005, "yuan", "十元零五分"),
        (1050, "yuan", "十元五角"),
    ],
)
def test_amounts_in_chinese(cents: int, currency: str, text: str):
    assert spell("zh", Amount(cents, currency)) == text


def test_amounts_are_read_back():
    """By the words of each unit, whatever stands before them."""
    for cents in HUNDREDTHS:
        found = re.fullmatch(
            "(?:(.+)元)?(?:(.)角)?(?:零?(.)分)?", spell("zh", Amount(cents, "yuan"))
        )
        assert found
        whole, tenths, hundredths = (read(part or "") for part in found.groups())
        assert 100 * whole + 10 * tenths + hundredths == cents
        for currency, unit in (("dollars", "美"), ("euros", "欧")):
            found = re.fullmatch(
                f"(?:(.+){unit}元)?(?:(.+){unit}分)?", spell("zh", Amount(cents, currency))
            )
            assert found
            assert 100 * read(found[1] or "") + read(found[2] or "") == cents


def test_amounts_elsewhere_are_as_decimal_writes_them():
    for cents in HUNDREDTHS:
        for word, currency in CURRENCIES.items():
            number = Decimal(cents).scaleb(-2)
            assert spell("en", Amount(cents, word)) == f"{number:,} {word}"
            assert spell("iso", Amount(cents, word)) == f"{currency[0]} {number}"


def test_dates_are_as_the_calendar_writes_them():
    digits = str.maketrans("0123456789", "〇一二三四五六七八九")
    for n in range(0, 366 * 400, 97):
        day = date(1900, 1, 1) + timedelta(n)
        one = Date(day.year, day.month, day.day)
        assert spell("iso", one) == day.isoformat()
        assert spell("en", one) == f"{day.day} {day:%B} {day.year}"
        assert (
            spell("zh", one)
            == f"{str(day.year).translate(digits)}年{written(day.month)}月{written(day.day)}日"
        )
    assert spell("zh", Date(2026, 11, 20)) == "二〇二六年十一月二十日"


def test_no_two_values_have_one_wording():
    """So that an answer is right or wrong."""
    things = [Amount(cents, currency) for cents in HUNDREDTHS for currency in CURRENCIES]
    for say in LANGUAGES.values():
        assert len({join_tokens(say(one)) for one in things}) == len(set(things))


# --- examples -------------------------------------------------------------------------------------


def understood(text: str) -> tuple:
    """What a text in whatever language says."""
    if found := re.fullmatch(r"([\d,]+\.\d\d) (\w+)|([A-Z]{3}) (\d+\.\d\d)", text):
        name = found[2] or next(
            word for word, currency in CURRENCIES.items() if currency[0] == found[3]
        )
        return round(100 * Decimal((found[1] or found[4]).replace(",", ""))), name
    if found := re.fullmatch("(....)年(.+)月(.+)日", text):
        return (
            int("".join(str("〇一二三四五六七八九".index(c)) for c in found[1])),
            read(found[2]),
            read(found[3]),
        )
    if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
        return tuple(map(int, text.split("-")))
    if found := re.fullmatch(r"(\d+) ([A-Z]\w+) (\d{4})", text):
        return (
            int(found[3]),
            [f"{date(1, m, 1):%B}" for m in range(1, 13)].index(found[2]) + 1,
            int(found[1]),
        )
    currency = {"美": "dollars", "欧": "euros"}.get((re.search("[美欧]", text) or [""])[0], "yuan")
    parts = re.fullmatch("(?:(.+?)[美欧]?元)?(?:(.)角)?(?:零?(.+?)[美欧]?分)?", text)
    assert parts, text
    whole, tenths, rest = (read(part or "") for part in parts.groups())
    return 100 * whole + 10 * tenths + rest, currency


def test_source_and_target_have_one_meaning():
    one, counter = DateTranslation(), Counter()
    batch = one.batch(0, 1000)
    for n, gold in enumerate(batch.gold):
        assert understood(gold.source) == understood(gold.target)
        assert (
            one.text(batch.source[n].tolist()) == f"<{gold.direction.split('-')[1]}>{gold.source}"
        )
        assert one.text(batch.labels[n].tolist()) == gold.target
        counter[gold.subject, gold.direction] += 1
        if gold.subject == "date":
            assert 1900 <= understood(gold.source)[0] <= 2099
        else:
            assert 0 < understood(gold.source)[0] < 10**7
    assert len(counter) == 12
    assert min(counter.values()) > 50


def test_rows_are_those_of_translation_training():
    batch = DateTranslation().batch(1, 60)
    assert batch.tokens is not None
    assert batch.source_tokens is not None
    for n in range(60):
        x, labels = batch.x[n][batch.tokens.is_real[n]].tolist(), batch.labels[n].tolist()
        expected = [token for token in labels if token != IGNORE_INDEX]
        assert x == [BEGIN_ID, *expected[:-1]]
        assert expected[-1] == END_ID
        assert labels == expected + [IGNORE_INDEX] * (len(labels) - len(expected))
        assert (batch.source[n] != PAD_ID).tolist() == batch.source_tokens.is_real[n].tolist()


# What tokens are worth by themselves: a digit, a month, a currency.
WORTH: dict[str, set] = {}
for row in ("0123456789", "零一二三四五六七八九", "〇一两三四五六七八九"):
    WORTH |= {character: {digit} for digit, character in enumerate(row)}
for month in range(1, 13):
    WORTH[f"{date(1, month, 1):%B}"] = {month // 10, month % 10}
for word, (code, units) in {
    "dollars": ("USD", "美元分"),
    "euros": ("EUR", "欧元分"),
    "yuan": ("CNY", "元"),
}.items():
    WORTH |= {word: {word}, code: {word}}
    for unit in units:
        WORTH[unit] = WORTH.get(unit, set()) | {word}


def test_linked_tokens_mean_the_same():
    """Equal digits, a month and a digit of its number, one currency; 十, 百, 千, 万, 角, 分 the digit
    there.
    """
    one, kinds = DateTranslation(), Counter()
    batch = one.batch(0, 1500)
    for n, gold in enumerate(batch.gold):
        source, target = (
            [VOCABULARY[i] for i in row[n].tolist() if i != IGNORE_INDEX]
            for row in (batch.source, batch.labels)
        )
        for s, t in gold.links:
            pair = source[s], target[t]
            if not set(pair) & set("十百千万角分"):
                assert WORTH[pair[0]] & WORTH[pair[1]], pair
            kinds[frozenset(pair)] += 1
            assert source[s] not in " -,.年月日"
            assert target[t] not in " -,.年月日"
    assert {
        frozenset(pair)
        for pair in (("November", "1"), ("十", "November"), ("元", "USD"), ("0", "零"))
    } <= set(kinds)


def test_chinese_number_words_are_aligned():
    """十一 of 十一月 with the word or with both digits; 零 with all zeros that it stands for; 千 with its
    digit.
    """
    one = DateTranslation()
    expected = {"zh-en": {}, "iso-zh": {}}
    for index in range(12):
        for gold in one.batch(index, 200).gold:
            if gold.direction in expected:
                expected[gold.direction].setdefault(
                    bool(re.search("零", gold.source + gold.target)), []
                ).append(gold)
    for gold in expected["iso-zh"][True]:
        if "零" in gold.target and "." in gold.source:
            for t in [t for t, c in enumerate(gold.target) if c == "零"]:
                places = sorted(s for s, to in gold.links if to == t)
                text = gold.source[
                    4:
                ]  # behind the code and the space, which are two tokens behind the tag
                assert places
                assert {text[s - 3] for s in places} == {"0"}
                assert places == [*range(places[0], places[-1] + 1)]
                assert (
                    "0" not in text[places[0] - 4] + text[places[-1] - 2]
                )  # all of those side by side
    for gold in expected["iso-zh"][False] + expected["iso-zh"][True]:
        for t, c in enumerate(gold.target):
            assert (c in "年月日") != any(to == t for _, to in gold.links)


# --- splits, scores, texts ------------------------------------------------------------------------


def test_held_out_values_are_held_out_in_every_language():
    """By what is said: the same date, or the same number of whatever currency, is in one split
    alone.
    """
    recorded: dict[tuple, str] = {}
    for split in SPLITS:
        for one in (
            DateTranslation(),
            DateTranslation(seed=1),
            DateTranslation(years=(1990, 2010), digits=3),
        ):
            for gold in one.batch(0, 300, split).gold:
                meaning = understood(gold.source)
                assert (
                    recorded.setdefault(meaning[:1] if len(meaning) == 2 else meaning, split)
                    == split
                )


def test_each_option_has_its_documented_effect():
    def golds(**options):
        return make_task("dates", **options).batch(0, 300).gold

    assert {gold.subject for gold in golds(subjects=("date",))} == {"date"}
    assert {gold.direction for gold in golds(languages=("zh", "en"))} == {"zh-en", "en-zh"}
    years = {understood(gold.source)[0] for gold in golds(subjects=("date",), years=(1066, 1068))}
    assert years == {1066, 1067, 1068}
    money = [
        understood(gold.source)
        for gold in golds(subjects=("amount",), digits=2, currencies=("yuan", "euros"))
    ]
    assert {name for _, name in money} == {"yuan", "euros"}
    assert 5000 < max(cents for cents, _ in money) < 10_000
    forms = {
        re.sub("[1-9]", "x", gold.source)
        for gold in golds(languages=("iso", "en"), subjects=("amount",), digits=1)
    }
    assert {
        "USD 0.0x",
        "EUR 0.x0",
        "CNY 0.xx",
        "USD x.00",
        "EUR x.0x",
        "x.x0 yuan",
        "x.xx euros",
    } <= forms
    ends = make_task("dates", subjects=("date",), years=(9998, 9999))
    days = {understood(gold.source) for split in SPLITS for gold in ends.batch(0, 900, split).gold}
    assert (len(days) > 600, min(days), max(days)) == (True, (9998, 1, 1), (9999, 12, 31))
    wide = [understood(gold.source)[0] for gold in golds(subjects=("amount",), digits=8)]
    assert 10**9 < max(wide) < 10**10


@pytest.mark.parametrize("digits", range(1, 9))
def test_answers_are_just_long_enough(digits: int):
    one = make_task("dates", digits=digits)
    things = [Amount(int("9" * (digits + 2)), "euros"), Date(2027, 12, 27)]
    assert max(len(say(thing)) for say in LANGUAGES.values() for thing in things) + 1 == one.answers
    assert one.batch(0, 300).labels.shape[1] <= one.answers


def test_scores_count_whole_answers():
    one = DateTranslation()
    batch = one.batch(0, 40, "test")
    right = [[i for i in row if i not in (END_ID, IGNORE_INDEX)] for row in batch.labels.tolist()]
    result = one.score(right, batch)
    assert result["exact_match"] == (40, 40)
    assert (
        sum(count for name, (_, count) in result.items() if "@date" in name or "@amount" in name)
        == 40
    )
    assert sum(count for name, (_, count) in result.items() if name.count("-")) == 40
    wrong = [row[:-1] if n < 3 else [*row, row[0]] if n < 5 else row for n, row in enumerate(right)]
    assert one.score(wrong, batch)["exact_match"] == (35, 40)
    prompt, tokens = one.prompt(batch)
    assert (prompt.tolist(), tokens, one.end) == ([[BEGIN_ID]] * 40, None, END_ID)


def test_chance_is_the_score_of_guessing_a_whole_answer():
    """A guesser that says any date of the range, or any amount, in the right language."""
    one = make_task("dates", subjects=("date",), years=(2000, 2001))
    assert one.chance["exact_match"] == 1 / 731
    draw, days, hits = random.Random(0), [date(2000, 1, 1) + timedelta(n) for n in range(731)], 0
    golds = one.batch(0, 300).gold
    for gold in golds * 30:
        day = draw.choice(days)
        hits += (
            spell(gold.direction.split("-")[1], Date(day.year, day.month, day.day)) == gold.target
        )
    assert abs(hits - 9000 / 731) < 4 * (9000 / 731) ** 0.5
    both = make_task("dates", years=(2000, 2001), digits=1, currencies=("yuan", "euros"))
    assert both.chance["exact_match"] == pytest.approx((1 / 731 + 1 / 1998) / 2)


def test_typed_text_becomes_the_tokens_of_the_task():
    one = DateTranslation()
    tokenizer = Tokenizer.from_str(one.tokenizer)
    assert tokenizer.get_vocab_size() == len(VOCABULARY) == len(set(VOCABULARY))
    batch = one.batch(0, 100)
    for n, gold in enumerate(batch.gold):
        language = gold.direction.split("-")[1]
        ids = [i for i in batch.source[n].tolist() if i != PAD_ID]
        assert tokenizer.encode(f"<{language}>{gold.source}").ids == ids
        assert tokenizer.encode(f"<{language}> {gold.source}").ids == ids
        assert (
            tokenizer.decode([i for i in batch.labels[n].tolist() if i != IGNORE_INDEX])
            == gold.target
        )
        assert tokenizer.encode(gold.target).ids == [
            i for i in batch.labels[n].tolist() if i not in (END_ID, IGNORE_INDEX)
        ]
    assert tokenizer.encode("<zh>3 Mai").ids[-1] == UNKNOWN_ID
    assert tokenizer.encode("7€").ids == [VOCABULARY.index("7"), UNKNOWN_ID]
