"""The native library for tests: built on demand, so that a changed source is never tested by a stale build."""

import os
from functools import cache
from pathlib import Path

from kernels.native.build import build, find_compiler
from kernels.native.library import find_library
from kernels.native.ops import NativeOps


@cache
def built_library() -> Path:
    """The build this CPU takes."""
    path = find_library()
    if path is None:
        build(find_compiler(os.environ))
        path = find_library()
    assert path is not None
    return path


@cache
def native_ops(threads: int = 1) -> NativeOps:
    """Its functions."""
    return NativeOps(built_library(), threads)
