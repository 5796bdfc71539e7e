"""What one KV block is, and the fingerprint two workers compare before they exchange any."""

from dataclasses import asdict, dataclass

from core.errors import ConfigError, FingerprintError

PROTOCOL_VERSION = 1
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


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
    hash_scheme: str = "none"
    protocol_version: int = PROTOCOL_VERSION

    def require_equal(self, other: "Fingerprint") -> None:
        """Raise FingerprintError naming every field that differs and both values (this one's first)."""
        mine, theirs = asdict(self), asdict(other)
        differing = [f"{name}: {mine[name]} here, {theirs[name]} there" for name in mine if mine[name] != theirs[name]]
        if differing:
            raise FingerprintError("KV blocks are not interchangeable: " + "; ".join(differing))
