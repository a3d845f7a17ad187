"""What induction_study.py writes of what it found: tables by step, and sentences."""

from __future__ import annotations

import platform
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

import numpy as np

from headwise.head_analysis.head_classes import MIN_SCORE
from headwise.head_analysis.resampling import confidence_interval
from induction_curves import (
    AGAIN,
    CONTEXT,
    LEVEL,
    Key,
    Test,
    again,
    appears,
    called,
    curves,
    in_context,
    spread,
    tests,
    when,
)
from induction_measures import TESTED, Array, Found, Seen, Story

WIDTH = 120
MISSING = """\
Training is short: 900 steps are less than one pass over the text, and all that the processor at hand gave. The rate is
constant, so that more steps would only go on. In the models of 2209.11895 induction appears after 2.5 to 5 billion
tokens, hundreds of times as many; that it does not appear here is no sign that it would not.

Two seeds of one small size. Whether and when induction appears differs between seeds and sizes; intervals here are over
texts, not over seeds, and the steps are those of these runs. No feed-forwards, no longer rows, no larger model, and no
step between the kept ones was looked at.

The setting was chosen. With the usual start of this library (Xavier, where the first layer's mean of all tokens drowns
the embeddings) and the usual rotary base of 10,000, two layers had no induction head at step 800 and three none at 400;
with base 30 and biases two had none at 150. These trials were ended there and are not counted among the tests.

Held-out rows come from the last files of the library by name, several from one file, so they are not independent
samples. Random tokens differ from the training text; therefore results on source are given too. Two curves that change
together need not cause each other; ablation only shows what the model depends on at its last step."""


class Telling:
    """What is said of all that was found, with every test at hand."""

    def __init__(self, found: Found) -> None:
        self.found, self.kept, self.tests = found, found.setting.kept, tests(found)

    def head(self, number: int) -> str:
        """A head, counted through all layers, by its layer and its number there."""
        layer, own = divmod(number, self.found.setting.heads)
        return f"{layer}.{own}"

    def rows(self, story: Story) -> Iterator[str]:
        """The table of one seed, by step; a star is a change from the row above that is significant."""
        followed = curves(story)
        yield (
            f"| step | loss | {CONTEXT} | {AGAIN} | induction of {self.head(story.heads['induction'])} | "
            f"previous of {self.head(story.heads['previous'])} | the same on source | largest K-composition | "
            "called induction | called previous |"
        )
        yield "|---" * 10 + "|"
        for at, (step, one) in enumerate(zip(self.kept, story.steps, strict=True)):
            cells = [self.cell(story, at, name, curve) for name, curve in followed.items()]
            yield self.row(f"{step:,}", one, cells, story.heads)
        theirs = self.found.twin
        plain = [in_context(theirs.losses["source"]), again(theirs.losses["repeated"])]
        plain += [theirs.scores["repeated", name][:, story.heads[name]] for name in TESTED]
        cells = [_short(float(one.mean()), name) for one, name in zip(plain, followed, strict=True)]
        yield self.row("twin", theirs, cells, story.heads)

    def row(self, name: str, one: Seen, cells: Sequence[str], heads: Mapping[str, int]) -> str:
        """One model: of the heads that are followed, and how many of all are called so on random tokens and source."""
        source = " and ".join(f"{np.nanmean(one.scores['source', own][:, heads[own]]):.2f}" for own in TESTED)
        counts = [" / ".join(str(one.called[data, own]) for data in ("repeated", "source")) for own in TESTED]
        through = f"{np.nanmax(one.composition):.3f}"
        return "| " + " | ".join([name, f"{one.losses['source'].mean():.2f}", *cells, source, through, *counts]) + " |"

    def cell(self, story: Story, at: int, name: str, curve: Array) -> str:
        """A mean over texts with its interval."""
        low, high = confidence_interval(spread(curve))
        star = "*" if at and self.tests["change", story.seed, self.kept[at], name].verdict else ""
        told = (_short(float(number), name) for number in (curve[at].mean(), low[at], high[at]))
        return "{}{star} ({} to {})".format(*told, star=star)

    def max_dense_length(self, story: Story) -> str:
        """When induction appeared in one seed, and whether the in-context score fell with it."""
        between = appears(self.kept, called(self.found, story, self.tests))
        followed = curves(story)
        (own, first, last), (theirs, begins, ends) = (when(self.kept, followed[one]) for one in ("induction", CONTEXT))
        if between is None:
            low, high = confidence_interval(spread(followed[CONTEXT]))
            falls = "falls without one" if high[-1] < 0 else "has not fallen either"
            return (
                f"Seed {story.seed}: no induction head within {self.kept[-1]:,} steps. The in-context score {falls}: "
                f"{followed[CONTEXT][-1].mean():.2f} ({low[-1]:.2f} to {high[-1]:.2f}) at the last step."
            )
        order = "before" if ends < first else "behind" if begins > last else "not told apart from"
        return (
            f"Seed {story.seed}: induction appears between steps {between[0]:,} and {between[1]:,}. Its head is "
            f"halfway at step {own:,.0f} ({first:,.0f} to {last:,.0f}), the in-context score at step {theirs:,.0f} "
            f"({begins:,.0f} to {ends:,.0f}): {order} it."
        )

    def answer(self, story: Story) -> Iterator[str]:
        """When induction appeared in one seed, and what came with it, in sentences."""
        counts = called(self.found, story, self.tests)
        between = appears(self.kept, counts)
        chosen = self.head(story.heads["induction"])
        if between is None:
            most = np.nanmean(story.steps[-1].scores["repeated", "induction"], 0).max()
            yield (
                f"Induction does not appear within {self.kept[-1]:,} steps: at the last no head is called so on random "
                f"tokens said twice, the most is {most:.2f} ({chosen})."
            )
        else:
            yield (
                f"Induction appears between steps {between[0]:,} and {between[1]:,}: up to the first no head, from the "
                f"second on at least one is called so on repeated random tokens and is surely above the twin's "
                f"strongest; at the last step {counts[-1]} of {len(story.steps[-1].tables['repeated'].heads)} are."
            )
        for name, curve in curves(story).items():
            yield self.half(story, name, curve)
        yield self.below(story)
        yield self.composed(story)
        yield from self.silence(story)

    def half(self, story: Story, name: str, curve: Array) -> str:
        """When a curve is halfway, and the steps at which it surely changed."""
        sure = {
            f"{before:,} to {step:,}": one.mean
            for before, step in zip(self.kept, self.kept[1:], strict=False)
            if (one := self.tests["change", story.seed, step, name]).verdict
        }
        whose = f"{name} of {self.head(story.heads[name])}" if name in TESTED else name
        if not sure:
            return f"{_begun(whose)}: no change from one kept step to the next is significant."
        if abs(curve[-1].mean() - curve[0].mean()) < MIN_SCORE:
            first, last = (_short(float(curve[at].mean()), name) for at in (0, -1))
            return (
                f"{_begun(whose)} goes from {first} to {last}, less than {MIN_SCORE:g}; {len(sure)} changes are sure."
            )
        middle, low, high = when(self.kept, curve)
        largest = max(sure, key=lambda one: abs(sure[one]))
        return (
            f"{_begun(whose)} is halfway from its first value to its last at step {middle:,.0f} ({low:,.0f} to "
            f"{high:,.0f}); {len(sure)} of {len(self.kept) - 1} changes are significant, the largest {largest} "
            f"({sure[largest]:+.2f})."
        )

    def below(self, story: Story) -> str:
        """How many heads of each layer read the token before: induction is made of what one of a lower layer wrote."""
        heads = story.steps[-1].tables["repeated"].heads
        counts = Counter(one.layer for one in heads if "previous" in [own.name for own in one.classes])
        told = " and ".join(f"{counts[layer]} in layer {layer}" for layer in range(self.found.setting.layers))
        most = max(one.measures["previous"].value for one in heads if not one.layer)
        return (
            f"Called previous at the last step are {told}, the most in layer 0 is {most:.2f}. Induction reads what a "
            "previous-token head of a lower layer wrote (2209.11895)."
        )

    def composed(self, story: Story) -> str:
        """K-composition of the two heads that are followed, among all pairs."""
        one, two = story.heads["previous"], story.heads["induction"]
        last, first, theirs = (each.composition for each in (story.steps[-1], story.steps[0], self.found.twin))
        if np.isnan(last[one, two]):
            most, begun, other = (np.nanmax(each) for each in (last, first, theirs))
            return (
                f"The head of most induction, {self.head(two)}, stands in no later layer than {self.head(one)}. The "
                f"largest K-composition of any two heads is {begun:.3f} at step 0, {most:.3f} at the last and "
                f"{other:.3f} of the twin."
            )
        every = last[~np.isnan(last)]
        rank = int((every > last[one, two]).sum()) + 1
        return (
            f"K-composition of {self.head(one)} with {self.head(two)} is {first[one, two]:.3f} at step 0 and "
            f"{last[one, two]:.3f} at the last, number {rank} of {len(every)} pairs, whose median is "
            f"{np.median(every):.3f}; of the twin's pairs the median is {np.nanmedian(theirs):.3f}, the largest "
            f"{np.nanmax(theirs):.3f}."
        )

    def silence(self, story: Story) -> Iterator[str]:
        """What is lost without the heads called induction, and without others."""
        for which, heads in zip(("called", "others"), story.silenced, strict=True):
            if heads and ("silent", story.seed, which, CONTEXT) in self.tests:
                told = [self.tests["silent", story.seed, which, name] for name in (CONTEXT, AGAIN)]
                score, anew = (f"{one.mean:+.2f} ({_likely(one)})" for one in told)
                who = "heads called induction" if which == "called" else "others of their layers"
                yield f"With {len(heads)} {who} silent the {CONTEXT} moves by {score}, the {AGAIN} by {anew}."


def _short(number: float, name: str = "") -> str:
    """A number as it stands in a table, scores of heads to a thousandth."""
    digits = 3 if name in TESTED else 2
    return f"{round(number, digits) + 0.0:.{digits}f}"


def _begun(text: str) -> str:
    return text[0].upper() + text[1:]


def _likely(one: Test) -> str:
    return f"p {one.p:.3f}" if one.verdict else f"p {one.p:.2f}, not significant"


def page(found: Found) -> str:
    """All of it, as Markdown."""
    telling = Telling(found)
    parts = [
        "# When induction appears: small language models of the standard library's source",
        "    python tools/induction_study.py RUNS",
        *setting(found),
    ]
    parts += ["## In short", listed(map(telling.max_dense_length, found.stories))]
    for story in found.stories:
        parts += [f"## Seed {story.seed}", "\n".join(telling.rows(story)), listed(telling.answer(story))]
        last, theirs = classes(story.steps[-1]), classes(found.twin)
        parts += [f"Classes on source at the last step: {last}; of the twin: {theirs}."]
    parts += ["## What was not significant", listed(doubtful(found, telling.tests)), "## What is missing", MISSING]
    return "\n\n".join("\n".join(filled(part)) for part in parts) + "\n"


def listed(sentences: Iterable[str]) -> str:
    """One point each."""
    return "\n".join(f"- {one}" for one in sentences)


def filled(part: str) -> Iterator[str]:
    """The lines of a part, prose filled to the width of a page."""
    for line in part.splitlines():
        table = not line or line.startswith(("|", "#", " "))
        behind = "  " if line.startswith("- ") else ""
        yield from [line] if table else textwrap.wrap(line, WIDTH, subsequent_indent=behind)


def classes(one: Seen) -> str:
    """How many heads are called what on source, the most first."""
    table = one.tables["source"]
    counts = Counter(name.name.split(" ")[0] for head in table.heads for name in head.classes)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def setting(found: Found) -> Iterator[str]:
    """What was trained on what, what was measured, and how the tables are to be read."""
    own, recipe = found.setting, found.setting.recipe
    sizes, seeds = found.task.data.sizes, " and ".join(str(one) for one in own.seeds)
    tokens = recipe.batch * own.length * recipe.steps
    chance = [found.twin.tables["repeated"].heads[0].measures[name].chance for name in TESTED]
    yield (
        f"Decoders of {own.layers} layers of {own.heads} heads, {own.width} wide, attention alone, rotary positions, "
        f"{found.parameters:,} parameters; the source of Python {platform.python_version()}'s standard library in "
        f"{own.vocab:,} pieces (BPE of the train split), {sizes['train'] * own.length:,} tokens to train on; "
        f"{recipe.steps:,} steps of {recipe.batch} rows of {own.length} ({tokens:,} tokens in all), AdamW at "
        f"{recipe.lr:g} behind a warm-up, one thread; seeds {seeds}, each with weights and an order of its own."
    )
    yield (
        f"Measured at {len(own.kept)} kept steps: losses on the same {own.rows} held-out rows spread over the end of "
        f'the library and heads on {own.texts} of these ("source"), and both on {own.texts} rows of {own.length // 2} '
        'repeated random tokens ("repeated"), where all that can be known of the second half is in the first. '
        "**Loss** is in nats, on source. The **in-context "
        "score** is the loss of the last eighth of a row less that of an eighth near its begin (2209.11895 takes token "
        "500 less token 50); the **loss on repetition**, that of the second half of the repeated rows less the "
        "first's. Scores of heads are those of `headwise heads`, of what sinks leave; the heads that are followed were "
        "chosen at the last step on other random tokens. By chance induction on repeated rows is "
        f"{chance[0]:.3f} and previous {chance[1]:.3f}. Behind numbers stand 95 % "
        "intervals over texts (1,000 draws); a star marks a change from the row above that is significant. The "
        "last two columns count heads of a class, on repeated rows / on source. The twin is the same architecture with "
        "fresh weights, as step 0 is with the seed's own."
    )


def doubtful(found: Found, told: Mapping[Key, Test]) -> Iterator[str]:
    """How many tests there were, and which of them came to nothing."""
    yield (
        f"{len(told):,} tests, sign flips of paired differences over texts. Corrected together (Holm) are all heads at "
        "all steps of all seeds, each against the twin's strongest head on the same texts; and together all changes of "
        f"curves between kept steps and what silence does. {sum(not one.verdict for one in told.values()):,} "
        f"are not told "
        f"from chance at {LEVEL:g}."
    )
    for data, name in product(("repeated", "source"), TESTED):
        heads = [one for key, one in told.items() if key[0] == "head" and key[3:5] == (data, name)]
        above, below = sum(one.is_above_chance for one in heads), sum(one.verdict and one.mean < 0 for one in heads)
        most = max((one.mean for one in heads if one.is_above_chance), default=0.0)
        by = f" (by {most:.2f} at most)" if above else ""
        yield (
            f"{_begun(name)} on {data} rows: of {len(heads)} (heads times steps) {above} are surely above the twin's "
            f"strongest{by}, {below} surely below, {len(heads) - above - below} neither."
        )
    for seed, name in product(found.setting.seeds, (CONTEXT, AGAIN, *TESTED)):
        steps = zip(found.setting.kept, found.setting.kept[1:], strict=False)
        none = [f"{before:,} to {step:,}" for before, step in steps if not told["change", seed, step, name].verdict]
        if none:
            yield f"Seed {seed}, {name}: no sure change at steps {', '.join(none)}."
