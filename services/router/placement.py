"""Which workers take a request: a pure function of a snapshot, so that tests and simulations call what the router calls."""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from core.layout import Fingerprint, growth_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker as the router sees it now. What it reported is corrected by what the router has sent since."""

    worker_id: str
    is_ready: bool  # connected, not draining, engine moving
    fingerprint: Fingerprint
    kv_endpoint: str = ""  # decode: where transfers connect
    peers: frozenset[str] = frozenset()  # prefill: decode KV endpoints it shook hands with
    free_blocks: int
    total_blocks: int
    free_sequences: int
    queued_tokens: int = 0  # prompt tokens sent there and not computed yet
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request runs; without `prefill` it runs whole in `decode`."""

    decode: str
    prefill: str | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """What a request takes. Blocks are counted by the worker, whose block size may differ."""

    num_prompt_tokens: int
    max_total_tokens: int  # prompt and answer
    prefer: Placement | None = None  # taken if it has room: a request of the same prompt runs there

    def blocks_to_decode(self, block_tokens: int) -> int:
        """Blocks a decode worker sets aside when it takes the request; a longer answer takes more later."""
        num_blocks = -(-self.num_prompt_tokens // block_tokens)
        return num_blocks + growth_blocks(self.num_prompt_tokens, self.max_total_tokens, block_tokens)

    def blocks_to_prefill(self, block_tokens: int) -> int:
        """Blocks a prefill worker needs for it."""
        return -(-self.num_prompt_tokens // block_tokens)


class Refusal(Enum):
    """Why there is no placement."""

    NO_WORKERS = "no live worker can serve"
    NEVER_FITS = "larger than every worker's KV pool or context"
    FULL = "no room now"


def place(
    prefills: Sequence[WorkerView],
    decodes: Sequence[WorkerView],
    need: Need,
    excluded: Collection[str],
    rng: random.Random,
) -> Placement | Refusal:
    """The least loaded pair that is alive, shook hands, holds equal kinds of KV and has room; ties at random.

    Load of a pair: first the prompt tokens waiting before the request in prefill, then the share of the decode pool that
    is taken with the request in it.

    Args:
        prefills, decodes: all workers known; unready ones are passed over.
        need: of the request.
        excluded: worker ids that failed this request already.
        rng: breaks ties.
    """
    pairs = [
        (prefill, decode)
        for decode in decodes
        if _is_candidate(decode, excluded)
        for prefill in prefills
        if _is_candidate(prefill, excluded) and can_pair(prefill, decode)
    ]
    if not pairs:
        return Refusal.NO_WORKERS
    pairs = [
        (prefill, decode)
        for prefill, decode in pairs
        if _ever_fits(prefill, need, need.num_prompt_tokens) and _ever_fits(decode, need, need.max_total_tokens)
    ]
    if not pairs:
        return Refusal.NEVER_FITS
    open_pairs = [
        (prefill, decode)
        for prefill, decode in pairs
        if _has_room(prefill, need.blocks_to_prefill) and _has_room(decode, need.blocks_to_decode)
    ]
    if not open_pairs:
        return Refusal.FULL
    for prefill, decode in open_pairs:
        if need.prefer == Placement(decode=decode.worker_id, prefill=prefill.worker_id):
            return need.prefer
    prefill, decode = min(open_pairs, key=lambda pair: (pair[0].queued_tokens, _taken(pair[1], need), rng.random()))
    return Placement(decode=decode.worker_id, prefill=prefill.worker_id)


def place_aggregated(
    workers: Sequence[WorkerView], need: Need, excluded: Collection[str], rng: random.Random
) -> Placement | Refusal:
    """The worker with the smallest share taken that has room for the whole request."""
    candidates = [worker for worker in workers if _is_candidate(worker, excluded)]
    if not candidates:
        return Refusal.NO_WORKERS
    candidates = [worker for worker in candidates if _ever_fits(worker, need, need.max_total_tokens)]
    if not candidates:
        return Refusal.NEVER_FITS
    candidates = [worker for worker in candidates if _has_room(worker, need.blocks_to_decode)]
    if not candidates:
        return Refusal.FULL
    for worker in candidates:
        if need.prefer == Placement(decode=worker.worker_id):
            return need.prefer
    best = min(candidates, key=lambda worker: (worker.queued_tokens, _taken(worker, need), rng.random()))
    return Placement(decode=best.worker_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All workers at one moment. Without `prefills` (None) requests run whole in one worker."""

    prefills: Sequence[WorkerView] | None
    decodes: Sequence[WorkerView]
    rng: random.Random

    def choose(self, need: Need, excluded: Collection[str]) -> Placement | Refusal:
        """Where a request would run now."""
        if self.prefills is None:
            return place_aggregated(self.decodes, need, excluded, self.rng)
        return place(self.prefills, self.decodes, need, excluded, self.rng)

    def usable(self, need: Need, excluded: Collection[str]) -> frozenset[str]:
        """Decode workers whose room would ever help the request."""
        return frozenset(
            worker.worker_id
            for worker in self.decodes
            if _is_candidate(worker, excluded) and _ever_fits(worker, need, need.max_total_tokens)
        )


def can_pair(prefill: WorkerView, decode: WorkerView) -> bool:
    """Whether KV of one is KV of the other, and a transfer would find the way."""
    return prefill.fingerprint == decode.fingerprint and decode.kv_endpoint in prefill.peers


def _is_candidate(worker: WorkerView, excluded: Collection[str]) -> bool:
    return worker.is_ready and worker.worker_id not in excluded


def _ever_fits(worker: WorkerView, need: Need, num_tokens: int) -> bool:
    return need.max_total_tokens <= worker.max_model_len and _blocks(worker, num_tokens) <= worker.total_blocks


def _blocks(worker: WorkerView, num_tokens: int) -> int:
    return -(-num_tokens // worker.fingerprint.block_tokens)


def _has_room(worker: WorkerView, blocks: Callable[[int], int]) -> bool:
    return worker.free_sequences > 0 and blocks(worker.fingerprint.block_tokens) <= worker.free_blocks


def _taken(worker: WorkerView, need: Need) -> float:
    used = worker.total_blocks - worker.free_blocks + need.blocks_to_decode(worker.fingerprint.block_tokens)
    return used / worker.total_blocks
