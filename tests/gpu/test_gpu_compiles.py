"""After the warm-up no request compiles anything (OVL-14): Triton would, for an integer that is 1 or divides by 16."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from tests.gpu.test_gpu_runner import a_spec, answers, folder, load

__all__ = ["folder"]

pytestmark = pytest.mark.usefixtures("unchecked_overflows")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Iterator[set[str]]:
    """What was compiled: on a GPU as it happens; in the interpreter, what launches with these arguments would compile."""
    keys: set[str] = set()
    if device.type == "cuda":
        compile_it = JITFunction._do_compile

        def do_compile(self: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
            keys.add(f"{self.fn.__name__} {key}")
            return compile_it(self, key, *args, **kwargs)

        monkeypatch.setattr(JITFunction, "_do_compile", do_compile)
        yield keys
        return
    backend, binders = make_backend(GPUTarget("cuda", 90, 32)), {}
    run_it = InterpretedFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if self.fn not in binders:
            function = JITFunction(self.fn, **self.kwargs)
            binders[self.fn] = create_function_from_signature(function.signature, function.params, backend)
        _, specialization, options = binders[self.fn](*args, **kwargs)
        keys.add(f"{self.fn.__name__} {specialization} {options}")
        return run_it(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    yield keys


EXPLAINED = [a_spec("explained", 22, prompt_logprobs=1, max_tokens=1)]  # the head multiplies many rows
MIXED = [
    [a_spec(f"s{length}", length, max_tokens=2) for length in (1, 15, 16, 17, 31)],
    [a_spec("s64", 64, max_tokens=2)],
    [
        a_spec("a", 3, temperature=1.0, top_p=0.5, max_tokens=3),
        a_spec("b", 2, top_k=1, logit_bias=((1, 2.0),), min_tokens=2, logprobs=20, max_tokens=3),
        a_spec("c", 9, frequency_penalty=1.0, temperature=0.5, min_p=0.5, prompt_logprobs=0, max_tokens=3),
    ],
]


@pytest.mark.parametrize(
    ("changes", "requests"), [({}, MIXED), ({"quantization": "int8", "dtype": "float16"}, [EXPLAINED])]
)
def test_no_request_after_the_warm_up_compiles_anything(
    compiled: set[str], folder: Any, device: torch.device, changes: dict[str, Any], requests: list[list[Any]]
) -> None:
    gpu = load(folder, device, **changes)
    try:
        gpu.runner.warm_up()
        assert len({key.split()[0] for key in compiled}) >= 9, "the warm-up launches every kernel"
        before = set(compiled)
        for at_once in requests:
            answers(gpu.runner, at_once)
        assert compiled == before, "\n".join(sorted(compiled - before))
    finally:
        gpu.blocks.close()
