"""Trace files: values against plain arrays, and damaged files."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays

import headwise as hw
from headwise.observe.traces import (
    AttentionCallRecord,
    AttentionRecord,
    PackedMask,
    TokenRow,
    Trace,
    export_weights,
    save_trace,
    trace_from_weights,
)
from headwise.observe.traces.attention_trace import max_pool_weights
from headwise.observe.traces.trace_file import CHECKSUM_KEY, DOCUMENT_KEY
from headwise.util.errors import SpecError
from support.refusals import refused_cases

HOSTILE = ("\x1b[31m", "</script>", "\ud800", "\u202eabc", "a\nb", '"', "=1+1", "", "字")
SIZES = st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(1, 9)] * 2)


def masks() -> st.SearchStrategy[np.ndarray]:
    numbers = st.sampled_from([0.0, -1.5, 2.0, -np.inf, float(np.finfo(np.float32).min)])
    return SIZES.flatmap(
        lambda shape: st.one_of(
            arrays.arrays(bool, shape),
            arrays.arrays(np.float32, shape, elements=numbers),
            arrays.arrays(np.float32, (*shape[:2], shape[2] + shape[3] - 1), elements=numbers).map(
                lambda band: np.stack(
                    [band[..., shape[2] - 1 - t :][..., : shape[3]] for t in range(shape[2])], -2
                )
            ),
        )
    )


@given(masks())
def test_a_packed_mask_unpacks_to_its_values(a: np.ndarray):
    grid = PackedMask.pack(a)
    expected = np.where(a, 0, -np.inf) if a.dtype == bool else a
    for row in range(a.shape[0]):
        for head in range(a.shape[1]):
            found = grid.unpack_rows(row, head, 0, a.shape[2])
            np.testing.assert_array_equal(np.broadcast_to(found, a.shape[2:]), expected[row, head])
            np.testing.assert_array_equal(
                np.broadcast_to(
                    grid.unpack_rows(row, head, 1, a.shape[2]), (a.shape[2] - 1, a.shape[3])
                ),
                expected[row, head, 1:],
            )


def test_a_grid_is_small():
    far = np.arange(64) - np.arange(64)[:, None]
    assert PackedMask.pack((far <= 0)[None, None]).values.nbytes == 64 * 8
    assert PackedMask.pack((0.5 * far)[None, None]).values.nbytes == 4 * 127
    low = np.where(far <= 0, 0, np.finfo(np.float32).min).astype(np.float32)[None, None]
    assert PackedMask.pack(low).form == "bits"


@given(
    arrays.arrays(
        np.float64, st.tuples(st.integers(1, 20), st.integers(1, 20)), elements=st.floats(0, 1)
    ),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.integers(1, 20),
)
def test_a_cell_of_a_picture_is_the_largest_weight_in_it(a, size, band):
    bands = [
        (start, min(len(a), start + band), a[start : start + band])
        for start in range(0, len(a), band)
    ]
    found = max_pool_weights(bands, a.shape, size)
    high, wide = (min(request, count) for request, count in zip(size, a.shape, strict=True))
    expected = np.zeros((high, wide))
    for t in range(a.shape[0]):
        for s in range(a.shape[1]):
            y, x = _cell(t, high, a.shape[0]), _cell(s, wide, a.shape[1])
            expected[y, x] = max(expected[y, x], a[t, s])
    np.testing.assert_array_equal(found, np.round(expected.astype(np.float32) * 255))


def _cell(s: int, wide: int, count: int) -> int:
    """The last cell that begins at or before s."""
    return max(x for x in range(wide) if x * count // wide <= s)


def random_trace(words: tuple[str, ...] = ("a", "b", "c")) -> Trace:
    """Two queries read three keys, then one more reads them and a fourth."""
    draw = np.random.default_rng(0)
    q, k, v = (
        draw.normal(size=(1, count, heads, 4)).astype(np.float32)
        for count, heads in ((3, 2), (4, 1), (4, 1))
    )
    calls = (
        AttentionCallRecord((0, 2), (0, 3), scale=0.5, cap=2.0, grids=(0,)),
        AttentionCallRecord((2, 3), (1, 4), first=1, scale=0.5, first_query_row=2),
    )
    sinks = np.array([0.3, -1.0], np.float32)
    options = {"q": q, "k": k, "v": v, "sinks": sinks}
    layer = AttentionRecord(
        *("decoder.0.attention", "decoder", 0, "attention", "h.0", 2, (0, 0), "text", "text"),
        calls,
        options,
    )
    row = TokenRow(
        tuple(range(len(words))), words, tuple((n, n + 1) for n in range(len(words))), "abc"
    )
    grid = PackedMask.pack(np.array([[[[1, 0, 1], [1, 1, 1]]]], bool))
    return Trace(
        {"name": "small"},
        {"text": (row,)},
        (layer,),
        (grid,),
        {"decoder.1.attention": "it was not called"},
    )


def by_hand(trace: Trace, head: int) -> np.ndarray:
    q, k = (trace.layers[0].arrays[name].astype(np.float64)[0] for name in "qk")
    s = 2.0 * np.tanh(0.5 * q[:2, head] @ k[:3, 0].T / 2.0)
    s[0, 1] = -np.inf
    sink = float(trace.layers[0].arrays["sinks"][head])
    found = np.zeros((3, 4))
    found[:2, :3] = np.exp(s) / (np.exp(s).sum(1, keepdims=True) + np.exp(sink))
    last = 0.5 * q[2, head] @ k[1:4, 0].T
    found[2, 1:] = np.exp(last) / (np.exp(last).sum() + np.exp(sink))
    return found


@pytest.mark.parametrize("head", [0, 1])
def test_rows_by_hand(head: int):
    trace = random_trace()
    np.testing.assert_allclose(trace.head_weights(0, head), by_hand(trace, head), atol=1e-6)
    np.testing.assert_allclose(
        trace.head_weights(0, head, slice(1, 3)), by_hand(trace, head)[1:], atol=1e-6
    )


def test_a_file_round_trips(tmp_path: Path):
    trace = random_trace(HOSTILE).with_thumbnails(2)
    save_trace(trace, tmp_path / "a.trace")
    again = hw.load_trace(tmp_path / "a.trace")
    assert again.streams == trace.streams
    assert again.skipped == trace.skipped
    assert again.layers[0].calls == trace.layers[0].calls
    np.testing.assert_array_equal(again.head_weights(0, 1), trace.head_weights(0, 1))
    np.testing.assert_array_equal(again.thumbnail(0, 1), trace.weight_tile(0, 1, size=(2, 2)))


def test_a_file_opens_without_torch(tmp_path: Path):
    save_trace(random_trace().with_thumbnails(), tmp_path / "a.trace")
    message = (
        "import sys, headwise; t = headwise.load_trace(sys.argv[1]); t.head_weights(0, 0); "
        "print(t, 'torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", message, str(tmp_path / "a.trace")], capture_output=True, text=True
    )
    assert run.stdout.endswith("False\n"), run.stderr


@given(st.integers(0, 10**9), st.integers(1, 255))
def test_a_changed_byte_is_reported(place: int, change: int):
    path = Path(_saved())
    whole = path.read_bytes()
    at = place % len(whole)
    other = path.with_name("other.trace")
    other.write_bytes(whole[:at] + bytes([whole[at] ^ change]) + whole[at + 1 :])
    try:
        again = hw.load_trace(other)
    except SpecError:
        return
    assert again.streams == random_trace().streams  # padding behind the header says nothing
    np.testing.assert_array_equal(again.head_weights(0, 0), random_trace().head_weights(0, 0))


@given(st.integers(0, 10**9))
def test_a_truncated_file_is_reported(place: int):
    path = Path(_saved())
    whole = path.read_bytes()
    short = path.with_name("short.trace")
    short.write_bytes(whole[: place % len(whole)])
    with pytest.raises(SpecError):
        hw.load_trace(short)


_CACHED_FOLDERS: list[str] = []


def _saved() -> str:
    if not _CACHED_FOLDERS:
        import tempfile

        folder = tempfile.mkdtemp(prefix="headwise-trace-")
        save_trace(random_trace(), f"{folder}/a.trace")
        _CACHED_FOLDERS.append(f"{folder}/a.trace")
    return _CACHED_FOLDERS[0]


def test_other_schemas_and_missing_tensors_are_reported(tmp_path: Path):
    from safetensors.numpy import load_file, save_file

    save_trace(random_trace(), tmp_path / "a.trace")
    from safetensors import safe_open

    with safe_open(tmp_path / "a.trace", "np") as file:
        data = json.loads(file.metadata()[DOCUMENT_KEY])
    tensors = load_file(tmp_path / "a.trace")

    def again(name: str, other: dict) -> str:
        from headwise.observe.traces import trace_file

        document = json.dumps(other)
        checksum = trace_file._compute_checksum(document, tensors)
        save_file(tensors, tmp_path / name, {DOCUMENT_KEY: document, CHECKSUM_KEY: checksum})
        with pytest.raises(SpecError) as excinfo:
            hw.load_trace(tmp_path / name)
        return str(excinfo.value)

    assert "schema 2; this headwise reads 1" in again("b.trace", {**data, "schema": 2})
    layer = data["layers"][0]
    call = {**layer["calls"][1], "keys": [1, 5]}
    more = {**data, "layers": [{**layer, "calls": [layer["calls"][0], call]}]}
    assert "refers to data that is not in the file" in again("c.trace", more)
    assert "is not a valid trace" in again("d.trace", {**data, "grids": [{"form": "full"}]})
    save_file(tensors, tmp_path / "e.trace")
    with pytest.raises(SpecError, match="contains tensors, but no trace"):
        hw.load_trace(tmp_path / "e.trace")
    with pytest.raises(SpecError, match="is not there"):
        hw.load_trace(tmp_path / "none.trace")


def test_returned_arrays(tmp_path: Path):
    trace = random_trace(("=a", "b,", "c\n"))
    export_weights(trace, tmp_path / "a.csv", min_weight=0.2)
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    weights = {head: trace.head_weights(0, head) for head in (0, 1)}
    assert len(rows) == sum(int((w >= 0.2).sum()) for w in weights.values())
    for row in rows:
        assert float(row["weight"]) == weights[int(row["head"])][int(row["query"]), int(row["key"])]
    assert {row["query_token"] for row in rows} == {"=a", "b,", "c\n"}
    export_weights(trace, tmp_path / "a.json")
    data = json.loads((tmp_path / "a.json").read_text())["weights"]
    assert len(data) == sum(int((w > 0).sum()) for w in weights.values())
    export_weights(trace, tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz", allow_pickle=False) as recorded:
        np.testing.assert_array_equal(recorded["decoder.0.attention"][0, 1], weights[1])
    with pytest.raises(SpecError, match=r"has none of the suffixes \.csv, \.json, \.npz"):
        export_weights(trace, tmp_path / "a.txt")


def test_weights_of_others():
    import torch

    own = torch.rand(2, 3, 4, 4, requires_grad=True).softmax(-1)
    cross = torch.rand(2, 3, 4, 5).softmax(-1)
    trace = trace_from_weights(
        [own], [list("abcd")] * 2, cross_attention=[cross.bfloat16()], source=[list("vwxyz")] * 2
    )
    np.testing.assert_array_equal(
        trace.head_weights("decoder.0.attention", 2, row=1), own[1, 2].detach().numpy()
    )
    np.testing.assert_array_equal(
        trace.head_weights("decoder.0.cross", 0), cross[0, 0].bfloat16().float().numpy()
    )
    assert trace.streams["source"][1].words == tuple("vwxyz")
    with pytest.raises(
        SpecError,
        match=r"has 4 tokens of text, but 3 strings were given; give a string for each token",
    ):
        trace_from_weights([own], list("abc"))
    with pytest.raises(SpecError, match=r"give \[batch, heads, queries, keys\]"):
        trace_from_weights([own[0, 0]])


@pytest.mark.parametrize(("value", "message"), refused_cases(__file__, "trace records", globals()))
def test_missing_records_are_reported(value, message: str):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        value(random_trace())


@pytest.mark.parametrize("word", HOSTILE)
def test_no_string_acts_on_a_terminal(word: str):
    assert all(map(str.isprintable, str(random_trace((word, word, word))).split("\n")))
