"""The description of what is open, and the table of measures that the page gets."""

from __future__ import annotations

import numpy as np

from headwise.observe import bundled_sample
from headwise.viewer.view_document import describe_measures, stack_measures


def test_measures_of_some_heads_only_are_in_the_table():
    table = bundled_sample.load_sample_table()
    heads = [(head.site, head.head) for head in table.heads]
    names, stacked = stack_measures(table, heads)
    assert names[0] == "entropy"
    assert {"alignment input", "distance"} <= set(names)
    assert [measure["name"] for measure in describe_measures(table)] == names
    for number, head in enumerate(table.heads):
        for column, name in enumerate(names):
            if name in head.measures:
                expected = np.array(head.measures[name][:4], np.float32)
                np.testing.assert_array_equal(stacked[number, column], expected)
            else:
                assert np.isnan(stacked[number, column]).all()
