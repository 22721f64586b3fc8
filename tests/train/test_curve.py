"""The loss curve of a model card."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from twoends.train.curve import smoothed, svg, table

RECORDS = [
    {"step": s, "loss_nats": 8 / s**0.5, "bits_per_byte": 3 / s**0.5, "max_violation": 1 / s}
    for s in range(1, 101)
]


def test_the_table_names_the_first_and_the_last_step_with_their_tokens() -> None:
    lines = table(RECORDS, rows=5, tokens_per_step=1000).splitlines()
    assert lines[2].startswith("| 1 | 1,000 | 8.000 | 3.000 | 1.00 |")
    assert lines[-1].startswith("| 100 | 100,000 |")
    assert len(lines) == 2 + 6


def test_the_drawing_is_well_formed_and_has_a_point_a_step() -> None:
    drawing = ElementTree.fromstring(svg(RECORDS, title="loss"))
    line = drawing.find("{http://www.w3.org/2000/svg}polyline")
    assert line is not None
    assert len(line.attrib["points"].split()) == 100


@pytest.mark.parametrize(("over", "means"), [(1, [1, 3, 5]), (2, [1, 2, 4]), (9, [1, 2, 3])])
def test_smoothing_looks_back_only(over: int, means: list[float]) -> None:
    assert smoothed([1, 3, 5], over=over) == means
