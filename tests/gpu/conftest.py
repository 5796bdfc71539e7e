"""Kernels run on a GPU where there is one, else in Triton's interpreter: the same tests."""

import functools
import inspect
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

# Read when a kernel is defined: before any test module of this folder, or Triton's own language, is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True, scope="module")
def exact_products() -> Iterator[None]:
    """`tl.dot` where kernels are interpreted: each element from its row and column alone, as on a device.

    The interpreter's own depends on the row's place in the tile, and multiplies the bits of bf16 as if integers.
    """

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        wide = [(self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x).data for x in (a, b)]
        # In float64, whose order of additions is lost when the sum is rounded.
        sums = np.matmul(*wide, dtype=np.float64) + d.data
        return TensorHandle(sums.astype(d.data.dtype), d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield


@functools.cache
def _builtins(package: Any) -> list[tuple[str, Any]]:
    return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


@pytest.fixture(autouse=True, scope="module")
def quick_interpreter() -> Iterator[None]:
    """The interpreter looks at each call through the whole language for what it replaces, and builds a table for each type."""

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name, member in _builtins(package):
            if getattr(package, name) is member:
                interpreter._patch_attr(package, name, member, builder, scope)

    type_of_scalars = functools.cache(interpreter._get_np_dtype)

    def type_of(dtype: Any) -> Any:
        return np.dtype(np.uint64) if dtype.scalar.is_ptr() else type_of_scalars(dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", patch_builtin)
        patch.setattr(interpreter, "_get_np_dtype", type_of)
        yield


@pytest.fixture(scope="module")
def unchecked_overflows() -> Iterator[None]:
    """For whole models, a third faster: that no sum passes its type is checked in the tests of each kernel."""
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.interpreter_builder, "options", options)
        yield


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
