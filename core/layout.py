"""What one KV block is, and the fingerprint two workers compare before they exchange any."""

from dataclasses import asdict, dataclass

from core.errors import ConfigError, FingerprintError
from core.hashing import HASH_SCHEME

PROTOCOL_VERSION = 1
# Blocks a sequence gets room for beyond its known tokens when it is admitted (fewer if its answer is shorter). An answer that
# grows longer takes what is there; when nothing is, somebody is preempted.
GROWTH_BLOCKS = 16
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def growth_blocks(num_tokens: int, max_total_tokens: int, block_tokens: int, num_preemptions: int = 0) -> int:
    """Blocks set aside for a sequence's growth when it is given blocks for its known tokens.

    Twice as many after each preemption, and never more than it can use: so a sequence is preempted by its equals only a
    few times before all it may ever need is set aside.

    Args:
        num_tokens: known now.
        max_total_tokens: prompt and longest answer.
        block_tokens: tokens in one block.
        num_preemptions: how often it had to yield.
    """
    num_left = -(-max_total_tokens // block_tokens) - -(-num_tokens // block_tokens)
    return max(min(GROWTH_BLOCKS << min(num_preemptions, 32), num_left), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """One block of all layers, `[layer, k/v, kv_head, token, dim]`, contiguous: a transfer is one run of bytes."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int = 16
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.block_tokens <= 0 or self.block_tokens & (self.block_tokens - 1):
            raise ConfigError(f"block_tokens={self.block_tokens}: must be a power of two, e.g. 16")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype={self.dtype}: must be one of {', '.join(DTYPE_BYTES)}")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        elements = self.num_layers * 2 * self.num_kv_heads * self.block_tokens * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Everything that must be equal for one worker to use another's KV blocks."""

    model: str
    revision: str
    weights_hash: str
    dtype: str
    kv_dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    layout: str = "block,layer,kv,head,token,dim"
    tp_rank: int = 0
    tp_size: int = 1
    hash_scheme: str = HASH_SCHEME
    protocol_version: int = PROTOCOL_VERSION

    def require_equal(self, other: "Fingerprint") -> None:
        """Raise FingerprintError naming every field that differs and both values (this one's first)."""
        mine, theirs = asdict(self), asdict(other)
        differing = [f"{name}: {mine[name]} here, {theirs[name]} there" for name in mine if mine[name] != theirs[name]]
        if differing:
            raise FingerprintError("KV blocks are not interchangeable: " + "; ".join(differing))
