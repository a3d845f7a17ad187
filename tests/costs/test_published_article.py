"""The article's numbers by its formulas, ours by hand, and every difference as it is explained."""

from __future__ import annotations

import json

import pytest

from headwise import cli
from headwise.costs.published_article import ArticleRow, ArticleTable, flops_per_trained_token
from headwise.models.families import read_model_spec

DAY = 86_400


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], ArticleRow]:
    return {
        (row.model, row.quantity.split(",")[0]): row
        for row in ArticleTable.from_name("624740065").rows
    }


def test_times_of_training_are_those_of_the_article(rows: dict[tuple[str, str], ArticleRow]):
    """34 and 21 to 22 days: 2,921,340 and 1,898,871 seconds."""
    gpt3, llama = rows["GPT-3", "days"], rows["LLaMA-65B", "days"]
    assert gpt3.article * DAY == pytest.approx(8 * 300e9 * 175e9 / (1024 * 312e12 * 0.45))
    assert gpt3.article * DAY == pytest.approx(2_921_340, rel=1e-5)
    assert llama.article * DAY == pytest.approx(8 * 1.4e12 * 65e9 / (2048 * 624e12 * 0.3))
    assert llama.article * DAY == pytest.approx(1_898_871, rel=1e-5)


def _flops_per_token(
    layers: int, width: int, hidden: int, heads_of_feed: int, vocabulary: int
) -> float:
    """Four passes' worth of a block, less the last product that recomputation leaves out, and three
    of the head.
    """
    block = 2 * (4 * width**2 + heads_of_feed * width * hidden) + 4 * 2048 * width
    return layers * (4 * block - 2 * width * hidden) + 3 * 2 * width * vocabulary


def test_our_times_follow_from_the_products_of_a_step(rows: dict[tuple[str, str], ArticleRow]):
    gpt3 = _flops_per_token(96, 12_288, 4 * 12_288, 2, 50_257)
    llama = _flops_per_token(80, 8192, 22_016, 3, 32_000)
    assert flops_per_trained_token(read_model_spec("gpt3"), 2048) == pytest.approx(gpt3, rel=1e-12)
    assert rows["GPT-3", "days"].headwise * DAY == pytest.approx(
        300e9 * gpt3 / (1024 * 312e12 * 0.45)
    )
    assert rows["LLaMA-65B", "days"].headwise * DAY == pytest.approx(
        1.4e12 * llama / (2048 * 312e12 * 0.3)
    )
    assert rows["GPT-3", "FLOPs"].headwise == pytest.approx(300e9 * 3 * _forward_flops() / 2048)


def _forward_flops() -> int:
    return 96 * (24 * 2048 * 12_288**2 + 4 * 2048**2 * 12_288) + 2 * 2048 * 12_288 * 50_257


def test_differences_are_those_that_are_explained(rows: dict[tuple[str, str], ArticleRow]):
    parameters = rows["GPT-3", "parameters"]
    rest = 96 * 13 * 12_288 + 2 * 12_288 + (50_257 + 2048) * 12_288
    assert parameters.article == 173_946_175_488
    assert parameters.headwise - parameters.article == rest
    assert f"{rest:,}" in parameters.explanation
    llama = rows["LLaMA-65B", "parameters"]
    feed, tables, norms = (
        80 * (3 * 8192 * 22_016 - 8 * 8192**2),
        2 * 32_000 * 8192,
        80 * 2 * 8192 + 8192,
    )
    assert llama.article == 64_424_509_440
    assert llama.headwise - llama.article == feed + tables + norms
    assert f"{feed:,}" in llama.explanation
    assert f"{tables:,}" in llama.explanation


def test_memory_is_that_of_the_article(rows: dict[tuple[str, str], ArticleRow]):
    table = ArticleTable.from_name("624740065")
    by_quantity = {row.quantity: row for row in table.rows if row.model == "GPT-3"}
    activations = by_quantity["bytes, activations of 2,048 tokens"]
    assert activations.article == 275_414_777_856
    cache = by_quantity["bytes, KV cache of 64 rows of 512 + 32"]
    assert (cache.article, cache.article - cache.headwise) == (
        164_282_499_072,
        4 * 64 * 96 * 12_288,
    )
    state, weights = (
        by_quantity["bytes, training state"],
        by_quantity["bytes, weights for inference"],
    )
    assert (state.article, weights.article) == (3.5e12, 350e9)
    parameters = rows["GPT-3", "parameters"].headwise
    assert (state.headwise, weights.headwise) == (16 * parameters, 2 * parameters)
    forward = by_quantity["FLOPs, forward pass of 2,048 tokens"]
    assert forward.article == forward.headwise == _forward_flops()
    causal = _forward_flops() - 96 * 4 * 12_288 * (2048**2 - 2048 * 2049 // 2)
    assert f"{causal:,}" in forward.explanation


def test_the_command_prints_one_table(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["cost", "--article", "624740065"]) == 0
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= 80
    assert " ".join(page.split()).count("article headwise") == 2
    assert cli.main(["cost", "--article", "624740065", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["model"] for row in document["rows"]].count("GPT-3") == 8
    assert cli.main(["cost", "--article", "1"]) == 2
    assert "use one of 624740065" in capsys.readouterr().err
    assert cli.main(["cost", "gpt2", "--article", "624740065"]) == 2
    assert "exclude each other" in capsys.readouterr().err
