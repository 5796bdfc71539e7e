"""What a worker computes with, whichever role it has and whatever engine is inside."""

from dataclasses import dataclass

from core.layout import Fingerprint, KVLayout
from core.sequence import BlockMemory, Engine
from services.common.ledger import Blocks
from services.common.registry import Capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """An engine with what surrounds it: a loaded model's, or the scripted fake's.

    Args:
        engine, pool, memory, layout: what computes, and where.
        fingerprint: of the blocks.
        eos_token_ids, capacity: of the model and this worker.
        max_cached_prompt_tokens: longer prompts share no blocks, since what their blocks hold depends on their length; 0:
            there is no prefix cache.
    """

    engine: Engine
    pool: Blocks
    memory: BlockMemory
    layout: KVLayout
    fingerprint: Fingerprint
    eos_token_ids: tuple[int, ...]
    capacity: Capacity
    max_cached_prompt_tokens: int
