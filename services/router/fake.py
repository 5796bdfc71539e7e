"""A router core without workers: plays a script. Ships so that every edge can be tested in milliseconds."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from core.errors import NotFoundError, ServingError
from services.router.api import Chunk, Done, GenerateCall, ModelCard, Timings

Step = Chunk | Done | ServingError | asyncio.Event
"""What a script says next: give this, raise this, or wait for this."""

Script = Callable[[GenerateCall], Iterable[Step]]
"""The steps of one answer; taken one by one, so a generator sees how far the reader is."""


def done(*, prompt_tokens: int = 3, completion_tokens: int = 0, matched_stop: str = "", cached_tokens: int = 0) -> Done:
    """The end of a scripted answer."""
    return Done(
        finish_reason="stop",
        matched_stop=matched_stop,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cached_tokens=cached_tokens,
        timings=Timings(),
        path="disaggregated",
    )


def words(*texts: str) -> Script:
    """A script that gives one token for each text, with ids 10, 11, ..., and stops."""

    def script(_call: GenerateCall) -> Iterable[Step]:
        chunks = [Chunk(text=text, token_ids=(10 + index,)) for index, text in enumerate(texts)]
        return [*chunks, done(completion_tokens=len(chunks))]

    return script


class FakeRouterCore:
    """A `RouterCore` whose every answer is `script(call)`."""

    def __init__(
        self, script: Script, *, model: str = "fake", is_ready: bool = True, max_model_len: int = 1024
    ) -> None:
        self.script = script
        self.ready = is_ready
        self.calls: list[GenerateCall] = []  # in order of arrival
        self.aborted: list[str] = []  # ids of requests whose stream was closed before its end
        self.num_running = 0
        self._card = ModelCard(name=model, revision="0", max_model_len=max_model_len, vocab_size=1000)

    async def generate(self, call: GenerateCall) -> AsyncIterator[Chunk | Done]:
        """Play the script."""
        self._require_model(call.model)
        self.calls.append(call)
        self.num_running += 1
        ended = False
        try:
            for step in self.script(call):
                if isinstance(step, asyncio.Event):
                    await step.wait()
                    continue
                ended = isinstance(step, (Done, ServingError))
                if isinstance(step, ServingError):
                    raise step
                yield step
        finally:
            self.num_running -= 1
            if not ended:
                self.aborted.append(call.request_id)

    def models(self) -> tuple[ModelCard, ...]:
        """The one model."""
        return (self._card,)

    def why_unready(self) -> str:
        """What the test says."""
        return "" if self.ready else "the test says so"

    def token_text(self, token_id: int) -> str:
        """A made-up text."""
        return f"t{token_id}"

    def _require_model(self, model: str) -> None:
        if model not in ("", self._card.name):
            raise NotFoundError(f"model {model!r} is not served here; {self._card.name!r} is")
