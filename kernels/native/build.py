"""Compiles the native library beside its sources: `python -m kernels.native.build`.

One library per level of the CPU family, so that an installation can be copied to another machine; `library.py` picks.
"""

import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
BUILT = SOURCES / "built"
# Contraction makes `a += b * c` one fused operation in every loop alike; nothing else of IEEE arithmetic is given up.
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC", "-pthread")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Level:
    """One set of instructions to compile for."""

    name: str
    flags: tuple[str, ...]
    cpu_features: frozenset[str]  # as /proc/cpuinfo calls them


# Best first; the last one runs on every CPU of the machine's family.
_X86_LEVELS = (
    Level(
        "avx512",
        ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mbmi2", "-mprefer-vector-width=512"),
        frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "bmi2"}),
    ),
    Level("avx2", ("-mavx2", "-mfma", "-mbmi2"), frozenset({"avx2", "fma", "bmi2"})),
)
_BASE_LEVEL = Level("base", (), frozenset())


def levels(machine: str | None = None) -> tuple[Level, ...]:
    """Levels of a machine's CPU family, best first.

    Args:
        machine: as `platform.machine` names it; None: this one.
    """
    is_x86 = (machine or platform.machine()) in ("x86_64", "AMD64")
    return (*_X86_LEVELS, _BASE_LEVEL) if is_x86 else (_BASE_LEVEL,)


def library_path(level: Level, sources: Path = SOURCES, built: Path = BUILT) -> Path:
    """Where a level's library lies. The name holds a hash of sources and flags: a stale library is never loaded."""
    digest = hashlib.sha256(repr((FLAGS, level.flags)).encode())
    for path in sorted(sources.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    return built / f"{level.name}-{digest.hexdigest()[:16]}.so"


def find_compiler(environ: Mapping[str, str]) -> list[str]:
    """The command of a C compiler.

    Args:
        environ: the environment, for CC and PATH.
    Raises:
        FileNotFoundError: there is none.
    """
    if environ.get("CC"):
        return shlex.split(environ["CC"])
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name, path=environ.get("PATH")):
            return [name]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise FileNotFoundError("no C compiler: set CC, or install gcc, clang, or ziglang from PyPI")


def build(compiler: list[str], sources: Path = SOURCES, built: Path = BUILT) -> list[Path]:
    """Compile what is not built yet, and remove what earlier sources gave.

    Args:
        compiler: its command.
        sources: folder of the .c and .h files.
        built: folder of the libraries.
    Returns:
        The libraries, best level first; those a compiler is too old for are left out.
    Raises:
        subprocess.CalledProcessError: the compiler failed even at the level every CPU has.
    """
    built.mkdir(exist_ok=True)
    paths = {level: library_path(level, sources, built) for level in levels()}
    for path in set(built.glob("*.so")) - set(paths.values()):
        path.unlink()
    for level, path in paths.items():
        if path.exists():
            continue
        partial = path.with_suffix(f".{os.getpid()}")  # a library appears whole or not at all
        files = [str(file) for file in sorted(sources.glob("*.c"))]
        command = [*compiler, *FLAGS, *level.flags, *files, "-lm", "-o", str(partial)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own arguments
        if done.returncode == 0:
            partial.replace(path)
        elif level.cpu_features:
            logger.warning("%s is left out: %s", level.name, done.stderr.strip())
        else:
            sys.stderr.write(done.stderr)
            done.check_returncode()
    return [path for path in paths.values() if path.exists()]


def main() -> int:
    """Build for this machine's CPU family and say where the libraries are."""
    try:
        compiler = find_compiler(os.environ)
    except FileNotFoundError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    for path in build(compiler):
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
