"""Kernels run on a GPU where there is one, else in Triton's interpreter: the same tests."""

import inspect
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

# Read when a kernel is defined: before any test module of this folder is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tl.dot` where kernels are interpreted: each element from its row and column alone, as on a device.

    The interpreter's own depends on the row's place in the tile, and multiplies the bits of bf16 as if integers.
    """

    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        wide = [(self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x).data for x in (a, b)]
        # In float64, whose order of additions is lost when the sum is rounded.
        sums = np.matmul(*wide, dtype=np.float64) + d.data
        return TensorHandle(sums.astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` and `torch.empty_like` give NaN, or the least integer: an element nobody wrote cannot pass."""

    def poisoned(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)

        return made

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """numpy warns where the interpreter computes inf or NaN; a device does not, and rows nobody reads are often so.

    `bench/gpu_check.sh` may have to do without the plugin that runs coroutines.
    """
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
            if inspect.iscoroutinefunction(getattr(item, "function", None)) and find_spec("pytest_asyncio") is None:
                item.add_marker(pytest.mark.skip("NOT RUN: No module named 'pytest_asyncio'"))
