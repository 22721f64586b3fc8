"""One open model and its generator, for tests that look between the passes."""

from __future__ import annotations

from contextlib import contextmanager

from tests.support.backends import native_isas
from tests.support.running import Silent, make_ops, plan_of, tokenizer_of
from twoends.engine.files import read_at
from twoends.engine.open import OpenModel
from twoends.engine.trace import Trace
from twoends.generate.generator import Generator
from twoends.generate.sampler import Sampling
from twoends.generate.stream import TextStream


@contextmanager
def opened(checkpoint, *, budget="ample", chunk=None, context=64, policy="decayed", read=read_at, trace=None):
    """An open model with poisoned buffers on the best kernels of this machine."""
    isas = native_isas()
    model = OpenModel(
        checkpoint,
        plan_of(checkpoint, budget=budget, chunk=chunk, context=context),
        make_ops(isas[0] if isas else "reference"),
        policy=policy,
        poison=True,
        read=read,
        trace=Trace(trace) if trace else None,
    )
    try:
        yield model
    finally:
        model.close()


def generate(
    generator: Generator,
    num_new: int,
    *,
    sampling: Sampling | None = None,
    stop_strings=(),
    stop_ids=(),
    stop_asked=lambda: False,
    progress=None,
):
    """One run of a generator with a stream of its own."""
    checkpoint = generator._model.checkpoint
    return generator.run(
        num_new=num_new,
        sampling=sampling or Sampling(),
        stream=TextStream(tokenizer_of(checkpoint), stop_strings=stop_strings, stop_ids=frozenset(stop_ids)),
        progress=progress or Silent(),
        stop_asked=stop_asked,
    )


class StopAfter:
    """Asks to stop when it was looked at `count` times, that is after so many passes."""

    def __init__(self, count: int) -> None:
        self._left = count

    def __call__(self) -> bool:
        self._left -= 1
        return self._left <= 0
