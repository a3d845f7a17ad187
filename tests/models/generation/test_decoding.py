"""Decoding against its definitions: probabilities by brute force, beam search
against all answers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.kernels.counter_rng import RandomStream
from headwise.models import model_spec as bp
from headwise.models.embeddings_heads import CheckedIds
from headwise.models.generation import DecodingState, eval_mode
from headwise.models.generation.decoding_config import MIN_TEMPERATURE
from headwise.models.generation.decoding_state import (
    BeamSearch,
    read_best,
    run_beam_search,
    sample_tokens,
)
from models.decoding_models import (
    CAUSAL,
    MODEL,
    WORDS,
    build_random,
    decoder_spec,
    encoder_decoder_spec,
)


@pytest.fixture
def translator() -> hw.Transformer:
    return build_random(encoder_decoder_spec(), bos=(1,))


PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5]]


@pytest.fixture
def net() -> hw.Transformer:
    return build_random(decoder_spec())


def logits_of(
    net: hw.Transformer, ids: Sequence[int], source: Sequence[int] | None = None
) -> Tensor:
    """What comes next, the whole text read anew."""
    with torch.no_grad():
        read = {} if source is None else {"source": torch.tensor([source])}
        return net(torch.tensor([list(ids)]), **read)[0, -1]


def anew(
    net: hw.Transformer, prompt: Sequence[int], count: int, source: Sequence[int] | None = None
) -> list[int]:
    """The likeliest tokens, without a cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits_of(net, ids, source).argmax()))
    return ids[len(prompt) :]


def test_the_smallest_temperature_that_samples():
    logits = torch.tensor([[0.5, 88.0, 88.0, -3e38]]).expand(64, -1)
    streams = [RandomStream(0, n) for n in range(64)]
    drawn = sample_tokens(logits, temperature=MIN_TEMPERATURE, streams=streams)
    assert Counter(drawn).keys() == {1, 2}


# --- what is drawn from, and how often ------------------------------------------------------------


def shares(
    logits: Sequence[float], past: Sequence[int], temperature: float, how: hw.DecodingConfig
) -> list[float]:
    """How likely each token is, by the definitions, one number after the other."""
    scores = [
        (s / how.repetition if s > 0 else s * how.repetition) if n in past else s
        for n, s in enumerate(logits)
    ]
    keep = {n: s / temperature for n, s in enumerate(scores)}

    def likely() -> dict[int, float]:
        total = math.fsum(math.exp(s) for s in keep.values())
        return {n: math.exp(s) / total for n, s in keep.items()}

    if how.top_k is not None:
        least = sorted(keep.values(), reverse=True)[: how.top_k][-1]
        keep = {n: s for n, s in keep.items() if s >= least}
    if how.top_p is not None:
        share, within = likely(), 0.0
        for n in sorted(keep, key=lambda n: share[n], reverse=True):
            if within >= how.top_p:  # those before it have the share already
                del keep[n]
            within += share[n]
    if how.min_p is not None:
        share = likely()
        keep = {n: s for n, s in keep.items() if share[n] >= how.min_p * max(share.values())}
    share = likely()
    return [share.get(n, 0.0) for n in range(len(logits))]


HOWS = {
    "plain": hw.DecodingConfig(),
    "top_k": hw.DecodingConfig(top_k=4),
    "top_p": hw.DecodingConfig(top_p=0.7),
    "min_p": hw.DecodingConfig(min_p=0.2),
    "repetition": hw.DecodingConfig(repetition=2.5),
    "all": hw.DecodingConfig(top_k=7, top_p=0.8, min_p=0.1, repetition=1.5),
}


def p_value(counts: Sequence[int], expected: Sequence[float]) -> float:
    """Of Pearson's chi-square; what cannot be must not have been."""
    assert all(count == 0 for count, share in zip(counts, expected, strict=True) if share == 0)
    some = [(count, share) for count, share in zip(counts, expected, strict=True) if share]
    if len(some) == 1:
        return 1.0
    total = sum(counts)
    chi = math.fsum((count - total * share) ** 2 / (total * share) for count, share in some)
    free = torch.tensor((len(some) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(free, torch.tensor(chi / 2, dtype=torch.float64)))


@pytest.mark.parametrize("temperature", [0.6, 1.5])
@pytest.mark.parametrize("name", HOWS)
def test_tokens_are_drawn_as_often_as_they_are_likely(name: str, temperature: float):
    how, logits, past = HOWS[name], torch.randn(9, dtype=torch.float64), [2, 5, 2]
    logits[[2, 5]] = torch.tensor([0.9, -0.9], dtype=torch.float64)
    expected = shares(logits.tolist(), past, temperature, how)
    rows = 1000
    options = {"temperature": temperature, "config": how}
    found = hw.generation.sample_tokens(
        logits.expand(rows, -1),
        [past] * rows,
        streams=[RandomStream(7, n) for n in range(rows)],
        **options,
    )
    again = RandomStream(7, 1234)
    found += [
        hw.generation.sample_tokens(logits[None], [past], streams=[again], **options)[0]
        for _ in range(300)
    ]
    counts = Counter(found)
    assert p_value([counts[n] for n in range(9)], expected) > 1e-3


def test_texts_are_drawn_as_often_as_they_are_likely():
    """Two tokens in a row, by the chain rule."""
    net = build_random(decoder_spec(words=5))
    first = logits_of(net, [3, 1]).softmax(-1).tolist()
    expected = [
        first[a] * share
        for a in range(5)
        for share in logits_of(net, [3, 1, a]).softmax(-1).tolist()
    ]
    generated = hw.generate(net, [[3, 1]] * 1500, max_new_tokens=2, temperature=1.0, seed=5)
    counts = Counter(5 * a + b for a, b in generated)
    assert p_value([counts[n] for n in range(25)], expected) > 1e-3


def test_a_stream_goes_on_where_it_was_left():
    whole = RandomStream(2**63 + 5, number=2**40)
    units = [whole.uniform() for _ in range(200)]
    assert 0 < min(units) < max(units) < 1
    assert len(set(units)) == 200
    for used in (0, 1, 63, 64, 65, 130):
        assert RandomStream(2**63 + 5, number=2**40, used=used).uniform() == units[used]
    assert (
        len({RandomStream(seed, number).uniform() for seed in range(30) for number in range(30)})
        == 900
    )
    assert p_value(list(Counter(int(10 * unit) for unit in units).values()), [0.1] * 10) > 1e-3


def test_a_number_that_is_rounded_up_draws_no_impossible_token():
    class Last:
        def uniform(self) -> float:
            return 1 - 2.0**-53

    logits = torch.tensor([[0.1, 0.7, -math.inf]])
    assert hw.generation.sample_tokens(logits, temperature=1.0, streams=[Last()]) == [1]  # pyright: ignore[reportArgumentType] - it has what is asked of it


# --- rows that stand beside each other ------------------------------------------------------------


def decodable(name: str) -> hw.AttentionSpec:
    small = {"mla": {"project": hw.parts.MLAProjection(rank=8, rope=4), "dim": 6}}.get(name, {})
    spec = hw.design(preset=name, **({"model": MODEL, "heads": 4, **small}))
    if spec.pattern.tokens_before_decode == 0:
        return spec
    return replace(spec, pattern=hw.patterns.Causal())


SPECS = {name: decodable(name) for name in hw.PRESETS}
SPECS |= {
    "ring": replace(CAUSAL, pattern=hw.patterns.Window(3)),
    "sinks": replace(CAUSAL, pattern=hw.patterns.Window(3) | hw.patterns.First(2)),
}


@pytest.mark.parametrize("name", SPECS)
def test_cached_generation_equals_generation_without_a_cache(name: str):
    """Rows of several lengths at once, drawn; some end early, and are left out of the caches."""
    net = build_random(decoder_spec(SPECS[name]))
    alone = []
    for row, prompt in enumerate(PROMPTS):
        ids, own = list(prompt), RandomStream(3, row)
        for _ in range(6):
            ids += hw.generation.sample_tokens(
                logits_of(net, ids)[None], temperature=1.0, streams=[own]
            )
        alone.append(ids[len(prompt) :])
    options = {"max_new_tokens": 6, "temperature": 1.0, "seed": 3}
    ends = (alone[0][2], alone[1][0])
    expected = [
        row[: min((row.index(end) for end in ends if end in row), default=6)] for row in alone
    ]
    assert hw.generate(net, PROMPTS, **options, config=hw.DecodingConfig(end=ends)) == expected


def test_a_translator_answers_each_source_as_alone(translator: hw.Transformer):
    sources = [*PROMPTS, [12, 0, 7], [2, 2, 11, 8, 8]]
    expected = [anew(translator, [1], 6, source) for source in sources]
    assert hw.generate(translator, sources, max_new_tokens=6) == expected
    assert hw.generate(translator, sources[1], max_new_tokens=6) == expected[1]
    for end in {one for row in expected for one in row[:3]}:
        translator.usage = hw.ProcessorSpec(bos=(1,), eos=(end,))
        cut = [row[: row.index(end)] if end in row else row for row in expected]
        assert hw.generate(translator, sources, max_new_tokens=6) == cut
    assert (
        hw.generate(translator, sources, max_new_tokens=6, config=hw.DecodingConfig(end=()))
        == expected
    )


def test_a_row_samples_independently_of_the_others(net: hw.Transformer):
    options = {"max_new_tokens": 12, "temperature": 1.3, "seed": 8}
    beside = hw.generate(net, [PROMPTS[0], PROMPTS[1], PROMPTS[2]], **options)
    assert hw.generate(net, [[7] * 9, PROMPTS[1], [2]], **options)[1] == beside[1]
    assert hw.generate(net, PROMPTS[0], **options) == beside[0]
    assert (
        hw.generate(net, [PROMPTS[0]] * 2, **options)[0]
        != hw.generate(net, [PROMPTS[0]] * 2, **options)[1]
    )
    torch.manual_seed(3)
    first = hw.generate(net, PROMPTS, **(options | {"seed": None}))
    assert hw.generate(net, PROMPTS, **(options | {"seed": None})) != first
    torch.manual_seed(3)
    assert hw.generate(net, PROMPTS, **(options | {"seed": None})) == first


def test_rows_that_are_over_are_computed_no_longer(
    net: hw.Transformer, monkeypatch: pytest.MonkeyPatch
):
    free = hw.generate(net, PROMPTS, max_new_tokens=9)
    end = free[1][0]
    sizes, hidden = [], net.hidden

    def watched(x: Tensor | CheckedIds, **options: Any) -> Tensor:
        sizes.append(len(x.ids if isinstance(x, CheckedIds) else x))
        return hidden(x, **options)

    monkeypatch.setattr(net, "hidden", watched)
    generated = hw.generate(net, PROMPTS, max_new_tokens=9, config=hw.DecodingConfig(end=(end,)))
    assert generated == [row[: row.index(end)] if end in row else row for row in free]
    assert sizes[:2] == [3, 2]
    assert len(sizes) == max(row.index(end) + 1 if end in row else 9 for row in free)


@pytest.mark.parametrize("end", range(WORDS))
def test_rows_draw_on_as_they_would_when_others_end(net: hw.Transformer, end: int):
    options = {"max_new_tokens": 9, "temperature": 1.0, "seed": 2}
    free = hw.generate(net, PROMPTS * 2, **options)
    cut = [row[: row.index(end)] if end in row else row for row in free]
    assert hw.generate(net, PROMPTS * 2, **options, config=hw.DecodingConfig(end=end)) == cut


def test_prompts_are_returned_in_the_given_form(net: hw.Transformer):
    alone = hw.generate(net, PROMPTS[1], max_new_tokens=3)
    for value in (
        tuple(PROMPTS[1]),
        torch.tensor(PROMPTS[1]),
        torch.tensor(PROMPTS[1], dtype=torch.int32),
    ):
        assert hw.generate(net, value, max_new_tokens=3) == alone
    for value in (
        [PROMPTS[1]],
        torch.tensor([PROMPTS[1]]),
        [torch.tensor(PROMPTS[1])],
        (range(9, 10),),
    ):
        generated = hw.generate(net, value, max_new_tokens=3)
        assert generated == [alone] or len(value[0]) == 1
        assert isinstance(generated[0], list)
    best = hw.generate(net, PROMPTS, max_new_tokens=3, config=hw.DecodingConfig(beams=5, best=2))
    assert [len(row) for row in best] == [2, 2, 2]
    assert (
        hw.generate(net, PROMPTS[1], max_new_tokens=3, config=hw.DecodingConfig(beams=5, best=2))
        == best[1]
    )


# --- beams ----------------------------------------------------------------------------------------


def every(
    net: hw.Transformer, prompt: Sequence[int], count: int, ends: Sequence[int], power: float
) -> list[Any]:
    """Every answer there is: up to `count` tokens, ended or not, by its score, best first."""
    found = {}
    source, begin = (prompt, net.usage.bos) if net.usage.bos else (None, prompt)
    likely = {(): logits_of(net, begin, source).log_softmax(-1).tolist()}
    words = len(likely[()])
    for ids in (
        ids for length in range(1, count + 1) for ids in product(range(words), repeat=length)
    ):
        if set(ids[:-1]) & set(ends) or not (len(ids) == count or ids[-1] in ends):
            continue
        for n in range(1, len(ids)):
            if ids[:n] not in likely:
                likely[ids[:n]] = (
                    logits_of(net, [*begin, *ids[:n]], source).log_softmax(-1).tolist()
                )
        total = math.fsum(likely[ids[:n]][one] for n, one in enumerate(ids))
        found[ids] = total / len(ids) ** power
    return sorted(found.items(), key=lambda one: -one[1])


@pytest.mark.parametrize("power", [-0.7, 1.0, 2.5])
@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_enough_beams_find_the_best_of_all_answers(kind: str, power: float):
    net = build_random(
        decoder_spec(words=3) if kind == "decoder" else encoder_decoder_spec(words=3),
        bos=() if kind == "decoder" else (1,),
    )
    prompts = [[2, 1], [1, 0]]
    how = hw.DecodingConfig(beams=3**4, best=7, length_penalty=power, end=(0,))
    with eval_mode(net):
        memory = None if kind == "decoder" else net.encode(torch.tensor(prompts))
        begin = torch.tensor(prompts if kind == "decoder" else [[1], [1]])
        course = DecodingState(net, begin, max_new_tokens=4, encoder_output=memory)
        found = run_beam_search(course, how, frozenset([0]), lambda ids: ids[-1] == 0)
    for prompt, best in zip(prompts, found, strict=True):
        expected = every(net, prompt, 4, [0], power)[:7]
        assert [one.ids for one in best] == [ids for ids, _ in expected]
        assert [one.value for one in best] == pytest.approx([score for _, score in expected])


def take_step(search: BeamSearch, log_probs: Tensor) -> list[int]:
    ranked = search.rank(log_probs)
    return search.step(ranked, read_best([ranked])[0])


def test_an_answer_that_ends_behind_those_that_go_on_is_none():
    """With one beam and a likelier token than the end the search goes on, as theirs does."""
    search = BeamSearch(hw.DecodingConfig(beams=1), 3, frozenset([0]), lambda ids: ids[-1] == 0)
    assert take_step(search, torch.tensor([[0.3, 0.6, 0.1]]).log()) == [0]
    assert (search.over, search.active[0].ids) == ([], (1,))
    assert take_step(search, torch.tensor([[0.7, 0.2, 0.1]]).log()) == []
    assert [one.ids for one in search.over] == [(1, 0)]
    assert search.over[0].value == pytest.approx(math.log(0.6 * 0.7) / 2)


def test_beams_remain_active_however_many_extensions_end():
    """All tokens but the least likely two end an output, as a constraint or a stop text can
    require.
    """
    search = BeamSearch(hw.DecodingConfig(beams=2), 3, frozenset(), lambda ids: ids[-1] < 9)
    log_probs = (torch.arange(11, 0, -1) / 100).log_softmax(-1)[None]
    assert take_step(search, log_probs) == [0, 0]
    assert [one.ids for one in search.active] == [(9,), (10,)]
    assert [one.ids for one in search.over] == [(0,), (1,)]


def test_all_positions_can_be_used():
    net = build_random(decoder_spec(positions=8))
    assert hw.generate(net, [3, 1, 4], max_new_tokens=6) == anew(net, [3, 1, 4], 6)


def test_positions_of_a_part_count_too():
    learned = hw.design(
        model=MODEL, heads=4, pattern="causal()", modifiers=(hw.parts.LearnedScores(length=6),)
    )
    with pytest.raises(ValueError, match="are 2 more than the 6 positions"):
        hw.generate(build_random(decoder_spec(learned)), [3, 1, 4], max_new_tokens=6)


# --- as it comes ----------------------------------------------------------------------------------


def test_a_stream_equals_generation(net: hw.Transformer):
    for options in (
        {},
        {"temperature": 0.8, "seed": 11},
        {"config": hw.DecodingConfig(end=(4, 7))},
    ):
        whole = hw.generate(net, PROMPTS[0], max_new_tokens=9, **options)
        assert list(hw.stream(net, PROMPTS[0], max_new_tokens=9, **options)) == whole


def test_a_stream_leaves_the_model_as_it_was_between_tokens():
    net = hw.build(decoder_spec(), dropout=0.4, seed=0).train()
    result = hw.stream(net, [3, 1], max_new_tokens=3)
    first = [next(result)]
    assert all(module.training for module in net.modules())
    assert torch.is_grad_enabled()
    assert first + list(result) == hw.generate(net, [3, 1], max_new_tokens=3)
    assert all(module.training for module in net.modules())


# --- what is refused ------------------------------------------------------------------------------

LEARNED = decoder_spec(positions=8)
BAD: dict[str, tuple[bp.ModelSpec, Any, dict[str, Any], str]] = {
    "nothing": (LEARNED, [], {}, "the prompt is empty; give text, ids"),
    "an empty row": (LEARNED, [[3], []], {}, "the prompt is empty; give at least one token"),
    "a number": (LEARNED, 3, {}, "of type int; give text, ids such as"),
    "a mixture": (LEARNED, [3, [1]], {}, "3 is not a list of ids"),
    "truth": (LEARNED, [True], {}, "True in a prompt is not an id"),
    "fractions": (LEARNED, torch.zeros(3), {}, r"torch.float32 \[3\]; give integer ids"),
    "text without words": (LEARNED, "hello", {}, "has no tokenizer, so it only takes ids"),
    "beyond the table": (
        LEARNED,
        [3, 11],
        {},
        r"holds the id 11, but decoder knows 11; give 0\.\.10",
    ),
    "below the table": (LEARNED, [-1], {}, "holds the id -1"),
    "too long": (
        LEARNED,
        [1] * 11,
        {},
        "11 tokens is 3 longer than the 8 positions of small; shorten it",
    ),
    "too far": (
        LEARNED,
        [1] * 5,
        {"max_new_tokens": 6},
        "are 2 more than .* at most 4 new, or shorten the prompt",
    ),
    "one too far": (
        LEARNED,
        [1],
        {"max_new_tokens": 9},
        "^1 token and 9 new are 1 more than .* at most 8 new,",
    ),
    "warm beams": (
        LEARNED,
        [1],
        {"temperature": 1.0, "config": hw.DecodingConfig(beams=2)},
        "beam search does not sample, got beams=2 and temperature=1; give temperature=0",
    ),
    "no tokens": (
        LEARNED,
        [1],
        {"max_new_tokens": 0},
        "max_new_tokens=0 is not a token count; give an integer",
    ),
    "cold": (
        LEARNED,
        [1],
        {"temperature": -0.5},
        "temperature must be a finite number >= 0, got -0.5; give 0",
    ),
    "endless heat": (
        LEARNED,
        [1],
        {"temperature": math.inf},
        "temperature must be a finite number >= 0, got inf",
    ),
    "no way": (LEARNED, [1], {"config": "greedy"}, "config must be a DecodingConfig, got 'greedy'"),
    "many beams": (
        LEARNED,
        [1],
        {"config": hw.DecodingConfig(beams=12)},
        "beams=12 is more than the 11 tokens",
    ),
    "idle filter": (
        LEARNED,
        [1],
        {"config": hw.DecodingConfig(top_k=3)},
        "top_k=3 has no effect: temperature=0",
    ),
    "idle filter of beams": (
        LEARNED,
        [1],
        {"config": hw.DecodingConfig(top_p=0.5, beams=2)},
        "top_p=0.5 has no effect: temperature=0",
    ),
    "a strange end": (
        LEARNED,
        [1],
        {"config": hw.DecodingConfig(end=(11,))},
        "end id 11 is outside the vocabulary of 11",
    ),
    "a strange stop": (
        LEARNED,
        [1],
        {"config": hw.DecodingConfig(stop=(99,))},
        "end id 99 is outside",
    ),
    "no seed": (LEARNED, [1], {"temperature": 1.0, "seed": "x"}, "cannot seed 1 row with seed='x'"),
    "seeds": (
        LEARNED,
        [1],
        {"temperature": 1.0, "seed": [1, 2]},
        r"cannot seed 1 row with seed=\[1, 2\]",
    ),
    "a seed of text": (
        LEARNED,
        [1],
        {"temperature": 1.0, "seed": 1.5},
        "cannot seed 1 row with seed=1.5",
    ),
    "a seed below 0": (LEARNED, [1], {"temperature": 1.0, "seed": -1}, "seed=-1"),
    "no beginning": (encoder_decoder_spec(), [1], {}, "has no decoder start ids; set"),
}


@pytest.mark.parametrize("name", BAD)
def test_ungeneratable_prompts_give_reasons(name: str):
    described, prompt, options, words = BAD[name]
    with pytest.raises(ValueError, match=words) as caught:
        hw.generate(hw.build(described), prompt, **({"max_new_tokens": 3} | options))
    assert "\n" not in str(caught.value)


def test_broken_weights_are_reported(net: hw.Transformer):
    with torch.no_grad():
        net.head["tokens"].weight[3] = math.nan
    for options in ({}, {"temperature": 1.0}):
        with pytest.raises(ValueError, match="produced NaN logits"):
            hw.generate(net, [1, 2], max_new_tokens=2, **options)
