"""Rows of logits that are hard on samplers, each kind in its own way."""

import math

import numpy as np

from engine.draw import Row


def logits_of(shape: str, size: int, seed: int) -> Row:
    """A row of a kind: peaked, flat, equal, ties, holes, steep, signs (of zeros); any other is plain."""
    rng = np.random.default_rng(seed)
    row = rng.normal(0.0, 3.0, size)
    if shape == "peaked":
        row[rng.integers(0, size, 20)] += 18.0
    elif shape == "flat":
        row *= 0.05
    elif shape == "equal":
        row[:] = -3.5
    elif shape == "ties":
        row = np.round(row) * 2.0
    elif shape == "holes":
        row[rng.random(size) < 0.9] = -math.inf
        row[size // 2] = 1.0
    elif shape == "steep":
        row = -np.arange(size) / 50.0
    elif shape == "signs":
        row = np.where(rng.random(size) < 0.5, -0.0, 0.0) * 1.0
        row[::3] = 1e-3
    return row.astype(np.float32)
