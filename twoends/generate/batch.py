"""The work of a batch: requests from a file to the scheduler in order, answers to another as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from twoends.engine.open import OpenModel
from twoends.engine.sequences import Load
from twoends.errors import OptionError, TokenizerError
from twoends.generate.batch_input import BatchInput, BatchLine
from twoends.generate.batch_results import BatchResults
from twoends.generate.completion import Completion, completion_object, parse_completion
from twoends.generate.schedule import Chosen, Request, Scheduler
from twoends.generate.stream import TextStream
from twoends.generate.tokenizer import Tokenizer

URL = "/v1/completions"


class BatchProgress(Protocol):
    """Told what happens, as it happens; draws, or does nothing."""

    def layer(self, done: int) -> None:
        """`done` layers of this pass are finished."""

    def end_pass(self, tally: Tally, running: int) -> None:
        """A pass has gone through, `running` requests are in the middle of theirs."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a batch has done so far. Tokens are those of answered requests, rows those of all passes."""

    num_answered: int = 0
    num_refused: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    num_passes: int = 0
    num_rows: int = 0
    is_whole: bool = False


@dataclass(slots=True, kw_only=True)
class Demand:
    """Requests that can be done: how many, the context of the `largest`, tokens of all (new ones at most)."""

    num_requests: int = 0
    largest: int = 1
    prompt_tokens: int = 0
    new_tokens: int = 0

    @property
    def load(self) -> Load:
        """The mean request."""
        count = max(self.num_requests, 1)
        return Load(
            prompt_tokens=max(self.prompt_tokens / count, 1.0), new_tokens=max(self.new_tokens / count, 1.0)
        )


class Requests:
    """What lines mean on one model: `room` is the context that a request may take, None for any."""

    def __init__(self, tokenizer: Tokenizer | None, *, vocab_size: int, room: int | None) -> None:
        self._tokenizer, self._vocab_size, self._room = tokenizer, vocab_size, room

    def parse(self, line: BatchLine) -> Completion:
        """The request of a line. Raises OptionError or TokenizerError for what is the request's fault."""
        found = parse_completion(line.body(URL), tokenizer=self._tokenizer, vocab_size=self._vocab_size)
        if self._room is not None and found.num_needed > self._room:
            raise OptionError(
                f"{len(found.ids)} tokens of prompt and {found.num_new} new ones are more than the context "
                f"of {self._room}."
            )
        return found

    def measure(self, lines: Iterator[BatchLine]) -> Demand:
        """What those requests take that can be done."""
        found = Demand()
        for line in lines:
            try:
                one = self.parse(line)
            except (OptionError, TokenizerError):
                continue
            found.num_requests += 1
            found.largest = max(found.largest, one.num_needed)
            found.prompt_tokens += len(one.ids)
            found.new_tokens += one.num_new
        return found


class Batch:
    """Answers every request of `source` that `results` has no answer to."""

    def __init__(
        self,
        model: OpenModel,
        source: BatchInput,
        results: BatchResults,
        requests: Requests,
        *,
        new_stream: Callable[[Completion], TextStream],
    ) -> None:
        """`new_stream` makes the stream of a request's text."""
        self._model, self._results, self._requests = model, results, requests
        self._new_stream = new_stream
        self._lines = source.lines(iter(results.missing()))
        self._pending: dict[int, tuple[BatchLine, Completion]] = {}
        self.tally = Tally()

    def run(self, progress: BatchProgress, stop_asked: Callable[[], bool]) -> Tally:
        """Until all is answered or `stop_asked` says so between two passes; what is in the middle is lost.

        Raises what a pass raises, and DoesNotFit when the disk of the answers is full.
        """
        scheduler = Scheduler(self._model)
        while not stop_asked():
            self._fill(scheduler)
            if scheduler.is_idle:
                self.tally.is_whole = True
                break
            for chosen in scheduler.step(progress.layer):
                self._answer(chosen)
            self.tally.num_passes, self.tally.num_rows = scheduler.num_passes, scheduler.num_rows
            progress.end_pass(self.tally, scheduler.num_running)
        return self.tally

    def _fill(self, scheduler: Scheduler) -> None:
        """Gives the scheduler the next requests; answers those that can't be done on the way."""
        while scheduler.num_missing:
            line = next(self._lines, None)
            if line is None:
                return
            try:
                completion = self._requests.parse(line)
            except (OptionError, TokenizerError) as error:
                self._refuse(line, error.headline)
                continue
            self._pending[line.number] = (line, completion)
            scheduler.submit(
                Request(
                    key=line.number,
                    ids=completion.ids,
                    num_new=completion.num_new,
                    sampling=completion.sampling,
                    stream=self._new_stream(completion),
                )
            )

    def _answer(self, chosen: Chosen) -> None:
        if chosen.outcome is None:
            return
        line, completion = self._pending.pop(chosen.request.key)
        checkpoint = self._model.checkpoint
        body = completion_object(
            completion,
            chosen.outcome,
            name=self._results.name(line.custom_id),
            created=int(time.time()),
            model=checkpoint.directory.name,
            fingerprint=checkpoint.index.fingerprint,
        )
        self._results.append(line.custom_id, self._response(line, 200, body), None)
        self.tally.num_answered += 1
        self.tally.prompt_tokens += len(completion.ids)
        self.tally.new_tokens += len(chosen.outcome.ids)

    def _refuse(self, line: BatchLine, message: str) -> None:
        error = {
            "message": message,
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_request",
        }
        response = self._response(line, 400, {"error": error})
        self._results.append(line.custom_id, response, {"code": error["code"], "message": message})
        self.tally.num_refused += 1

    def _response(self, line: BatchLine, status: int, body: dict[str, Any]) -> dict[str, Any]:
        return {
            "status_code": status,
            "request_id": f"req_{self._results.name(line.custom_id)}",
            "body": body,
        }
