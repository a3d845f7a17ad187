"""The page of `induction_study.py`: tables by training step, and sentences about them."""

from __future__ import annotations

import platform
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

import numpy as np

from headwise.head_analysis.head_classes import MIN_SCORE
from headwise.head_analysis.resampling import Jackknife
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
    tests,
    when,
)
from induction_measures import TESTED, Array, Found, Seen, Story

WIDTH = 120
LIMITS = """\
Training is short, because the processor limits it: 900 steps are less than one pass over the text. The learning rate is
constant, so the runs can be continued. In the models of 2209.11895 induction appears after 2.5 to 5 billion tokens,
hundreds of times as many as here. These runs therefore do not show that induction would not appear later.

There are two seeds of one small size. Induction appears at different steps for different seeds and sizes. Intervals are
over texts and not over seeds. Models with feed-forward layers, longer rows, larger models and other steps were not
measured.

Initialisation and rotary base were chosen after shorter runs, which are not among the tests. With the default
initialisation of this library (Xavier) and a rotary base of 10,000, models of two layers had no induction head at step
800 and models of three layers none at step 400; with base 30 and biases, models of two layers had none at step 150.
With Xavier initialisation, the first layer's mean over all tokens is much larger than the embeddings.

Held-out rows are not independent samples: they come from the last files of the library by name, and several come from
one file. Random tokens differ from the training text, so results on source are reported too. Two curves that change at
the same step need not cause each other. Ablation shows only which heads the model depends on at its last step."""


class PageWriter:
    """Writes tables and sentences about the results, with all tests."""

    def __init__(self, found: Found) -> None:
        self.found, self.kept, self.tests = found, found.setting.kept, tests(found)

    def head(self, number: int) -> str:
        """Name of a head from its number over all layers: layer and number in it."""
        layer, own = divmod(number, self.found.setting.heads)
        return f"{layer}.{own}"

    def rows(self, story: Story) -> Iterator[str]:
        """The table of one seed, by step; a star marks a significant change from the row above."""
        followed = curves(story)
        yield (
            f"| step | loss | {CONTEXT} | {AGAIN} | induction of "
            f"{self.head(story.heads['induction'])} | "
            f"previous of {self.head(story.heads['previous'])} | both on source | largest "
            "K-composition | "
            "induction heads | previous-token heads |"
        )
        yield "|---" * 10 + "|"
        for at, (step, one) in enumerate(zip(self.kept, story.steps, strict=True)):
            cells = [self.cell(story, at, name, curve) for name, curve in followed.items()]
            yield self.row(f"{step:,}", one, cells, story.heads)
        theirs = self.found.twin
        plain = [in_context(theirs.losses["source"]), again(theirs.losses["repeated"])]
        plain += [theirs.scores["repeated", name][:, story.heads[name]] for name in TESTED]
        cells = [_short(float(one.mean()), name) for one, name in zip(plain, followed, strict=True)]
        yield self.row("baseline", theirs, cells, story.heads)

    def row(self, name: str, one: Seen, cells: Sequence[str], heads: Mapping[str, int]) -> str:
        """One row: curves, scores of the selected heads on source, and number of heads by class."""
        source = " and ".join(
            f"{np.nanmean(one.scores['source', own][:, heads[own]]):.2f}" for own in TESTED
        )
        counts = [
            " / ".join(str(one.called[data, own]) for data in ("repeated", "source"))
            for own in TESTED
        ]
        through = f"{np.nanmax(one.composition):.3f}"
        return (
            "| "
            + " | ".join(
                [name, f"{one.losses['source'].mean():.2f}", *cells, source, through, *counts]
            )
            + " |"
        )

    def cell(self, story: Story, at: int, name: str, curve: Array) -> str:
        """A mean over texts with its confidence interval."""
        low, high = Jackknife.of_ratio(curve.T).interval()
        star = "*" if at and self.tests["change", story.seed, self.kept[at], name].verdict else ""
        numbers = (_short(float(number), name) for number in (curve[at].mean(), low[at], high[at]))
        return "{}{star} ({} to {})".format(*numbers, star=star)

    def summary(self, story: Story) -> str:
        """One sentence: when induction appears for one seed, and whether the in-context score falls
        with it.
        """
        between = appears(self.kept, called(self.found, story, self.tests))
        followed = curves(story)
        (own, first, last), (theirs, begins, ends) = (
            when(self.kept, followed[one]) for one in ("induction", CONTEXT)
        )
        if between is None:
            low, high = Jackknife.of_ratio(followed[CONTEXT].T).interval()
            falls = "falls nevertheless" if high[-1] < 0 else "does not fall either"
            return (
                f"Seed {story.seed}: no induction head within {self.kept[-1]:,} steps. The "
                f"in-context score {falls}: "
                f"{followed[CONTEXT][-1].mean():.2f} ({low[-1]:.2f} to {high[-1]:.2f}) at the "
                "last step."
            )
        order = (
            "before"
            if ends < first
            else "after"
            if begins > last
            else "not significantly before or after"
        )
        return (
            f"Seed {story.seed}: induction appears between steps {between[0]:,} and "
            f"{between[1]:,}. The score of its "
            "head "
            f"is halfway at step {own:,.0f} ({first:,.0f} to {last:,.0f}), the in-context score "
            f"at step {theirs:,.0f} "
            f"({begins:,.0f} to {ends:,.0f}), {order} the head."
        )

    def answer(self, story: Story) -> Iterator[str]:
        """Sentences: when induction appears for one seed, and how the other curves change."""
        counts = called(self.found, story, self.tests)
        between = appears(self.kept, counts)
        chosen, num_heads = (
            self.head(story.heads["induction"]),
            len(story.steps[-1].tables["repeated"].heads),
        )
        if between is None:
            most = np.nanmean(story.steps[-1].scores["repeated", "induction"], 0).max()
            yield (
                f"Induction does not appear within {self.kept[-1]:,} steps: at the last step no "
                "head is an induction "
                "head "
                f"on repeated random tokens. The largest score is {most:.2f} (head {chosen})."
            )
        else:
            yield (
                f"Induction appears between steps {between[0]:,} and {between[1]:,}: up to the "
                "first of these steps no "
                "head, "
                "and from the second on at least one head is an induction head on repeated random "
                "tokens, "
                "significantly above the strongest head of the random baseline. At the last step "
                f"{counts[-1]} of {num_heads} heads are induction heads."
            )
        for name, curve in curves(story).items():
            yield self.half(story, name, curve)
        yield self.below(story)
        yield self.composed(story)
        yield from self.silence(story)

    def half(self, story: Story, name: str, curve: Array) -> str:
        """When a curve is halfway, and the steps with a significant change."""
        sure = {
            f"{before:,} to {step:,}": one.mean
            for before, step in zip(self.kept, self.kept[1:], strict=False)
            if (one := self.tests["change", story.seed, step, name]).verdict
        }
        whose = f"{name} of {self.head(story.heads[name])}" if name in TESTED else name
        if not sure:
            return f"{_begun(whose)}: no change from one saved step to the next is significant."
        if abs(curve[-1].mean() - curve[0].mean()) < MIN_SCORE:
            first, last = (_short(float(curve[at].mean()), name) for at in (0, -1))
            changes = f"{len(sure)} changes are significant"
            return (
                f"{_begun(whose)} changes from {first} to {last}, by less than {MIN_SCORE:g}; "
                f"{changes}."
            )
        middle, low, high = when(self.kept, curve)
        largest = max(sure, key=lambda one: abs(sure[one]))
        return (
            f"{_begun(whose)} is halfway between its first and its last value at step "
            f"{middle:,.0f} ({low:,.0f} to "
            f"{high:,.0f}). {len(sure)} of {len(self.kept) - 1} changes are significant; the "
            "largest is at steps "
            f"{largest} "
            f"({sure[largest]:+.2f})."
        )

    def below(self, story: Story) -> str:
        """Number of previous-token heads by layer: an induction head needs one in a lower layer."""
        heads = story.steps[-1].tables["repeated"].heads
        counts = Counter(
            one.layer for one in heads if "previous" in [own.name for own in one.classes]
        )
        layer_counts = " and ".join(
            f"{counts[layer]} in layer {layer}" for layer in range(self.found.setting.layers)
        )
        most = max(one.measures["previous"].value for one in heads if not one.layer)
        return (
            f"Previous-token heads at the last step: {layer_counts}; the largest score in layer 0 "
            f"is {most:.2f}. An "
            "induction head needs the output of a previous-token head in a lower layer "
            "(2209.11895)."
        )

    def composed(self, story: Story) -> str:
        """K-composition of the two selected heads, compared with all pairs."""
        one, two = story.heads["previous"], story.heads["induction"]
        last, first, theirs = (
            each.composition for each in (story.steps[-1], story.steps[0], self.found.twin)
        )
        if np.isnan(last[one, two]):
            most, begun, other = (np.nanmax(each) for each in (last, first, theirs))
            return (
                f"Head {self.head(two)} has the largest induction score, but is not in a later "
                "layer than head "
                f"{self.head(one)}. The largest K-composition of any two heads is {begun:.3f} at "
                f"step 0, {most:.3f} at "
                f"the last step and {other:.3f} for the random baseline."
            )
        every = last[~np.isnan(last)]
        rank = int((every > last[one, two]).sum()) + 1
        return (
            f"The K-composition of head {self.head(one)} with head {self.head(two)} is "
            f"{first[one, two]:.3f} at step 0 "
            f"and {last[one, two]:.3f} at the last step, number {rank} of {len(every)} pairs with "
            "a median of "
            f"{np.median(every):.3f}. The pairs of the random baseline have a median of "
            f"{np.nanmedian(theirs):.3f} and "
            f"a maximum of {np.nanmax(theirs):.3f}."
        )

    def silence(self, story: Story) -> Iterator[str]:
        """Effect of ablating the induction heads, and of ablating other heads."""
        for which, heads in zip(("called", "others"), story.silenced, strict=True):
            if heads and ("silent", story.seed, which, CONTEXT) in self.tests:
                tests = [self.tests["silent", story.seed, which, name] for name in (CONTEXT, AGAIN)]
                score, anew = (f"{one.mean:+.2f} ({_likely(one)})" for one in tests)
                which_heads = (
                    "induction heads" if which == "called" else "other heads of their layers"
                )
                changes = f"the {CONTEXT} changes by {score} and the {AGAIN} by {anew}"
                yield f"If {len(heads)} {which_heads} are ablated, {changes}."


def _short(number: float, name: str = "") -> str:
    """Format a number for a table; scores of heads have three digits."""
    digits = 3 if name in TESTED else 2
    return f"{round(number, digits) + 0.0:.{digits}f}"


def _begun(text: str) -> str:
    return text[0].upper() + text[1:]


def _likely(one: Test) -> str:
    return f"p {one.p:.3f}" if one.verdict else f"p {one.p:.2f}, not significant"


def page(found: Found) -> str:
    """The page as Markdown."""
    writer = PageWriter(found)
    parts = [
        "# When induction heads appear in small language models",
        "This page shows at which training step induction heads appear in small language models "
        "of source code, and "
        "whether the loss changes at the same steps. It is an example of a study with the head "
        "measures of "
        "[`headwise heads`](../heads.md). This command trains the models and writes the page:",
        "    python tools/induction_study.py RUNS",
        *setting(found),
    ]
    parts += ["## Summary", listed(map(writer.summary, found.stories))]
    for story in found.stories:
        parts += [
            f"## Seed {story.seed}",
            "\n".join(writer.rows(story)),
            listed(writer.answer(story)),
        ]
        last, theirs = classes(story.steps[-1]), classes(found.twin)
        parts += [f"Classes on source at the last step: {last}; of the random baseline: {theirs}."]
    parts += [
        "## What was not significant",
        listed(doubtful(found, writer.tests)),
        "## Limits",
        LIMITS,
    ]
    return "\n\n".join("\n".join(filled(part)) for part in parts) + "\n"


def listed(sentences: Iterable[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {one}" for one in sentences)


def filled(part: str) -> Iterator[str]:
    """The lines of a part, prose filled to the width of a page."""
    for line in part.splitlines():
        table = not line or line.startswith(("|", "#", " "))
        behind = "  " if line.startswith("- ") else ""
        yield from [line] if table else textwrap.wrap(line, WIDTH, subsequent_indent=behind)


def classes(one: Seen) -> str:
    """Number of heads by class on source, most frequent first."""
    table = one.tables["source"]
    counts = Counter(name.name.split(" ")[0] for head in table.heads for name in head.classes)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def setting(found: Found) -> Iterator[str]:
    """Models, data, measurements, and the columns of the tables."""
    own, recipe = found.setting, found.setting.recipe
    sizes, seeds = found.task.data.sizes, " and ".join(str(one) for one in own.seeds)
    tokens = recipe.batch * own.length * recipe.steps
    chance = [found.twin.tables["repeated"].heads[0].measures[name].chance for name in TESTED]
    yield (
        f"**Models.** Decoders with {own.layers} attention layers of {own.heads} heads and no "
        "feed-forward layers, "
        "width "
        f"{own.width}, rotary positions, {found.parameters:,} parameters."
    )
    yield (
        f"**Data.** The source of Python {platform.python_version()}'s standard library, "
        "tokenized with a vocabulary "
        "of "
        f"{own.vocab:,} (BPE of the train split); {sizes['train'] * own.length:,} tokens for "
        "training."
    )
    yield (
        f"**Training.** {recipe.steps:,} steps of {recipe.batch} rows of {own.length} tokens "
        f"({tokens:,} tokens in "
        "all), "
        f"AdamW with a learning rate of {recipe.lr:g} after warm-up, one thread. Seeds {seeds} "
        "have different initial "
        "weights and orders of examples."
    )
    yield (
        f"**Measurements** were made at {len(own.kept)} saved steps, on two sets of rows. "
        f"*Source*: {own.rows} "
        "held-out "
        f"rows from the end of the library, with heads measured on {own.texts} of them. "
        f"*Repeated*: {own.texts} rows "
        "of "
        f"{own.length // 2} random tokens that occur twice, so that the first half determines the "
        "second half."
    )
    yield "\n".join(
        (
            "| column | meaning |",
            "|---|---|",
            "| loss | nats per token, on source |",
            "| in-context score | loss of the last eighth of a row minus the loss of an eighth "
            "near its beginning "
            "(2209.11895: loss of token 500 minus loss of token 50) |",
            "| loss on repetition | loss of the second half of the repeated rows minus the loss "
            "of the first half |",
            "| induction of H, previous of H | score of head H (layer.head) on repeated rows, as "
            "in `headwise heads`, "
            f"without attention sinks. The chance levels are {chance[0]:.3f} and {chance[1]:.3f} |",
            "| both on source | the scores of these two heads on source |",
            "| largest K-composition | largest K-composition of any two heads |",
            "| induction heads, previous-token heads | number of heads of this class, on repeated "
            "rows / on source |",
        )
    )
    yield (
        "The two heads were chosen at the last step, on other random tokens. Parentheses have 95 "
        "% intervals over "
        "texts "
        "(1,000 resamples). A star marks a significant change from the row above. The random "
        "baseline is the same "
        "architecture with other random weights; step 0 has the initial weights of the seed."
    )


def doubtful(found: Found, tests_by_key: Mapping[Key, Test]) -> Iterator[str]:
    """Number of tests, and those that are not significant."""
    yield (
        f"There are {len(tests_by_key):,} sign-flip tests of paired differences over texts. One "
        "correction (Holm) "
        "covers all heads at all steps of all seeds, each compared with the strongest head of the "
        "random baseline on "
        "the same texts. A "
        "second correction covers the changes of curves between saved steps and the effects of "
        "ablation. "
        f"{sum(not one.verdict for one in tests_by_key.values()):,} tests are not significant at "
        f"{LEVEL:g}."
    )
    for data, name in product(("repeated", "source"), TESTED):
        heads = [
            one
            for key, one in tests_by_key.items()
            if key[0] == "head" and key[3:5] == (data, name)
        ]
        above, below = (
            sum(one.is_above_chance for one in heads),
            sum(one.verdict and one.mean < 0 for one in heads),
        )
        most = max((one.mean for one in heads if one.is_above_chance), default=0.0)
        by = f" (by {most:.2f} at most)" if above else ""
        yield (
            f"{_begun(name)} on {data} rows: of {len(heads)} scores (heads times steps), {above} "
            "are significantly "
            "above "
            f"the strongest head of the random baseline{by}, {below} significantly below, and "
            f"{len(heads) - above - below} neither."
        )
    for seed, name in product(found.setting.seeds, (CONTEXT, AGAIN, *TESTED)):
        steps = zip(found.setting.kept, found.setting.kept[1:], strict=False)
        none = [
            f"{before:,} to {step:,}"
            for before, step in steps
            if not tests_by_key["change", seed, step, name].verdict
        ]
        if none:
            yield f"Seed {seed}, {name}: no significant change at steps {', '.join(none)}."
