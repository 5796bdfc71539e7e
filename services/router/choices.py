"""Several answers at once: the choices of one request (`n`), the prompts of one call.

The first choice runs as any request does. The others start when it has its second token, or its end: its prompt is computed
then, and the KV is where it decodes, so they find the prompt's blocks in the prefix caches instead of computing them again.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TypeVar

from core.errors import InternalError, ServingError
from core.sampling import SamplingParams, choice_seed
from services.router.answer import Answer
from services.router.api import Chunk, Done

T = TypeVar("T")
Run = Callable[[Answer], AsyncGenerator[Chunk | Done, None]]
"""Carries one answer to its end."""


class Choices:
    """The answers to one request, in the order of their index. All of them end when it is aborted or one fails."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers = answers

    def cancel(self) -> None:
        """End every answer with finish_reason "abort" and what there is."""
        for answer in self._answers:
            answer.cancel()

    def fail(self, error: ServingError) -> None:
        """End every answer without a Done."""
        for answer in self._answers:
            answer.fail(error)

    def set_deadline(self, at: float) -> None:
        """Say until when, on the router's clock, workers may run the answers."""
        for answer in self._answers:
            answer.deadline = at

    async def events(self, run: Run) -> AsyncGenerator[Chunk | Done, None]:
        """The chunks of all answers as they come, and a Done for each. The first failure is raised and ends them all."""
        first, *others = self._answers
        is_shared = asyncio.Event()

        async def lead() -> AsyncGenerator[Chunk | Done, None]:
            async with aclosing(run(first)) as events:
                async for event in events:
                    if isinstance(event, Done) or len(first.token_ids) > 1:
                        is_shared.set()
                    yield event

        async def follow(answer: Answer) -> AsyncGenerator[Chunk | Done, None]:
            await is_shared.wait()
            answer.preferred = first.placement
            answer.queued_since = first.queued_since  # the request has waited for its room already
            async with aclosing(run(answer)) as events:
                async for event in events:
                    yield event

        sources: list[Callable[[], AsyncGenerator[Chunk | Done, None]]] = [lead]
        sources += [partial(follow, answer) for answer in others]
        async with aclosing(merged(sources, max_concurrent=len(sources))) as events:
            async for _, event in events:
                yield event


def choice_sampling(sampling: SamplingParams, index: int) -> SamplingParams:
    """The parameters of one choice of a request: a seed of its own, and the prompt's log-probabilities only once.

    Args:
        sampling: the request's, its seed resolved.
        index: of the choice.
    """
    if index == 0:
        return sampling
    assert sampling.seed is not None, "resolved"
    return replace(sampling, seed=choice_seed(sampling.seed, index), prompt_logprobs=None)


async def merged(
    sources: Sequence[Callable[[], AsyncGenerator[T, None]]], max_concurrent: int
) -> AsyncGenerator[tuple[int, T], None]:
    """Run several generators at once. The first failure is raised; leaving early closes them all.

    Args:
        sources: each makes one.
        max_concurrent: how many run at a time; the others wait for these.
    Returns:
        What they yield, as it comes, each with the index of its source.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]()) as items:
            async for item in items:
                yield 0, item
        return
    slots = asyncio.Semaphore(max_concurrent)
    # As many places as sources: a reader that is behind holds them all up.
    gathered: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(maxsize=len(sources))

    async def pump(index: int) -> None:
        try:
            async with slots, aclosing(sources[index]()) as items:
                async for item in items:
                    await gathered.put((index, item))
            await gathered.put(None)
        except asyncio.CancelledError:
            if tasks[index].cancelling():
                raise
            # Something inside the source was cancelled, not the source: without a word the reader would wait for ever.
            await gathered.put(InternalError("an answer was cancelled from within"))
        except Exception as error:  # noqa: BLE001 - raised again by the reader below
            await gathered.put(error)

    tasks = [asyncio.create_task(pump(index)) for index in range(len(sources))]
    try:
        num_open = len(tasks)
        while num_open:
            match await gathered.get():
                case None:
                    num_open -= 1
                case Exception() as error:
                    raise error
                case (index, item):
                    yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
