"""Bugs in the kernel of packed texts, and in what is taken away from every step of training."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
TEXTS, LAYER = "test_texts.py", "test_packed.py"
READ = f"{TEXTS}::test_texts_read_themselves_and_their_sources"
TAKES = f"{TEXTS}::test_the_kernel_takes_what_is_plain_and_short"
KERNEL, CORE = "kernels/varlen_attention.py", "backends/varlen.py"
bug(
    "texts-columns-of-no-keys",
    KERNEL,
    "for c in range(width if rows else 0):",
    "for c in range(width):",
    READ,
)
bug(
    "texts-keys-behind-the-last-count",
    KERNEL,
    "count = min(t + 1, keys) if told(table, At.CAUSAL) else keys",
    "count = min(t + 1, keys) if told(table, At.CAUSAL) else across",
    READ,
)
bug(
    "texts-causal-without-the-own-key",
    KERNEL,
    "count = min(t + 1, keys) if",
    "count = max(1, min(t, keys)) if",
    READ,
)
bug(
    "texts-shares-that-were-not-scaled",
    KERNEL,
    "times(read(form, x + size * c), scale), splat(low))",
    "read(form, x + size * c), splat(low))",
    READ,
)
bug(
    "texts-gradient-without-its-mean",
    KERNEL,
    "minus(read(form, d + c), mean)))",
    "read(form, d + c)))",
    READ,
)
bug(
    "texts-gradient-of-the-last-head-alone",
    KERNEL,
    "int(h > g * each)",
    "0",
    READ,
)
bug(
    "texts-rows-left-by-fours",
    KERNEL,
    "while r < rows:",
    "while r + 4 <= rows:",
    READ,
)
bug(
    "texts-steps-as-if-rows-were-whole",
    "kernels/varlen_attention.py",
    "for step in t.stride()[:2]",
    "for step in (t.shape[1] * t.shape[2], t.shape[2])",
    f"{TEXTS}::test_rows_need_not_lie_whole",
)
bug(
    "texts-widened-by-what-lies-there",
    "kernels/varlen_attention.py",
    "made = [t.new_zeros(t.shape) for t in wide]",
    "made = [torch.full_like(t, 0.5) for t in wide]",
    f"{TEXTS}::test_what_nobody_reads_does_not_matter",
)
bug(
    "texts-whatever-is-added-to-scores",
    CORE,
    "return COMPILER and known and not adds",
    "return COMPILER and known",
    TAKES,
)
bug(
    "texts-of-any-length",
    CORE,
    "if self.whole >= 0 and (where := placed(sight)).longest <= self.whole:",
    "if self.whole >= 0 and (where := placed(sight)).longest:",
    TAKES,
)
bug(
    "texts-of-another-source",
    CORE,
    "(asks, first), (keys, begin) = _texts(at), _texts(told, at)",
    "(asks, first), (keys, begin) = _texts(at), _texts(at)",
    f"{LAYER}::test_a_text_reads_its_own_source[Dot0]",
)
bug(
    "texts-plan-of-a-source-for-all",
    CORE,
    "if source is other and known == kind:",
    "if known == kind:",
    "test_packed.py::test_what_texts_read_of_themselves_and_of_a_source_is_planned_apart",
)
bug(
    "sight-triangle-for-other-keys",
    "tokens.py",
    "if isinstance(self.pattern, Causal) and (first, self.queries.count) == (second, self.keys.count):",
    "if isinstance(self.pattern, Causal) and self.queries.count <= self.keys.count:",
    "contract/test_decode.py",
)
