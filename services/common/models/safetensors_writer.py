"""A safetensors file of bfloat16 tensors, written as a stream: numpy has no bfloat16, and a model need not fit in memory."""

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

_ALIGNMENT_BYTES = 8  # of the header, so that tensors start aligned


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even, as torch does; the bits come back as uint16 of the same shape."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    # Rounding could carry a NaN's mantissa over into the exponent and make it an infinity, or a number.
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def write_bfloat16(
    path: Path, shapes: Mapping[str, tuple[int, ...]], chunks: Iterable[npt.NDArray[np.float32]]
) -> None:
    """Write one file.

    Args:
        path: the new file.
        shapes: name -> shape, in the order of the data.
        chunks: the values of all tensors in that order, cut anywhere; one is held at a time.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        written = 0
        for chunk in chunks:
            written += file.write(to_bfloat16(chunk).astype("<u2", copy=False).data)
    assert written == offset, f"{path}: wrote {written} bytes of tensors, announced {offset}"
