"""The generated parts of README.md and README.zh-CN.md: examples, presets, benchmarks, and points
of other tools.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import comparison_page
import variants_page
from benchmark_pages import MEASURED, format_seconds, table
from headwise.attention.presets import PRESETS

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FENCES = {".py": "python", ".toml": "toml"}
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
    "average": "值的因果平均，内存大小不变：合并注意力中的平均分支",
}


# Rows of docs/bench.json, with the work in both languages.
BENCHMARKS = {
    "window of 256, forward": {
        "en": "sliding window of 256, 8,192 tokens, forward",
        "zh": "宽 256 的滑动窗口，8,192 个词元，前向",
    },
    "decode 8k, fp32": {
        "en": "decode step, 32 heads on 8 key-value heads, 8k cached tokens, fp32",
        "zh": "解码一步，32 个头、8 个键值头，缓存 8k 个词元，fp32",
    },
    "107M Llama, bf16, batch 4, 2048 tokens, headwise": {
        "en": "decode step of a 107M Llama, bf16, batch of 4, 2,048 tokens",
        "zh": "107M 的 Llama 解码一步，bf16，批大小 4，2,048 个词元",
    },
    "DCMHA core, 1,024 tokens, forward and backward": {
        "en": "DCMHA core, 1,024 tokens, forward and backward",
        "zh": "DCMHA 的核心计算，1,024 个词元，前向和反向",
    },
    "training step, 0.8 M parameters, float32": {
        "en": "training step of a GPT, 0.8M parameters, fp32",
        "zh": "GPT 训练一步，0.8M 参数，fp32",
    },
}
BENCHMARK_TEXTS = {
    "en": ("{processor}, {threads} threads, torch {torch}.", ("work", "headwise", "speedup over")),
    "zh": (
        "{processor}，{threads} 个线程，torch {torch}。",
        ("任务", "headwise 用时", "相对加速比"),
    ),
}
PRESET_HEADS = {
    "en": ("preset", "what it is", "paper", "parameters", "cache per token"),
    "zh": ("预设", "说明", "论文", "参数量", "每词元缓存"),
}
CACHE_TEXTS = {"en": {"a state": "a state", "-": "none"}, "zh": {"a state": "固定状态", "-": "无"}}
GROUP_HEADS = {
    "en": ("features", "number", "headwise", "best other tool"),
    "zh": ("功能", "项数", "headwise", "其他工具中的最高分"),
}
GROUPS_ZH = {
    "Views": "视图",
    "Selection": "选取",
    "Length and data": "长度与数据",
    "Models": "模型",
    "Head analysis": "头的分析",
    "Intervention": "干预",
    "Workflow": "工作流程",
}


def example(name: str) -> str:
    """A file of examples/ as a block of code; its first line names a file that commands use."""
    path = EXAMPLES / name
    code = path.read_text(encoding="utf-8").rstrip("\n")
    return f"```{FENCES[path.suffix]}\n{code}\n```"


def presets_table(language: str) -> str:
    """Every preset: its definition, paper, parameters, and bytes of cache per token."""
    rows = []
    for name, make in PRESETS.items():
        text = variants_page.sentence(make.__doc__)
        paper = PAPER.search(text)
        if paper is None:
            raise ValueError(
                f"the docstring of the preset {name} does not end with its paper: {text!r}"
            )
        what = text[: paper.start()] if language == "en" else PRESETS_ZH[name]
        link = (
            f"[{paper[1]}](https://arxiv.org/abs/{paper[1]})" if paper[1][0].isdigit() else paper[1]
        )
        parameters, _, per_token, _ = variants_page.costs_of(name)
        cache = CACHE_TEXTS[language].get(per_token, f"{per_token} B")
        rows.append((f"[`{name}`](docs/variants.md#{name})", what, link, parameters, cache))
    return table(PRESET_HEADS[language], rows)


def benchmark_rows(language: str) -> str:
    """Five rows of docs/bench.json with all libraries that they were compared with, and the
    machine.
    """
    report = json.loads(MEASURED.read_text())
    rows = {row["name"]: row for row in report["rows"]}
    lines = []
    for name, work in BENCHMARKS.items():
        speedups = "<br>".join(
            f"{peer}: {ratio:.2f} x" for peer, ratio in rows[name]["ratio"].items()
        )
        lines.append((work[language], format_seconds(rows[name]["ours_s"]), speedups))
    sentence, head = BENCHMARK_TEXTS[language]
    machine = report["machine"] | {"torch": report["machine"]["versions"]["torch"]}
    return f"{sentence.format(**machine)}\n\n{table(head, lines)}"


def compared_groups(language: str) -> str:
    """Points of headwise and of the best other tool in each group of features."""
    comparison = comparison_page.load_comparison()
    rows = []
    for group in comparison.groups:
        features = [feature for feature in comparison.features if feature.group == group]
        ours = sum(comparison_page.POINTS[feature.ours] for feature in features)
        points = {
            tool: sum(comparison_page.POINTS[feature.marks[tool.code]] for feature in features)
            for tool in comparison.tools
        }
        best = max(points.values())
        names = ", ".join(
            f"[{tool.name}]({tool.address})" for tool, own in points.items() if own == best
        )
        title = group if language == "en" else GROUPS_ZH[group]
        rows.append((title, str(len(features)), f"{ours:g}", f"{best:g}: {names}"))
    return table(GROUP_HEADS[language], rows)
