"""Bugs in queries packed by who speaks."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
FILE, PACKS = "backends/routed.py", "backends/speaking.py"
TESTS = "test_routed_backend.py"
OPEN = f"{TESTS}::test_open_heads_read_as_if_all_were_asked"
bug(
    "routed-fillers-weigh-backwards",
    FILE,
    "return o_BGRV, lse_BGR.masked_fill_(~self.pack.live_BGR, torch.inf)",
    "return o_BGRV, lse_BGR",
    f"{OPEN}[causal()-6-uneven]",
)
bug(
    "routed-merged-the-other-way-round",
    FILE,
    "torch.lerp(before, o, torch.sigmoid(apart)[..., None])",
    "torch.lerp(o, before, torch.sigmoid(apart)[..., None])",
    f"{OPEN}[causal()-6-even]",
)
bug(
    "routed-first-of-a-chunk-reads-nothing-of-its-own",
    PACKS,
    "own = min(first + self.ahead, self.keys - 1)",
    "own = min(first + self.ahead + 1, self.keys - 1)",
    f"{OPEN}[causal()-6-even]",
)
bug(
    "routed-rows-barred-too-few",
    PACKS,
    "torch.searchsorted(pack.place_BGR, asked - 1).amax((0, 1))",
    "torch.searchsorted(pack.place_BGR, asked - 1).amin((0, 1))",
    f"{OPEN}[causal()-6-even]",
)
bug(
    "routed-rows-left-out-backwards",
    PACKS,
    "torch.searchsorted(pack.place_BGR, asked).amin((0, 1))",
    "torch.searchsorted(pack.place_BGR, asked).amax((0, 1))",
    f"{OPEN}[causal()-6-even]",
)
bug(
    "routed-heads-of-a-group-are-its-first",
    PACKS,
    "head = torch.tensor(group, device=x.device)[g] * each + x % each",
    "head = torch.tensor(group, device=x.device)[g] * each",
    f"{OPEN}[full()-2-even]",
)
bug(
    "routed-last-of-a-chunk-is-in-the-next",
    PACKS,
    "rows + rank - 1 - chunk * own // count",
    "rows + rank - chunk * own // count",
    f"{OPEN}[causal()-2-even]",
    f"{TESTS}::test_any_length_and_load",
)
bug(
    "routed-forgets-what-is-cached",
    PACKS,
    "return self._triangle(place_BGR + self.ahead + 1 - keys.start",
    "return self._triangle(place_BGR + 1 - keys.start",
    f"{OPEN}[causal()-6-even]",
)
bug(
    "routed-reads-neighbours-of-its-heads",
    FILE,
    "return x_BGSK[:, regular.start : regular.stop : step]",
    "return x_BGSK[:, regular.start : regular.start + len(heads)]",
    f"{TESTS}::test_any_length_and_load",
)
bug(
    "routed-rows-of-a-batch-are-one",
    PACKS,
    "device=place_BGR.device) % allowed_BTS.shape[0]",
    "device=place_BGR.device) * 0",
    f"{TESTS}::test_padding_and_packed_documents[left-causal()]",
)
bug(
    "routed-whole-whatever-tokens-say",
    PACKS,
    "whole = plain and each == 1 and",
    "whole = each == 1 and",
    f"{TESTS}::test_padding_and_packed_documents[right-causal()]",
)
bug(
    "routed-gates-of-other-texts",
    "backends/packed.py",
    "[gate[n] for gate in opened]",
    "[gate[0] for gate in opened]",
    f"{TESTS}::test_packed_texts_take_their_gates_with_them[()]",
)
bug(
    "routed-deaf-where-gradients-pass",
    "parts/routed.py",
    'return self.router != "norm"',
    "return True",
    f"{TESTS}::test_it_takes_what_it_can",
)
bug(
    "routed-shuts-by-any-gate",
    FILE,
    "gate.shares(job.spec) if gate.seals() or not job.grad else None",
    "gate.shares(job.spec)",
    f"{TESTS}::test_it_takes_what_it_can",
)
bug(
    "routed-in-a-graph",
    FILE,
    "    if job.compiled:\n",
    "    if job.compiled and job.grad:\n",
    f"{TESTS}::test_what_it_cannot_is_refused",
)
bug(
    "routed-spends-half-a-chunk-less",
    FILE,
    "Fraction(work.queries * (count + 1), 2)",
    "Fraction(work.queries * count, 2)",
    f"{TESTS}::test_it_spends_what_torch_counts[512-causal()]",
)
bug(
    "routed-mixes-precisions",
    FILE,
    "    if torch.is_autocast_enabled(q.device.type):\n",
    "    if torch.is_autocast_enabled(q.device.type) and not job.grad:\n",
    f"{TESTS}::test_under_autocast",
)
