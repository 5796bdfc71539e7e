"""What would execute data, or a shell, does not occur in the source tree."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("core", "kernels", "kvtransfer", "engine", "services", "bench", "proto")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {"recv_pyobj", "send_pyobj", "system", "popen"}
UNSAFE_LOADERS = {("torch", "load"), ("np", "load"), ("numpy", "load")}


def offences(source: str) -> list[str]:
    """What is forbidden in a source text, with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        what = ""
        if isinstance(node, ast.Import):
            what = ", ".join(alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            what = node.module if node.module and node.module.split(".")[0] in MODULES else ""
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in CALLS:
                what = function.id
            elif isinstance(function, ast.Attribute):
                owner = function.value.id if isinstance(function.value, ast.Name) else ""
                if function.attr in METHODS or (owner, function.attr) in UNSAFE_LOADERS:
                    what = f"{owner}.{function.attr}"
            if any(word.arg == "shell" and not _is_false(word.value) for word in node.keywords):
                what = "shell="
        if what:
            found.append(f"line {node.lineno}: {what}")  # type: ignore[attr-defined]
    return found


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def test_there_are_sources_to_look_at() -> None:
    assert len(SOURCES) > 80


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_executes_data(path: Path) -> None:
    assert offences(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import yaml",
        "socket.recv_pyobj()",
        "eval(text)",
        "exec(text)",
        "subprocess.run(command, shell=True)",
        "subprocess.run(command, shell=flag)",
        "os.system(command)",
        "torch.load(path)",
    ],
)
def test_the_check_sees_each_kind(source: str) -> None:
    assert offences(source)
    assert not offences("subprocess.run(command, shell=False)\nre.compile('x')\njson.loads(text)")
