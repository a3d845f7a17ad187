"""The width of Chinese text in columns of a terminal."""

from __future__ import annotations

from headwise.report.text import cut, pad, pad_left, rule, text_width, wrap


def test_chinese_takes_two_columns():
    assert [text_width(pad(text, 20) + pad_left(text, 8)) for text in ("x", "正确")] == [28, 28]
    assert text_width(pad("键值缓存", 11)) == text_width(rule("键 ", 11)) == 11
    assert cut("注意力分数", 7) == "注意力…"
    text = "多头注意力 multi-head attention 的每个头读取整个向量而不是其中的一段。"
    lines = wrap(text * 3, 40, "  ", "    ")
    assert max(map(text_width, lines)) <= 40 + 2  # a closing mark may stand beyond the margin
    assert [line[:4].strip() for line in lines[1:]] == ["" for _ in lines[1:]]
    assert wrap("one two three", 8, "  ", "   ") == ["  one", "   two", "   three"]
