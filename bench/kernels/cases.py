"""The shapes that are timed, and the small ones that are compared with the references first."""

from collections.abc import Iterator

import torch

from bench.kernels.case import Case
from bench.kernels.cases_attention import DecodeAttention, PrefillAttention, QkvRopeWrite
from bench.kernels.cases_linear import Linear, QuantizedLinear
from bench.kernels.cases_rows import AddRmsNorm, PackBlocks, SiluMul, UnpackBlocks
from bench.kernels.cases_sampling import DrawTokens, EditLogits, TopLogprobs

_BF16 = torch.bfloat16
_WEIGHTS = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336))  # outputs and inputs of the products of a layer


def timed_cases(quick: bool) -> Iterator[Case]:
    """What is timed: layers of Llama 3.1 8B in bfloat16; `quick`: a few shapes of each op."""
    for batch in (64,) if quick else (1, 8, 64, 256):
        for context in (2048, 8192) if quick else (128, 2048, 8192, 32768):
            yield DecodeAttention(_BF16, batch, context)
    for num_tokens in (8192,) if quick else (512, 2048, 8192):
        yield PrefillAttention(_BF16, 1, num_tokens)
    yield PrefillAttention(_BF16, 1, 10240, num_new=2048)
    for num_blocks in (256,) if quick else (16, 256, 4096):
        for block_bytes in (64 << 10, 2 << 20):
            yield PackBlocks(_BF16, num_blocks, block_bytes)
            yield UnpackBlocks(_BF16, num_blocks, block_bytes)
    for num_rows in (64, 2048) if quick else (1, 64, 2048):
        yield AddRmsNorm(_BF16, num_rows)
        yield QkvRopeWrite(_BF16, num_rows)
        yield SiluMul(_BF16, num_rows)
    for num_rows in (64, 2048) if quick else (1, 16, 64, 256, 2048):
        for num_outputs, num_inputs in _WEIGHTS:
            yield Linear(_BF16, num_rows, num_outputs, num_inputs)
    for num_rows in (16,) if quick else (1, 16, 64, 2048):
        for num_outputs, num_inputs in _WEIGHTS[2:]:
            yield QuantizedLinear(_BF16, num_rows, num_outputs, num_inputs, bits=8)
            yield QuantizedLinear(_BF16, num_rows, num_outputs, num_inputs, bits=4)
    yield EditLogits(torch.float32, 64, 1000)
    yield TopLogprobs(torch.float32, 64, num_top=5)
    yield DrawTokens(torch.float32, 64)
    yield DrawTokens(torch.float32, 64, temperature=0.8)
    yield DrawTokens(torch.float32, 64, temperature=0.8, top_p=0.95)
    yield DrawTokens(torch.float32, 64, temperature=0.8, top_k=50)


def small_cases(dtypes: tuple[torch.dtype, ...]) -> Iterator[Case]:
    """What must be right before anything is timed: each op at sizes that no tile divides.

    Args:
        dtypes: those that the device computes with; Triton's interpreter cannot multiply bfloat16.
    """
    for dtype in dtypes:
        yield DecodeAttention(dtype, 3, 300, num_heads=8, num_kv_heads=2, dim=64)
        yield PrefillAttention(dtype, 2, 37, num_heads=4, num_kv_heads=1, dim=64, num_new=21)
        yield AddRmsNorm(dtype, 3, 100)
        yield QkvRopeWrite(dtype, 5, 4, 2, 64)
        yield SiluMul(dtype, 5, 1100)
        yield Linear(dtype, 17, 100, 600)
        yield QuantizedLinear(dtype, 17, 96, 600, bits=8)
        yield QuantizedLinear(dtype, 3, 96, 600, bits=4)
    yield EditLogits(torch.float32, 3, 20, num_biases=3, vocab=100)
    yield TopLogprobs(torch.float32, 2, num_top=3, vocab=9000)
    yield DrawTokens(torch.float32, 3, vocab=9000)
    yield DrawTokens(torch.float32, 3, temperature=0.8, vocab=9000)
    yield DrawTokens(torch.float32, 2, temperature=0.8, top_p=0.95, top_k=50, vocab=9000)
    yield PackBlocks(_BF16, 3, 6000)
    yield UnpackBlocks(_BF16, 3, 6000)


def launched_cases() -> Iterator[Case]:
    """One of each form that the timed cases launch, and more numbers of rows: they must not make forms of their own."""
    for batch in (1, 3, 16):
        for context in (1, 16, 300, 2048):
            yield DecodeAttention(_BF16, batch, context)
        yield PrefillAttention(_BF16, batch, 300)
        yield PrefillAttention(_BF16, batch, 160, num_new=16)
    for num_blocks in (1, 3, 16):
        yield PackBlocks(_BF16, num_blocks, 64 << 10)
        yield UnpackBlocks(_BF16, num_blocks, 64 << 10)
    for num_rows in (1, 2, 16, 100):
        yield AddRmsNorm(_BF16, num_rows)
        yield QkvRopeWrite(_BF16, num_rows)
        yield SiluMul(_BF16, num_rows)
        yield EditLogits(torch.float32, num_rows, num_said=num_rows, num_biases=1)
        yield DrawTokens(torch.float32, num_rows, temperature=0.8)
        yield TopLogprobs(torch.float32, num_rows, num_top=num_rows % 5)
    for num_rows in (1, 16, 100, 2048):
        for num_outputs, num_inputs in _WEIGHTS:
            yield Linear(_BF16, num_rows, num_outputs, num_inputs)
        yield QuantizedLinear(_BF16, num_rows, 4096, 1024, bits=8)
        yield QuantizedLinear(_BF16, num_rows, 4096, 1024, bits=4)
