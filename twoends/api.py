"""The public face: open a model within a budget, and continue a text.

with twoends.open_model("DIR", ram="8GB") as model:
    print(model.generate("Once upon a time", num_new=40).text)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from twoends.checkpoint.shipped import shipped_model
from twoends.engine.budget import Plan
from twoends.engine.device import shape_under
from twoends.engine.lookahead import LookAheadMode
from twoends.engine.memory import default_budget_bytes
from twoends.engine.open import Checkpoint, OpenModel
from twoends.errors import OptionError
from twoends.generate.generator import Generator, Outcome
from twoends.generate.sampler import Sampling
from twoends.generate.stream import Piece, TextStream
from twoends.generate.tokenizer import Tokenizer
from twoends.kernels.choose import choose
from twoends.units import parse_bytes


def open_model(
    directory: str | Path | None = None,
    *,
    ram: str | int | None = None,
    threads: int | None = None,
    isa: str | None = None,
    context: int = 4096,
    chunk: int | None = None,
    draft: int = 0,
    policy: str = "decayed",
    look_ahead: LookAheadMode = "auto",
) -> Model:
    """A model whose process stays within `ram` (bytes or "8GB"; default 80 % of what is available).

    `directory` None is the checkpoint that ships; `isa` forces an instruction set (avx512, avx2, neon,
    plain), None takes the fastest; `draft` is how many suggested ids one pass may verify;
    `look_ahead` is whether experts are read before they are asked for (auto, on, off). Raises
    ConfigError, CheckpointError, TokenizerError for files that are not right, DoesNotFit below the
    floor, NotSound when a kernel differs.
    """
    checkpoint = Checkpoint.open(Path(directory) if directory is not None else shipped_model())
    tokenizer = Tokenizer.open(checkpoint.directory, vocab_size=checkpoint.config.vocab_size)
    choice = choose(threads=threads, isa=isa, kernels=None)
    plan = checkpoint.plan(
        ram_bytes=_ram_bytes(ram),
        context_tokens=context,
        chunk_tokens=chunk,
        draft_tokens=draft,
        look_ahead=look_ahead,
        reference=choice.ops.backend == "reference",
    )
    shape = shape_under(checkpoint.directory)
    engine = OpenModel(checkpoint, plan, choice.ops, policy=policy, read_shape=shape, look_ahead=look_ahead)
    return Model(engine, tokenizer)


class Model:
    """An open model with one sequence; `generate` continues it, call after call."""

    def __init__(self, engine: OpenModel, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.ids: list[int] = []

    def __enter__(self) -> Model:
        """The model itself; it is closed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the model."""
        self.close()

    @property
    def plan(self) -> Plan:
        """How the budget is used."""
        return self.engine.plan

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        num_new: int,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> Outcome:
        """Appends the prompt (text or ids) to the sequence and continues it by up to `num_new` ids.

        `on_text` gets each piece as it becomes sure. Raises OptionError when the context is full.
        """
        new = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        needed, room = len(self.ids) + len(new) + num_new, self.engine.plan.context_tokens
        if needed > room:
            raise OptionError(
                f"this needs {needed:,} tokens; the model was opened for {room:,}.",
                remedies=[f"Open it with context={needed} or ask for fewer."],
            )
        if len(self.ids) + len(new) == self.engine.state.position:
            raise OptionError("there is nothing to continue: the prompt is empty.")
        self.ids += new
        stream = TextStream(self.tokenizer, stop_strings=stop, stop_ids=self.tokenizer.stop_ids)
        return Generator(self.engine, self.ids, chunk=self.engine.plan.chunk_tokens).run(
            num_new=num_new,
            sampling=sampling or Sampling(),
            stream=stream,
            progress=_Pieces(on_text or _ignore),
            stop_asked=lambda: False,
        )

    def close(self) -> None:
        """Ends reads and closes files."""
        self.engine.close()


class _Pieces:
    """A Progress that passes text on."""

    def __init__(self, on_text: Callable[[str], None]) -> None:
        self._on_text = on_text

    def prefill(self, done: int, total: int) -> None:
        """Not told."""

    def layer(self, done: int) -> None:
        """Not told."""

    def token(self, token_id: int, piece: Piece) -> None:
        """Text that became sure."""
        if piece.text:
            self._on_text(piece.text)

    def rest(self, text: str) -> None:
        """The end of the text."""
        if text:
            self._on_text(text)


def _ignore(text: str) -> None:
    """Drops a piece."""


def _ram_bytes(ram: str | int | None) -> int:
    if ram is None:
        return default_budget_bytes()
    return parse_bytes(ram) if isinstance(ram, str) else ram
