"""Generated pages about the package: variants, tasks, concepts, and parts of the READMEs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple

import torch

import headwise as hw
from headwise import costs
from headwise.attention.interfaces import Part
from headwise.attention.interfaces.part import REGISTRY
from headwise.attention.masking.patterns import And, Or, Pattern
from headwise.attention.presets import PRESETS
from headwise.attention.spec.attention_spec import SLOTS, AttentionSpec
from headwise.costs.cost_estimate import estimate_cost
from headwise.costs.workload import Workload
from headwise.learn.catalogue import Entry, Result, find_entries
from headwise.learn.entry_text import Words
from headwise.training.data import IGNORE_INDEX, TASKS, Batch, Task, make_task
from headwise.training.data.synthetic_task import SyntheticTask
from measured_pages import table

# --- Variants ------------------------------------------------------------------------------------

MODEL, HEADS, TOKENS, LONG = 512, 8, 1024, 32_768  # sizes for all costs
Row = Sequence[str]


def cost_table() -> tuple[Row, list[Row]]:
    """Header and rows of the table that compares presets."""
    head = [
        "preset",
        "parameters",
        f"MFLOP per token, {TOKENS:,} tokens",
        f"{LONG:,} tokens",
        "cache, bytes per token",
        f"cache, MB at {LONG:,} tokens",
        "backends: forward / with gradients / decode step",
    ]
    rows = [
        [f"[`{name}`](#{name})", *costs_of(name), " / ".join(cpu_backends(specs(name)))]
        for name in PRESETS
    ]
    return head, rows


def specs(name: str) -> AttentionSpec:
    return hw.design(preset=name, model=MODEL, heads=HEADS)


def costs_of(name: str) -> list[str]:
    """Parameters, FLOPs required per token of a short and of a long text, and the size of a bfloat16
    cache: per token, and in all.
    """
    spec = specs(name)
    lines_of_cost = [f"{costs.count_parameters(spec):,}"]
    for tokens in (TOKENS, LONG):
        flops = estimate_cost(spec, Workload(context=tokens)).prefill_flops.total
        lines_of_cost.append(f"{flops / tokens / 1e6:.3f}")
    if spec.pattern.tokens_before_decode != 0:
        return [*lines_of_cost, "-", "-"]
    cache_size = costs.cache_bytes(spec, batch=1, capacity=LONG, bytes_per_number=2)
    per_token = "a state" if spec.is_recurrent else str(2 * costs.cached_numbers_per_token(spec))
    return [*lines_of_cost, per_token, f"{cache_size / 1e6:.3f}"]


def cpu_backends(spec: AttentionSpec) -> list[str]:
    """The backends chosen on the CPU: for a whole text without and with gradients, and for a decode
    step if any.
    """
    whole, trained = hw.why(spec), hw.why(spec, when="grad")
    step = hw.why(spec, tokens="one")
    names = [str(reasons.backend) for reasons in (whole, trained, step)]
    return names if spec.pattern.tokens_before_decode == 0 else names[:2]


def backends_sentence(spec: AttentionSpec) -> str:
    """The backends chosen on the CPU, with the calls that they run."""
    calls = ("for a forward pass", "with gradients", "for a decode step")
    names = cpu_backends(spec)
    calls_of_backend = {
        name: [call for own, call in zip(names, calls, strict=False) if own == name]
        for name in dict.fromkeys(names)
    }
    if len(calls_of_backend) == 1:
        return f"`{names[0]}` for all calls"
    return ", ".join(f"`{name}` {' and '.join(own)}" for name, own in calls_of_backend.items())


def variant_sections() -> Iterator[str]:
    """One section per preset."""
    for name, make in PRESETS.items():
        spec = specs(name)
        parameters, flops, long_flops, per_token, cache_size = costs_of(name)
        lines = [f"### {name}", ""]
        for paragraph in (make.__doc__ or "").strip().split("\n\n"):
            lines += [sentence(paragraph), ""]
        lines += [f"- {formula}" for formula in formulas(spec)]
        lines += [f"- **pattern**: `{spec.pattern.text}`", *rules(spec.pattern)]
        lines += [f"- **parameters**: {parameters} ({share(spec)})"]
        lengths = f"for a sequence of {TOKENS:,} tokens, {long_flops} million for {LONG:,}"
        lines += [f"- **FLOPs**: {flops} million per token, {lengths}"]
        cache_text = (
            "none, because the pattern is not causal"
            if per_token == "-"
            else f"{int(per_token):,} bytes per token in bfloat16"
            if per_token.isdigit()
            else f"a recurrent state of {cache_size} MB at any length"
        )
        lines += [
            f"- **cache**: {cache_text}",
            f"- **backends on a CPU**: {backends_sentence(spec)}",
        ]
        lines += [f"- **backend on CUDA**: `{on_cuda(spec)}`"]
        disagreements = dict.fromkeys(text for part in unusual(spec) for text in part.disagreements)
        lines += [f"- **sources disagree**: {text}" for text in disagreements]
        yield "\n".join(lines)


def on_cuda(spec: AttentionSpec) -> str:
    reasons = hw.why(spec, device="cuda", dtype="bf16", when="grad")
    return str(reasons.backend)


def formulas(spec: AttentionSpec) -> Iterator[str]:
    """The definition of every part that is not a default, with its paper."""
    for part in dict.fromkeys(unusual(spec)):
        paper = (
            f" ([{part.paper}](https://arxiv.org/abs/{part.paper}))"
            if part.paper[:4].isdigit()
            else ""
        )
        yield f"`{part!r}`{paper}: {sentence(type(part).__doc__)}"


def unusual(spec: AttentionSpec) -> list[Part]:
    usual = [part for _, part in hw.design(model=MODEL, heads=HEADS).parts()]
    return [part for _, part in spec.parts() if part not in usual]


def rules(pattern: Pattern) -> Iterator[str]:
    """The definition of a published pattern, with notes on sources that disagree."""
    if isinstance(pattern, And | Or):
        yield from rules(pattern.left)
        yield from rules(pattern.right)
    elif isinstance(pattern, hw.patterns.PerHead):
        yield f"  - {sentence(hw.patterns.PerHead.__doc__)}"
        yield from dict.fromkeys(rule for one in pattern.patterns for rule in rules(one))
    elif pattern not in (hw.patterns.Full(), hw.patterns.Causal()):
        paragraphs = (type(pattern).__doc__ or "").split(">>>")[0].strip().split("\n\n")
        yield from (f"  - {sentence(paragraph)}" for paragraph in paragraphs)


def share(spec: AttentionSpec) -> str:
    """The difference of its parameters from those of multi-head attention."""
    plain = costs.count_parameters(hw.design(model=MODEL, heads=HEADS))
    more = costs.count_parameters(spec) - plain
    return (
        "as multi-head attention" if not more else f"{more:+,} compared with multi-head attention"
    )


def sentence(doc: str | None) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((doc or "").strip().split("\n\n")[0].split())


def other_parts() -> Iterator[str]:
    """Parts that no preset uses: definition, and cost with default choices for the rest."""
    used = {type(part) for name in PRESETS for _, part in specs(name).parts()}
    for cls in (
        cls for _, cls in sorted(REGISTRY.items()) if issubclass(cls, Part) and cls not in used
    ):
        paper = (
            f" ([{cls.paper}](https://arxiv.org/abs/{cls.paper}))"
            if cls.paper[:4].isdigit()
            else ""
        )
        yield f"- `{cls.__name__}`{paper}: {sentence(cls.__doc__)}{extra(cls)}"
        yield from (f"  - sources disagree: {text}" for text in cls.disagreements)


def extra(cls: type[Part]) -> str:
    """Parameters and cache that the part adds to a layer with default choices."""
    slot = next((slot for slot, kind in SLOTS.items() if issubclass(cls, kind)), None)
    plain = hw.design(model=MODEL, heads=HEADS, pattern="causal")
    words = {slot: cls()} if slot else {"modifiers": (cls(),)}
    try:
        spec = hw.design(model=MODEL, heads=HEADS, pattern="causal", **words)
    except hw.SpecError as error:
        return f" Conflicts with the defaults: {error}."
    more = costs.count_parameters(spec) - costs.count_parameters(plain)
    cache_text = 2 * (costs.cached_numbers_per_token(spec) - costs.cached_numbers_per_token(plain))
    cache = "a recurrent state" if spec.is_recurrent else f"{cache_text:+,} bytes per token"
    return f" Parameters {more:+,}, cache {cache}; backends on a CPU: {backends_sentence(spec)}."


def variants_page() -> str:
    """The whole part, as Markdown."""
    head, rows = cost_table()
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    rest = (
        "### Parts without a preset\n\nThese parts belong to no preset; add them to any spec. "
        "Costs are the difference "
        "that the part makes in a causal layer with default choices for all other parts.\n\n"
        + "\n".join(other_parts())
    )
    return "\n\n".join([table, *variant_sections(), rest])


# --- Tasks ---------------------------------------------------------------------------------------


class TaskNotes(NamedTuple):
    """Notes about a task: options of a short task_example, which models the task distinguishes, and
    which not.
    """

    example_options: dict[str, Any]
    distinguishes: str
    does_not_distinguish: str


TASK_NOTES = {
    "copy": TaskNotes(
        {"symbols": 9, "block": 5, "gap": 2},
        "models with one and with two layers (2209.11895, 2408.14332); sliding windows, because "
        "information moves at "
        "most `layers * (window - 1)` tokens; position encodings, on longer sequences than in "
        "training (2402.01032); "
        "linear and softmax attention",
        "MHA, GQA and MQA",
    ),
    "dates": TaskNotes(
        {},
        "correct and broken implementations of cross-attention, padding and decoding with a KV "
        "cache; cross-attention "
        "heads and the true alignments, which are known",
        "most attention variants: all score close to 1",
    ),
    "graph": TaskNotes(
        {"nodes": 14, "chords": 2, "sources": 4},
        "attention patterns, because information moves along edges only; numbers of layers, "
        "because fewer than `reach` "
        "layers cannot solve the task",
        "MHA, GQA and MQA; models for arbitrary graphs, because the pattern is part of the spec "
        "and all examples have "
        "the same graph",
    ),
    "group": TaskNotes(
        {"group": "S3", "length": 12},
        "recurrence and attention; numbers of layers, because A5 needs more layers for longer "
        "rows and cyclic groups "
        "do not (2404.08819); linear recurrences with and without negative eigenvalues "
        "(2411.12537)",
        "variants of softmax attention, for which the task is a negative control: all learn the "
        "training length, and "
        "none generalises parity far beyond it (2207.02098)",
    ),
    "lookup2": TaskNotes(
        {"entities": 2, "attributes": 2, "values": 9, "direct": 1, "composed": 1},
        "possibly methods that compose heads: 2405.08553 suggests that models with fewer heads "
        "than attributes learn "
        "such a task late. Test this before you rely on it. The default model did not learn the "
        "task: with 4 entities, "
        "2 attributes and 16 values its accuracy was 0.39 after 1,600 steps, with a chance level "
        "of 0.06",
        "models that have at least as many heads as attributes",
    ),
    "markov": TaskNotes(
        {"symbols": 3, "length": 16},
        "numbers of layers; stages of training, because models first predict uniformly, then by "
        "unigrams, then by "
        "bigrams (2402.11004)",
        "most variants after convergence, including linear attention, which can count bigrams "
        "too. Compare the number "
        "of steps until convergence instead",
    ),
    "recall": TaskNotes(
        {"vocabulary": 32, "length": 20, "pairs": 4},
        "softmax attention (MHA, GQA or MQA) and linear attention, whose state must grow with the "
        "number of pairs; "
        "windows shorter than the sequence (2312.04927, 2403.17844)",
        "MHA, GQA and MQA",
    ),
}


def tasks_page() -> str:
    """Markdown with a task_section per synthetic task."""
    return "\n\n".join(
        task_section(name) for name, cls in sorted(TASKS.items()) if issubclass(cls, SyntheticTask)
    )


def task_section(name: str) -> str:
    """Markdown task_section about one task."""
    task, notes = make_task(name), TASK_NOTES[name]
    spec = task.model()
    num_params = sum(weight.numel for weight in spec.weights() if weight.trainable)
    layers = " + ".join(str(len(stack.layers)) for stack in spec.stacks)
    options = ", ".join(f"`{field.name}={getattr(task, field.name)!r}`" for field in fields(task))
    chance = ", ".join(f"{metric} {value:.3g}" for metric, value in task.chance.items())
    lines = [
        f"### {name}",
        "",
        task_prose(type(task)),
        "",
        *task_example(make_task(name, **notes.example_options)),
        "",
    ]
    lines += [
        f"- **options**: {options}",
        f"- **task_metrics**: {task_metrics(task)}",
        f"- **chance**: {chance}",
    ]
    width = spec.stacks[-1].model
    lines += [
        (
            f"- **default model**: {spec.kind}, {layers} layers, {width} channels, {num_params:,} "
            "parameters"
        )
    ]
    lines += [
        f"- **distinguishes**: {notes.distinguishes}",
        f"- **does not distinguish**: {notes.does_not_distinguish}",
    ]
    return "\n".join(lines)


def task_prose(cls: type[Task]) -> str:
    """A docstring without its examples, with one line per paragraph."""
    text = (inspect.getdoc(cls) or "").split(">>>")[0].strip()
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def task_metrics(task: Task) -> str:
    """Metrics of `measure` and `score`, with the kinds of their slices."""
    batch = task.batch(0, 64, "valid")
    logits = torch.zeros(*batch.labels.shape, task.model().heads[0].outputs)
    names = list(task.measure(logits, batch))
    names += list(task.score([[]] * len(batch.x), batch)) if task.answers else []
    slices_of_metric: dict[str, list[str]] = {}
    for name in names:
        metric, _, label = name.partition("@")
        slices = slices_of_metric.setdefault(metric, [])
        kind = re.split("[<>=]", label)[0] if re.search("[<>=]", label) else label
        slices += [kind] if label and kind not in slices else []
    return "; ".join(
        metric + (f" by {', '.join(slices)}" if slices else "")
        for metric, slices in slices_of_metric.items()
    )


def task_example(task: Task) -> Iterator[str]:
    """A code block with the first training task_example, or with four of a translation task."""
    batch = task.batch(0, 4)
    yield "```"
    if batch.source is not None:
        for n in range(4):
            yield f"{task.text(batch.source[n].tolist())} -> {task.text(batch.labels[n].tolist())}"
    else:
        yield from aligned(task, batch)
    yield "```"


def aligned(task: Task, batch: Batch) -> Iterator[str]:
    """The first row of a batch: input tokens above their labels."""
    is_real = slice(None) if batch.tokens is None else batch.tokens.is_real[0]
    inputs, labels = batch.x[0][is_real].tolist(), batch.labels[0]
    if labels.dim() == 0:
        yield f"input  {task.text(inputs)}"
        yield f"label  {int(labels)}"
        return
    label_texts = [
        "" if label == IGNORE_INDEX else task.text([label]) for label in labels[is_real].tolist()
    ]
    columns = [
        (task.text([token]), label) for token, label in zip(inputs, label_texts, strict=True)
    ]
    for header, row in zip(("input ", "labels"), zip(*columns, strict=True), strict=True):
        cells = [
            cell.rjust(max(map(len, column))) for cell, column in zip(row, columns, strict=True)
        ]
        yield f"{header}  {' '.join(cells)}".rstrip()


# --- Concepts ------------------------------------------------------------------------------------

# Entries of `headwise learn` in each part of the pages.
CONCEPTS = {
    "look-up": "004-1 004-1e 004-2 003-1.2",
    "five-steps": "003-2.2 002-3.2",
    "queries-keys-values": "000-1.2.1b 000-1.2.1 000-1.2.3 004-5",
    "scale": "001-4b 003-2.1b 001-4c",
    "heads": "001-3 001-3c 003-2.3 002-0 002-2.2b 000-0b 001-3b",
    "parameters": "001-2b 000-1.2.2 002-2.1i",
    "masks": "003-2.2c 003-5.1b 003-8.3b",
    "cross-attention": "004-4 003-5.1d",
    "positions": "003-5.2b 003-5.2f 003-5.2c 003-7.4",
    "recurrence": "003-3.1b 003-3.2 003-4.2 003-3.1c",
    "cost": "000-1d 003-2.3b 003-4.3b",
    "kv-cache": "002-2.3b 002-2.3c 002-2.1d",
    "what-heads-do": "002-2.4 002-2.6c 002-2.6g 002-2.6f 002-2.6e 002-2.2c",
    "circuits": "002-4.3c 002-4.3d 002-4.3f",
    "which-heads-can-go": "002-2.6b 002-2.6h 002-2.6i 003-6.6",
    "how-variants-differ": (
        "002-FF.3 002-4.1 002-4.2b 002-4.3b 002-4.3e 002-2.5c 002-2.5b 003-4.3c 003-4.3"
    ),
    "training": "003-5.2d 003-5.2e 003-5.2 002-FF.1 002-FF.6",
    "misconceptions": "003-7.1 003-7.2 003-7.3 003-7.4 003-7.5 003-7.5b",
    "questions": "003-6.1 003-6.2 003-6.3 003-6.4 003-6.5 003-6.6 003-6.6b 003-6.7",
}


@cache
def run_entry(entry_id: str) -> tuple[Entry, Result]:
    """An entry and the result of its run, for both languages."""
    [entry] = find_entries(entry_id)
    return entry, entry.check()


def concept_list(name: str, language: str) -> str:
    """One item for each entry: its statement, the verdict, the reason with numbers, and the
    command.
    """
    return "\n".join(concept_item(entry_id, language) for entry_id in CONCEPTS[name].split())


def concept_item(entry_id: str, language: str) -> str:
    entry, result = run_entry(entry_id)
    statement = entry.line_en if language == "en" else entry.line_zh
    reason = "<br>".join(result.reason(language).splitlines())
    command = f"`headwise learn {entry_id}`"
    if language == "en":
        return f"- **{statement}** *{result.verdict.value}*. {reason} {command}"
    space = "" if reason.endswith("。") else " "  # the Chinese full stop has a space of its own
    return (
        f"- **{statement}** *{Words(language).verdict(result.verdict)}*。{reason}{space}{command}"
    )


# --- Presets -------------------------------------------------------------------------------------

PAPER = re.compile(r" \((\d{4}\.\d{5}|unilm, 2026)\)\.$")

# The definition of each preset in Chinese; the English one is the first sentence of its docstring.
PRESETS_ZH = {
    "mha": "最初发表的多头注意力：每个头有自己的键和值",
    "gqa": "分组查询注意力：四个查询头共用一个键值头；因果，带 RoPE",
    "mqa": "多查询注意力：所有查询头共用一个键值头；因果，带 RoPE",
    "mla": "潜在注意力（MLA），大小同 DeepSeek-V2-Lite：秩 512，64 个 RoPE 通道和另外 128 个通道",
    "moh": "混合头：四分之一的头始终激活，每个词元再选一半的头",
    "moh_vit": "用于图像的混合头（MoH-ViT）：余弦注意力，带连续的位置偏置",
    "dcmha": "动态组合的头（DCMHA）：混合各头的分数和权重，秩均为 2",
    "mohsa": "重叠头（MOHSA）：第 l 层从相邻的两个头各取 l + 1 个通道",
    "collaborative": "协作注意力：所有头共用一个查询—键空间，宽度为各头之和的一半",
    "talking": "Talking-heads 注意力：在 softmax 前后混合各头",
    "diff": "差分注意力：成对的查询头，宽度为通常的一半，值的宽度不变",
    "diff2": "差分注意力第二版：查询头数加倍，共用键值头",
    "entmax": "1.5-entmax 稀疏注意力：大多数权重恰为零",
    "linear": "线性注意力，特征为 elu(x) + 1：从大小不变的状态解码",
    "performer": "Performer：正的随机特征，softmax 注意力的无偏估计",
    "longformer": "Longformer：两侧各 256 个相邻词元，首词元全局可见",
    "longformer_dilated": "Longformer，其中两个头为空洞窗口：在 1,025 个词元中隔一个关注一个",
    "streaming_retrieval": "检索头关注全部词元，流式头只关注开头 64 个和最近 256 个：各占一半",
    "bigbird": "BigBird：块大小 64；三个相邻块、两个全局块、三个随机块，最多 4,096 个词元",
    "kha": "Knocking-heads 注意力：所有头共用一个对值的小型门控映射",
    "gated": "门控注意力：由查询词元算出的 sigmoid 门逐元素作用于每个头的输出",
    "sinks": "带可学习汇点的 softmax，窗口为 128 个词元，类似 gpt-oss 的带窗口的层",
    "ssmax": "可伸缩 softmax：分数随键数的对数增大，文本变长时权重不被稀释",
    "softpick": "Softpick：低分键的权重为零，权重之和不必为一，因此不需要汇点",
    "stick_breaking": "折棒注意力：最近的键先取走自己的份额；不需要位置编码",
    "forgetting": "遗忘注意力：每个词元在每个头有一个门，降低之前所有键的分数；不需要位置编码",
    "selective": "选择性注意力：第一个头的正分数为之后的查询屏蔽更早的词元，对所有头有效",
    "cope": "上下文位置（CoPE）：键的位置是查询为其后多少个键打开了门",
    "moa": "注意力头混合（MoA）：每个词元从 32 个查询头中选 8 个，所有头共用一个键值头",
    "switchhead": "SwitchHead：2 个头，每个头有 4 个值投影和 4 个输出投影，每个词元各选 2 个",
    "gla": "分组潜在注意力：两个 256 维的潜在向量各供一半的头使用，另有 64 个共用的 RoPE 通道",
    "mlra": "多头低秩注意力：四个 128 维的潜在向量，每个头把在其中两个上的注意力相加",
    "gta": "分组绑定注意力：一个状态既是一组头的值，也是其键的一半，组数为头数的四分之一",
    "tpa": "张量积注意力：键和值是 2 个外积之和，查询是 6 个外积之和",
    "mfa": "多矩阵分解：一个 256 维的键值头，查询经过所有头共用的 512 维空间",
    "mea": "显式组合头（MEA）：键和值是所有头的键和值的学习加权和，每个头的输出有归一化",
    "iha": "交错头（IHA）：每个头有两个伪查询、伪键和伪值，都是各头的加权和，共用一次 softmax",
    "mta": "多词元注意力：分数在 6 个查询和 11 个键上做卷积，权重在各头之间混合",
    "average": "值的因果平均，内存大小不变：合并注意力中的平均分支",
}


PRESET_HEADS = {
    "en": ("preset", "what it is", "paper", "parameters", "cache per token"),
    "zh": ("预设", "说明", "论文", "参数量", "每词元缓存"),
}
CACHE_TEXTS = {"en": {"a state": "a state", "-": "none"}, "zh": {"a state": "固定状态", "-": "无"}}


def presets_table(language: str) -> str:
    """Every preset: its definition, paper, parameters, and bytes of cache per token."""
    rows = []
    for name, make in PRESETS.items():
        text = sentence(make.__doc__)
        paper = PAPER.search(text)
        if paper is None:
            raise ValueError(
                f"the docstring of the preset {name} does not end with its paper: {text!r}"
            )
        what = text[: paper.start()] if language == "en" else PRESETS_ZH[name]
        link = (
            f"[{paper[1]}](https://arxiv.org/abs/{paper[1]})" if paper[1][0].isdigit() else paper[1]
        )
        parameters, _, _, per_token, _ = costs_of(name)
        cache = CACHE_TEXTS[language].get(per_token, f"{per_token} B")
        rows.append((f"[`{name}`](variants.md#{name})", what, link, parameters, cache))
    return table(PRESET_HEADS[language], rows)
