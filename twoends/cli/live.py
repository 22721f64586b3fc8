"""What is seen while a run goes on: text as it comes, and one live line per pass over the weights.

On a pipe there is no live line; a pass that takes longer than two seconds gets one plain line.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from twoends.cli.screen import Screen, progress_bar
from twoends.engine.open import OpenModel
from twoends.generate.stream import Piece
from twoends.units import format_bytes, format_duration, format_rate

# A pass that ends sooner needs no live line.
_DRAW_AFTER_S = 0.3
_SLOW_PASS_S = 2.0
_LINE_COLUMNS = 79
_BAR_CELLS = range(6, 21)


class RunProgress:
    """Implements generate.generator.Progress on a screen. Text goes to stdout unless it is quiet."""

    def __init__(
        self,
        screen: Screen,
        model: OpenModel,
        *,
        num_new: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._screen, self._model, self._clock = screen, model, clock
        self._num_new, self._num_done = num_new, 0
        self._what = "prompt"
        self._begin_pass()

    def prefill(self, done: int, total: int) -> None:
        """A chunk of the prompt has gone through."""
        self._what = f"prompt {done:,} of {total:,}"
        self._end_pass()

    def layer(self, done: int) -> None:
        """A layer is finished."""
        now = self._clock()
        if now - self._began >= _DRAW_AFTER_S:
            self._screen.live(self._line(done, now))

    def token(self, token_id: int, piece: Piece) -> None:
        """An id was chosen; after the first pass that was the prompt's, so each id ends one."""
        if self._num_done:
            self._end_pass()
        self._num_done += 1
        self._what = f"token {self._num_done + 1:,} of {self._num_new:,}"
        if not self._screen.quiet:
            self._screen.text(piece.text)

    def rest(self, text: str) -> None:
        """The text that was held back."""
        self._screen.clear_live()
        if not self._screen.quiet:
            self._screen.text(text)

    def _begin_pass(self) -> None:
        self._began = self._clock()
        self._bytes_before = self._model.counters.bytes_read

    def _end_pass(self) -> None:
        took_s = self._clock() - self._began
        if took_s > _SLOW_PASS_S and not self._screen.is_live:
            read = self._model.counters.bytes_read - self._bytes_before
            rate = format_rate(read / took_s)
            self._screen.note(
                f"  {self._what}   {format_duration(took_s)}   {format_bytes(read)} read   {rate}"
            )
        self._begin_pass()

    def _line(self, done: int, now: float) -> str:
        config, plan = self._model.config, self._model.plan
        took_s = now - self._began
        read = self._model.counters.bytes_read - self._bytes_before
        kind = "MLA" if config.is_mla(min(done, config.num_layers - 1)) else "KDA"
        amount = format_bytes(read)
        if not self._what.startswith("prompt"):
            amount = f"{read / 1e9:,.1f} of {max(plan.bytes_per_token, read) / 1e9:,.1f} GB"
            if plan.bytes_per_token < 10**9:
                amount = f"{read / 1e6:,.1f} of {max(plan.bytes_per_token, read) / 1e6:,.1f} MB"
        left_s = took_s * (config.num_layers - done) / done
        head = f"  {self._what} "
        tail = (
            f" {done}/{config.num_layers} {kind}  {amount}  {format_rate(read / took_s)}"
            f"  {format_duration(left_s)} left"
        )
        cells = min(_LINE_COLUMNS - len(head) - len(tail) - 2, _BAR_CELLS[-1])
        return head + (progress_bar(done / config.num_layers, cells) if cells in _BAR_CELLS else "") + tail
