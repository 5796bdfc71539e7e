"""Regenerate the gRPC stubs under proto/baton/v1 (`make proto`); a test compares its output with what is committed."""

import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent


def generate(out: Path) -> None:
    """Write the stubs of every .proto here into `out`/baton/v1."""
    protos = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("baton/v1/*.proto"))
    well_known = resources.files("grpc_tools") / "_proto"
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    arguments = ["protoc", f"-I{ROOT}", f"-I{well_known}", *outputs]
    if protoc.main([*arguments, *protos]) != 0:
        sys.exit("protoc failed")


if __name__ == "__main__":
    generate(ROOT)
