"""What the sampler asks of the native library."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from kernels.native.library import load_library

BLOCK = 128  # as in sample.c

Floats = npt.NDArray[np.float32]


class SamplingOps:
    """The sampler's functions of one build of the library; they run in the calling thread."""

    def __init__(self, path: Path) -> None:
        """Load the library that `find_library` found."""
        self._library = load_library(path)

    def weigh(self, row: Floats, best: float, scale: float) -> tuple[Floats, Floats]:
        """2 ** ((row - best) * scale), and the sums of its blocks; exactly 0 where that is below 2 ** -126.

        Args:
            row: [n], contiguous; -inf is allowed.
            best: the largest of `row`.
            scale: above 0.
        Returns:
            [n] and [ceil(n / BLOCK)].
        """
        assert row.dtype == np.float32
        assert row.ndim == 1
        assert row.flags.c_contiguous
        weights, sums = np.empty_like(row), np.empty(-(-len(row) // BLOCK), np.float32)
        self._library.baton_weigh(row.ctypes.data, len(row), best, scale, weights.ctypes.data, sums.ctypes.data)
        return weights, sums
