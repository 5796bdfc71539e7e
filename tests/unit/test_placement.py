"""Placement is a pure function: alive, paired, roomy, least loaded, whatever the order of the snapshot."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.layout import Fingerprint
from services.router.placement import Need, Placement, Refusal, WorkerView, can_pair, place, place_aggregated

KV = Fingerprint(
    model="m",
    revision="r",
    weights_hash="w",
    dtype="float32",
    kv_dtype="float32",
    num_layers=1,
    num_kv_heads=1,
    head_dim=8,
    block_tokens=16,
)
OTHER_KV = replace(KV, block_tokens=32)
ENDPOINTS = ["tcp://d0", "tcp://d1", "tcp://d2"]
NEED = Need(num_prompt_tokens=40, max_total_tokens=100)  # 3 blocks of prompt, 7 in all


def prefill(number: int = 0, **changes: object) -> WorkerView:
    view = WorkerView(
        worker_id=f"p{number}",
        is_ready=True,
        fingerprint=KV,
        peers=frozenset(ENDPOINTS),
        free_blocks=100,
        total_blocks=100,
        free_sequences=8,
        max_model_len=1000,
    )
    return replace(view, **changes)  # type: ignore[arg-type]


def decode(number: int = 0, **changes: object) -> WorkerView:
    view = replace(prefill(), worker_id=f"d{number}", peers=frozenset(), kv_endpoint=ENDPOINTS[number])
    return replace(view, **changes)  # type: ignore[arg-type]


@st.composite
def views(draw: st.DrawFn, role: str) -> list[WorkerView]:
    found = []
    for number in range(draw(st.integers(0, 3))):
        total = draw(st.integers(1, 12))
        found.append(
            WorkerView(
                worker_id=f"{role}{number}",
                is_ready=draw(st.booleans()),
                fingerprint=draw(st.sampled_from([KV, OTHER_KV])),
                kv_endpoint=ENDPOINTS[number] if role == "d" else "",
                peers=frozenset(draw(st.sets(st.sampled_from(ENDPOINTS)))) if role == "p" else frozenset(),
                free_blocks=draw(st.integers(-2, total)),  # a report may lag behind what the router sent
                total_blocks=total,
                free_sequences=draw(st.integers(-1, 3)),
                queued_tokens=draw(st.integers(0, 3)),
                max_model_len=draw(st.sampled_from([50, 200])),
            )
        )
    return found


needs = st.builds(lambda prompt, answer: Need(prompt, prompt + answer), st.integers(1, 120), st.integers(1, 120))
exclusions = st.sets(st.sampled_from(["p0", "p1", "p2", "d0", "d1", "d2"]))


def serves(view: WorkerView, excluded: set[str]) -> bool:
    return view.is_ready and view.worker_id not in excluded


def blocks(view: WorkerView, num_tokens: int) -> int:
    return -(-num_tokens // view.fingerprint.block_tokens)


def could_fit(view: WorkerView, need: Need, num_tokens: int) -> bool:
    return need.max_total_tokens <= view.max_model_len and blocks(view, num_tokens) <= view.total_blocks


def fits_now(view: WorkerView, num_tokens: int) -> bool:
    return view.free_sequences >= 1 and view.free_blocks >= blocks(view, num_tokens)


@given(views("p"), views("d"), needs, exclusions, st.integers())
def test_the_choice_is_alive_paired_roomy_and_least_loaded_and_a_refusal_says_why(
    prefills: list[WorkerView], decodes: list[WorkerView], need: Need, excluded: set[str], seed: int
) -> None:
    choice = place(prefills, decodes, need, excluded, random.Random(seed))
    pairs = [
        (p, d) for p in prefills for d in decodes if serves(p, excluded) and serves(d, excluded) and can_pair(p, d)
    ]
    possible = [
        (p, d)
        for p, d in pairs
        if could_fit(p, need, need.num_prompt_tokens) and could_fit(d, need, need.max_total_tokens)
    ]
    now = [(p, d) for p, d in possible if fits_now(p, need.num_prompt_tokens) and fits_now(d, need.max_total_tokens)]
    if not pairs:
        assert choice is Refusal.NO_WORKERS
    elif not possible:
        assert choice is Refusal.NEVER_FITS
    elif not now:
        assert choice is Refusal.FULL
    else:
        assert isinstance(choice, Placement)
        (chosen,) = [(p, d) for p, d in now if (p.worker_id, d.worker_id) == (choice.prefill, choice.decode)]
        assert chosen[0].queued_tokens == min(p.queued_tokens for p, _ in now)
        used = [
            (d.total_blocks - d.free_blocks + blocks(d, need.max_total_tokens)) / d.total_blocks
            for p, d in now
            if p.queued_tokens == chosen[0].queued_tokens
        ]
        d = chosen[1]
        assert (d.total_blocks - d.free_blocks + blocks(d, need.max_total_tokens)) / d.total_blocks == min(used)


@given(views("d"), needs, exclusions, st.integers())
def test_aggregated_placement_obeys_the_same_rules(
    workers: list[WorkerView], need: Need, excluded: set[str], seed: int
) -> None:
    choice = place_aggregated(workers, need, excluded, random.Random(seed))
    alive = [worker for worker in workers if serves(worker, excluded)]
    possible = [worker for worker in alive if could_fit(worker, need, need.max_total_tokens)]
    now = {worker.worker_id: worker for worker in possible if fits_now(worker, need.max_total_tokens)}
    if now:
        assert isinstance(choice, Placement)
        assert choice.prefill is None
        assert now[choice.decode].queued_tokens == min(worker.queued_tokens for worker in now.values())
    else:
        assert choice is (Refusal.FULL if possible else Refusal.NEVER_FITS if alive else Refusal.NO_WORKERS)


@given(views("p"), views("d"), needs, st.randoms(use_true_random=False))
def test_whether_and_how_good_does_not_depend_on_the_order_of_the_snapshot(
    prefills: list[WorkerView], decodes: list[WorkerView], need: Need, shuffler: random.Random
) -> None:
    def outcome(some: list[WorkerView], others: list[WorkerView]) -> object:
        choice = place(some, others, need, (), random.Random(1))
        if isinstance(choice, Refusal):
            return choice
        (p,) = [view for view in some if view.worker_id == choice.prefill]
        (d,) = [view for view in others if view.worker_id == choice.decode]
        used = (d.total_blocks - d.free_blocks + blocks(d, need.max_total_tokens)) / d.total_blocks
        return p.queued_tokens, used

    before = outcome(prefills, decodes)
    shuffler.shuffle(prefills)
    shuffler.shuffle(decodes)
    assert outcome(prefills, decodes) == before


def test_ties_spread_over_all_equal_pairs() -> None:
    rng = random.Random(3)
    prefills, decodes = [prefill(0), prefill(1)], [decode(0), decode(1)]
    chosen = Counter(place(prefills, decodes, NEED, (), rng) for _ in range(400))
    assert len(chosen) == 4
    assert min(chosen.values()) > 60  # 100 expected, standard deviation 9


@pytest.mark.parametrize(
    ("prefills", "decodes", "expected"),
    [
        ([], [decode()], Refusal.NO_WORKERS),
        ([prefill()], [], Refusal.NO_WORKERS),
        ([prefill(is_ready=False)], [decode()], Refusal.NO_WORKERS),
        ([prefill()], [decode(is_ready=False)], Refusal.NO_WORKERS),
        ([prefill(peers=frozenset())], [decode()], Refusal.NO_WORKERS),  # no handshake yet
        ([prefill()], [decode(fingerprint=OTHER_KV)], Refusal.NO_WORKERS),
        ([prefill()], [decode(max_model_len=99)], Refusal.NEVER_FITS),
        ([prefill()], [decode(total_blocks=6, free_blocks=6)], Refusal.NEVER_FITS),
        ([prefill(total_blocks=2, free_blocks=2)], [decode()], Refusal.NEVER_FITS),
        ([prefill()], [decode(free_blocks=6)], Refusal.FULL),
        ([prefill(free_blocks=2)], [decode()], Refusal.FULL),
        ([prefill(free_sequences=0)], [decode()], Refusal.FULL),
        ([prefill()], [decode(free_sequences=0)], Refusal.FULL),
        ([prefill(free_blocks=3)], [decode(free_blocks=7)], Placement("d0", "p0")),  # exactly enough
    ],
)
def test_each_reason_to_refuse(
    prefills: list[WorkerView], decodes: list[WorkerView], expected: Placement | Refusal
) -> None:
    assert place(prefills, decodes, NEED, (), random.Random(0)) == expected


def test_a_worker_that_failed_this_request_is_not_tried_again() -> None:
    rng = random.Random(0)
    assert place([prefill()], [decode(0), decode(1)], NEED, {"d0"}, rng) == Placement("d1", "p0")
    assert place([prefill()], [decode(0)], NEED, {"d0"}, rng) is Refusal.NO_WORKERS
