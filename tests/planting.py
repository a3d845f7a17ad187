"""The form in which bugs are planted, and short names for the tests that catch them."""

from __future__ import annotations

from mutate import Bug

BUGS: list[Bug] = []


def bug(name: str, file: str, old: str, new: str, *tests: str) -> None:
    """One more."""
    BUGS.append(Bug(name, file, old=old, new=new, tests=tests))


def truth(case: str) -> str:
    """Output against the reference."""
    return f"contract/test_truth.py::test_output_is_the_references[{case}]"


def decode(case: str) -> str:
    """Cached decode against one pass."""
    return f"contract/test_decode.py::test_cached_decode_is_one_pass[{case}]"


def ring(case: str) -> str:
    """A ring against one pass."""
    return f"contract/test_decode.py::test_a_ring_forgets_only_what_nobody_reads[{case}]"


def ragged(case: str) -> str:
    """Rows of different lengths against each alone."""
    return f"contract/test_decode.py::test_ragged_rows_decode_on_from_where_each_ends[{case}]"


def edge(case: str, backend: str) -> str:
    """Blocks against dense, where a block ends."""
    return f"contract/test_edges.py::test_blocks_end_where_they_should[{case}-{backend}]"


def cut(case: str) -> str:
    """Cut against silenced."""
    return f"contract/test_axes.py::test_cutting_is_silencing[{case}]"


def layers(case: str) -> str:
    """A layer of a released architecture."""
    return f"anchors/test_transformers.py::test_layers_agree[{case}]"


def steps(case: str) -> str:
    """Decoding against a released architecture's own cache."""
    return f"anchors/test_transformers.py::test_decoding_agrees[{case}]"


def frequencies(case: str) -> str:
    """Rotary frequencies against the released ones."""
    return f"anchors/test_transformers.py::test_frequencies[{case}]"


IDENTITY = "anchors/test_identities.py::"
MHA = "anchors/test_torch_mha.py::"
STORIES = "anchors/test_stories260k.py::"
PATTERN = "test_pattern.py::"
COUNTS = "contract/test_counts.py::"
