"""The prefix cache through the whole engine: what is found, what is not, and that no answer ever changes by it."""

import random
from functools import cache

import pytest

from core.hashing import hash_seed
from core.sequence import SequenceSpec
from engine.loop import EngineLoop
from engine.scheduler import StepLimits
from engine.scripted import ScriptedEngine, scripted_engine
from engine.sequence import Sequence
from tests.engine_harness import Recorder, answer, serve, spec

BLOCK = 16
LIMITS = StepLimits(max_batched_tokens=128, max_sequences=64)


def ask(parts: ScriptedEngine, prompt: range | list[int], name: str = "a", **more: object) -> Recorder:
    return serve(parts, [spec(parts, name, prompt, **more)], LIMITS)  # type: ignore[arg-type]


def num_cached(listener: Recorder, name: str = "a") -> int:
    return listener.end_of(name).num_cached_tokens


def test_a_repeated_prompt_costs_at_most_one_block() -> None:
    parts, prompt = scripted_engine(num_blocks=200), [token % 250 for token in range(2_000)]
    cold, warm = ask(parts, prompt), ask(parts, prompt)
    assert cold.tokens("a") == warm.tokens("a") == answer(prompt, 3)
    assert cold.total("num_prompt_tokens") == 2_000
    assert warm.total("num_prompt_tokens") <= BLOCK
    assert num_cached(warm) == warm.total("num_found_tokens") == 2_000 - warm.total("num_prompt_tokens")


@pytest.mark.parametrize("num_tokens", [1, *(k * BLOCK + more for k in (1, 2, 8) for more in (-1, 0, 1))])
def test_around_block_borders_an_answer_is_the_same_cold_warm_and_with_one_more_token(num_tokens: int) -> None:
    parts, prompt = scripted_engine(), list(range(5, 5 + num_tokens))
    for round_number, tokens in enumerate((prompt, prompt, [*prompt, 3], [*prompt, 3])):
        listener = ask(parts, tokens, max_tokens=BLOCK + 2)
        assert listener.tokens("a") == answer(tokens, BLOCK + 2)
        known = len(tokens) if round_number % 2 else len(tokens) - 1 if round_number else 0
        assert num_cached(listener) == min(known // BLOCK, (len(tokens) - 1) // BLOCK) * BLOCK


def test_an_answer_s_blocks_are_found_by_the_conversation_that_goes_on() -> None:
    parts, prompt = scripted_engine(), list(range(40))
    first = ask(parts, prompt, max_tokens=30)
    longer = [*prompt, *first.tokens("a"), 9]
    assert num_cached(ask(parts, longer)) == 69 // BLOCK * BLOCK  # the last token's KV was never computed


def test_nothing_is_used_behind_a_hole() -> None:
    parts, prompt = scripted_engine(), list(range(4 * BLOCK))
    ask(parts, prompt)
    changed = [*prompt[:BLOCK], 99, *prompt[BLOCK + 1 :], 7]
    listener = ask(parts, changed)
    assert num_cached(listener) == BLOCK
    assert listener.tokens("a") == answer(changed, 3)


def identical(parts: ScriptedEngine, prompt: list[int]) -> list[SequenceSpec]:
    return [spec(parts, f"s{number}", prompt) for number in range(64)]


@pytest.mark.parametrize("num_tokens", [BLOCK - 1, 20 * BLOCK, 20 * BLOCK + 5])
def test_identical_prompts_at_once_are_computed_once(num_tokens: int) -> None:
    parts, prompt = scripted_engine(num_blocks=300), [token % 250 for token in range(num_tokens)]
    listener = serve(parts, identical(parts, prompt), LIMITS)
    assert all(listener.tokens(f"s{number}") == answer(prompt, 3) for number in range(64))
    # Once, and for each of the others what is not in a full block; the newest token of a prompt is always computed.
    assert listener.total("num_prompt_tokens") == num_tokens + 63 * ((num_tokens - 1) % BLOCK + 1)


def test_prompts_with_one_prefix_at_once_compute_it_once() -> None:
    parts, prefix = scripted_engine(num_blocks=300), list(range(10 * BLOCK))
    prompts = {f"s{number}": [*prefix, *[number] * 20] for number in range(64)}
    listener = serve(parts, [spec(parts, name, prompt) for name, prompt in prompts.items()], LIMITS)
    assert all(listener.tokens(name) == answer(prompt, 3) for name, prompt in prompts.items())
    assert listener.total("num_prompt_tokens") == len(prefix) + 64 * 20


def test_when_the_one_that_computes_is_aborted_another_goes_on() -> None:
    parts, prompt = scripted_engine(num_blocks=300), [token % 250 for token in range(1_000)]

    def abort_who_computes(loop: EngineLoop, num_steps: int, live: list[Sequence]) -> None:
        computing = [sequence for sequence in live if sequence.has_blocks and not sequence.is_decoding]
        if computing and len(live) > 1:
            loop.abort(computing[0].spec.sequence_id)

    limits = StepLimits(max_batched_tokens=64, max_sequences=8)
    listener = serve(parts, identical(parts, prompt)[:5], limits, abort_who_computes)
    ends = [listener.end_of(f"s{number}").finish_reason for number in range(5)]
    assert ends == ["abort"] * 4 + ["length"]
    assert listener.tokens("s4") == answer(prompt, 3)


def seed_of(**changed: str) -> bytes:
    fields = {"model": "m", "revision": "r", "weights_hash": "w", "dtype": "float32", "adapter": "", "tenant": ""}
    return hash_seed(**{**fields, "salt": "", **changed}, block_tokens=BLOCK)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["model", "revision", "weights_hash", "dtype", "adapter", "tenant", "salt"])
def test_what_differs_in_anything_but_its_tokens_shares_nothing(field: str) -> None:
    parts, prompt = scripted_engine(), list(range(40))
    names = ["adapter", "salt", "tenant"]
    seeds = [seed_of(), seed_of(**{field: "x"}), *(seed_of(**{name: "x"}) for name in names if name != field)]
    for seed in seeds:
        assert num_cached(ask(parts, prompt, hash_seed=seed)) == 0
    for seed in seeds:
        assert num_cached(ask(parts, prompt, hash_seed=seed)) == 2 * BLOCK
    assert num_cached(ask(parts, prompt, hash_seed=None)) == 0


def test_whose_prompt_s_log_probabilities_are_wanted_computes_it_all_and_shares_it_after() -> None:
    parts, prompt = scripted_engine(), list(range(40))
    ask(parts, prompt)
    listener = ask(parts, prompt, prompt_logprobs=0)
    assert (num_cached(listener), listener.total("num_prompt_tokens")) == (0, 40)
    given = [entry.token_id for output in listener.of("a") for entry in output.prompt_logprobs]
    assert given == prompt[1:]
    assert num_cached(ask(parts, prompt)) == 2 * BLOCK


@cache
def unbounded_answers(seed: int, is_cached: bool) -> dict[str, list[int]]:
    """Of a pool that always has room."""
    parts = scripted_engine(num_blocks=3_000)
    listener = serve(parts, shared_prefixes(parts, seed, is_cached), LIMITS)
    return {f"s{number}": listener.tokens(f"s{number}") for number in range(200)}


def shared_prefixes(parts: ScriptedEngine, seed: int, is_cached: bool = True) -> list[SequenceSpec]:
    rng = random.Random(seed)
    prefixes = [[rng.randrange(250) for _ in range(rng.randint(8, 150))] for _ in range(10)]
    return [
        spec(
            parts,
            f"s{number}",
            [*rng.choice(prefixes), *[rng.randrange(250) for _ in range(rng.choice((0, 1, 16, 40)))]],
            max_tokens=rng.randint(1, 60),
            priority=rng.randrange(2),
            temperature=rng.choice((0.0, 1.0)),
            seed=number,
            hash_seed=b"tests" if is_cached else None,
        )
        for number in range(200)
    ]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("swap_blocks", [0, 100])
def test_a_tiny_pool_with_cancels_gives_the_answers_of_an_unbounded_one(
    seed: int, swap_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unbounded_answers(seed, True) == unbounded_answers(seed, False)
    monkeypatch.setattr("core.layout.GROWTH_BLOCKS", 1)  # so that sequences yield
    parts, rng, aborted = scripted_engine(num_blocks=50), random.Random(seed), set()

    def cancel_some(loop: EngineLoop, num_steps: int, live: list[Sequence]) -> None:
        if live and rng.random() < 0.05:
            name = rng.choice(live).spec.sequence_id
            aborted.add(name)
            loop.abort(name)

    listener = serve(parts, shared_prefixes(parts, seed), LIMITS, cancel_some, swap_blocks=swap_blocks)
    assert listener.total("num_preemptions") > 10
    for name, tokens in unbounded_answers(seed, True).items():
        end = listener.end_of(name)
        got = listener.tokens(name)
        assert end.finish_reason == ("abort" if name in aborted else "length")
        assert got == tokens[: len(got)]
        assert name in aborted or len(got) == len(tokens)
