"""The window: the right bytes, in order, pass after pass, and no overlap in the ring."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.harness import pattern
from twoends.checkpoint.index import Segment, TensorRef
from twoends.engine.arena import PAGE, POISON
from twoends.engine.files import read_at
from twoends.engine.layout import MatrixEntry, VectorsEntry, largest_panel, pass_bytes
from twoends.engine.window import Window, choose_pins

DATA = pattern(400 * PAGE, seed=3)
# Hypothesis wants fresh fixtures; ours only collects readers to close.
SHARED = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def matrix(offset: int, rows: int, cols: int, rows_per_panel: int) -> MatrixEntry:
    segment = Segment(path_id=0, offset=offset, nbytes=rows * cols * 2)
    ref = TensorRef(segment=segment, shape=(rows, cols), dtype="BF16", file_name=f"m{offset}")
    return MatrixEntry(layer=0, name=f"m{offset}", ref=ref, rows_per_panel=min(rows_per_panel, rows))


def vectors(*places: tuple[int, int]) -> VectorsEntry:
    refs = tuple(
        (
            f"v{i}",
            TensorRef(
                segment=Segment(path_id=0, offset=offset, nbytes=4 * count),
                shape=(count,),
                dtype="F32",
                file_name=f"v{i}",
            ),
        )
        for i, (offset, count) in enumerate(places)
    )
    return VectorsEntry(layer=0, refs=refs)


def panels_of(entries):
    return [(i, k) for i, entry in enumerate(entries) for k in range(entry.num_panels)]


@dataclass
class Checked:
    """Takes panels in order and holds each against the file; looks for overlaps at every step."""

    window: Window
    entries: tuple

    def one_pass(self):
        for entry_id, k in panels_of(self.entries):
            self.hold(*self.window.take(entry_id, k), self.entries[entry_id].panel(k))
            self.window.release()
            self.no_overlap()

    def one_pass_in_groups(self):
        """Takes whatever is there without waiting, as one group; gives the sizes of the groups."""
        sizes = []
        group = []
        for entry_id, k in panels_of(self.entries):
            if group and not self.window.has(entry_id, k):
                self.end(group)
                sizes.append(len(group))
                group = []
            group.append((*self.window.take(entry_id, k), self.entries[entry_id].panel(k)))
        self.end(group)
        return [*sizes, len(group)]

    def end(self, group):
        for panel, buffer, expected in group:
            self.hold(panel, buffer, expected)
        self.window.release()
        self.no_overlap()

    def hold(self, panel, buffer, expected):
        assert panel == expected
        self.no_overlap()
        for span in panel.ranges:
            at = span.at + span.offset % PAGE
            data = DATA[span.offset : span.offset + span.num_bytes]
            assert buffer[at : at + span.num_bytes].tobytes() == data

    def no_overlap(self):
        window = self.window
        flights = [f for f in (*window._taken, *window._flights) if f.room]
        spans = sorted((f.start, f.start + f.room) for f in flights)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert all(begin >= 0 and end <= window._ring.num_bytes for begin, end in spans)


@pytest.fixture
def make_window(harness):
    path = harness.file(DATA, "weights")

    def make(entries, *, ring_bytes, pinned_bytes=0, poison=True, read=read_at, depth=3):
        reader = harness.reader(path, read=read, depth=depth, direct=False)
        window = Window(
            tuple(entries), reader, ring_bytes=ring_bytes, pinned_bytes=pinned_bytes, poison=poison
        )
        return window, reader

    return make


@st.composite
def trunks(draw):
    """Entries at any offset, panels from a row to the whole matrix, vectors in between."""
    entries = []
    for _ in range(draw(st.integers(1, 5))):
        if draw(st.booleans()):
            rows, cols = draw(st.integers(1, 30)), draw(st.integers(1, 3000))
            offset = draw(st.integers(0, 200 * PAGE))
            entries.append(matrix(offset, rows, cols, draw(st.integers(1, 30))))
        else:
            places = st.tuples(st.integers(0, 380 * PAGE), st.integers(1, 2000))
            entries.append(vectors(*draw(st.lists(places, min_size=1, max_size=3))))
    return tuple(entries)


@given(trunk=trunks(), spare=st.integers(0, 60), pinned=st.floats(0, 1.2), passes=st.integers(1, 4))
@SHARED
def test_panels_arrive_in_order_with_the_right_bytes_pass_after_pass(
    make_window, harness, trunk, spare, pinned, passes
):
    most = max(entry.panel(k).room for entry in trunk for k in range(entry.num_panels))
    total = pass_bytes(trunk)
    window, reader = make_window(trunk, ring_bytes=most + spare * PAGE, pinned_bytes=int(pinned * total))
    checked = Checked(window, trunk)
    window.allow_passes(passes)
    for _ in range(passes):
        checked.one_pass()
    held = window._pins.num_bytes
    assert harness.counters.bytes_trunk == total + (passes - 1) * (total - held)
    assert window.num_bytes == window._ring.num_bytes + held
    reader.close()
    harness._readers.remove(reader)


@given(trunk=trunks(), pinned=st.floats(0, 1.1))
@SHARED
def test_pins_fill_their_arena_without_gap_or_overlap_within_the_budget(trunk, pinned):
    total = pass_bytes(trunk)
    budget = int(pinned * total)
    places, used = choose_pins(trunk, budget)
    assert used <= budget
    assert used == total or budget < total
    spans = sorted(
        (place, place + entry.panel(k).room)
        for entry, places_of_entry in zip(trunk, places, strict=True)
        for k, place in enumerate(places_of_entry.tolist())
        if place >= 0
    )
    assert sum(end - begin for begin, end in spans) == used
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize(("share", "run_pages"), [(0.5, 1), (0.5, 4), (0.2, 4), (0.8, 2)])
def test_pinned_bytes_are_spread_over_the_pass_in_runs(monkeypatch, share, run_pages):
    monkeypatch.setattr("twoends.engine.window._RUN_BYTES", run_pages * PAGE)
    trunk = tuple(matrix(i * 20 * PAGE, 20, PAGE // 2, 1) for i in range(10))
    budget = int(share * pass_bytes(trunk)) // PAGE * PAGE
    places, used = choose_pins(trunk, budget)
    assert used == budget
    pinned = np.concatenate(places) >= 0
    for window in np.split(pinned, 5):
        assert abs(window.mean() - share) <= 0.1
    runs = [len(list(group)) for _, group in itertools.groupby(pinned)]
    assert min(runs[:-1]) >= run_pages


def test_without_a_word_about_passes_panels_come_all_the_same(make_window):
    trunk = (matrix(100, 12, 1000, 3), vectors((7, 30)), matrix(9999, 7, 2000, 2))
    window, _ = make_window(trunk, ring_bytes=4 * largest_panel(trunk) + PAGE)
    checked = Checked(window, trunk)
    for _ in range(3):
        checked.one_pass()


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("pinned", [0.0, 0.4, 1.0])
def test_reading_ahead_ends_exactly_with_the_passes_that_were_announced(make_window, harness, passes, pinned):
    trunk = (matrix(0, 8, 2048, 2), vectors((7, 30)), matrix(33333, 6, 2048, 3))
    total = pass_bytes(trunk)
    # Room for three whole passes: only the announced number can hold reading back.
    window, _ = make_window(trunk, ring_bytes=4 * total, pinned_bytes=round(pinned * total))
    held = window._pins.num_bytes
    assert harness.counters.bytes_trunk == 0
    window.allow_passes(passes)
    checked = Checked(window, trunk)
    for _ in range(passes):
        checked.one_pass()
    expected = total + (passes - 1) * (total - held)
    assert harness.counters.bytes_trunk == expected
    window.allow_passes(1)
    checked.one_pass()
    assert harness.counters.bytes_trunk == expected + total - held


def test_what_was_announced_and_not_used_serves_the_next_run(make_window, harness):
    """A stop id ends a run early; its read-ahead is not thrown away and nothing is read twice."""
    trunk = (matrix(0, 8, 2048, 2), matrix(33333, 6, 2048, 3))
    total = pass_bytes(trunk)
    window, _ = make_window(trunk, ring_bytes=total)
    checked = Checked(window, trunk)
    window.allow_passes(10)
    checked.one_pass()
    window.allow_passes(1)
    for _ in range(3):
        checked.one_pass()
    # At most one ring full beyond the last pass.
    assert 4 * total <= harness.counters.bytes_trunk <= 5 * total


@pytest.mark.parametrize("poison", [True, False])
def test_released_bytes_are_poisoned_and_pinned_bytes_are_not(make_window, poison):
    trunk = (matrix(0, 2, 2048, 2), matrix(8 * PAGE, 2, 2048, 2))
    total = pass_bytes(trunk)
    window, _ = make_window(trunk, ring_bytes=8 * PAGE, pinned_bytes=total // 2, poison=poison)
    kept = {}
    for entry_id, k in panels_of(trunk):
        _, kept[entry_id] = window.take(entry_id, k)
        window.release()
    resident = [all(window.is_pinned(i, k) for k in range(trunk[i].num_panels)) for i in range(2)]
    assert sorted(resident) == [False, True]
    for entry_id, buffer in kept.items():
        gone = bool((buffer == POISON).all())
        assert gone == (poison and not resident[entry_id])


@SHARED
@given(panels=st.integers(2, 24), pinned_panels=st.integers(0, 24), pause_s=st.sampled_from([0.0, 0.002]))
def test_panels_taken_in_groups_are_right_and_leave_half_the_ring_to_reads(
    make_window, panels, pinned_panels, pause_s
):
    trunk = (matrix(0, 12, 2048, 1), matrix(12 * PAGE, 12, 2048, 1))
    window, _ = make_window(trunk, ring_bytes=panels * PAGE, pinned_bytes=pinned_panels * PAGE)
    checked = Checked(window, trunk)
    window.allow_passes(3)
    for _ in range(3):
        time.sleep(pause_s)  # so that some reads are there, and some are not
        sizes = checked.one_pass_in_groups()
        assert sum(sizes) == 24
        if not pinned_panels:
            assert max(sizes) <= max(panels // 2, 1)


def test_a_ring_of_exactly_one_panel_is_enough(make_window):
    trunk = (matrix(0, 5, 2048, 1),)
    window, _ = make_window(trunk, ring_bytes=PAGE)
    window.allow_passes(3)
    for _ in range(3):
        Checked(window, trunk).one_pass()


def test_a_panel_larger_than_the_ring_is_refused_not_waited_for(make_window):
    trunk = (matrix(0, 4, 2048, 4),)
    window, _ = make_window(trunk, ring_bytes=2 * PAGE)
    with pytest.raises(AssertionError, match="ring is smaller than a panel"):
        window.take(0, 0)


def test_a_panel_out_of_turn_is_refused(make_window):
    trunk = (matrix(0, 5, 2048, 1),)
    window, _ = make_window(trunk, ring_bytes=4 * PAGE)
    with pytest.raises(AssertionError, match="order of use"):
        window.take(0, 1)


def test_a_failed_read_reaches_the_one_who_takes_its_panel_and_close_ends_the_rest(make_window, harness):
    from twoends.errors import ReadError

    def broken_at_page_two(fd, buffer, offset):
        return 0 if offset == 2 * PAGE else read_at(fd, buffer, offset)

    trunk = (matrix(0, 8, 2048, 1),)
    window, reader = make_window(trunk, ring_bytes=8 * PAGE, read=broken_at_page_two)
    for k in (0, 1):
        window.take(0, k)
        window.release()
    with pytest.raises(ReadError, match="bytes 8,192 to 12,288"):
        pytest.fail(str(window.take(0, 2)))
    reader.close()
    harness._readers.remove(reader)


def test_many_announced_passes_cost_nothing_once_everything_is_pinned(make_window):
    """The read-ahead of a million passes over resident panels must not walk them one by one."""
    trunk = (matrix(0, 40, 2048, 1),)
    window, _ = make_window(trunk, ring_bytes=0, pinned_bytes=pass_bytes(trunk))
    window.allow_passes(1_000_000_000)
    for _ in range(2):
        Checked(window, trunk).one_pass()


def test_small_tensors_are_decoded_exactly_from_wherever_they_lie(make_window):
    entry = vectors((4093, 33), (70 * PAGE + 1, 5))
    window, _ = make_window((entry,), ring_bytes=entry.panel(0).room)
    values = entry.decode(*window.take(0, 0))
    window.release()
    for name, ref in entry.refs:
        segment = ref.segment
        expected = np.frombuffer(DATA[segment.offset : segment.offset + segment.nbytes], np.uint8)
        assert np.array_equal(values[name].view(np.uint8), expected)
