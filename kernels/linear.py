"""Matrix products with weights: prepared once at load, multiplied every step."""

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch reader knows
from torch import Tensor


def is_native(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device multiplies matrices of `dtype` in hardware."""
    if dtype == torch.float32 or device.type != "cpu":
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The specification: float32 accumulation, rounded once to x's dtype."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


class Linear:
    """x @ weight.T + bias.

    A dtype the CPU cannot multiply is emulated by torch at a third of float32's speed, so there the (rounded) weights
    are kept as float32, the product is computed in float32, and only its result is rounded.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Prepare the weights.

        Args:
            weight: [out, in].
            bias: [out], or None.
        """
        dtype = weight.dtype if is_native(weight.dtype, weight.device) else torch.float32
        self._weight = weight.to(dtype)
        self._bias = None if bias is None else bias.to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply.

        Args:
            x: [n, in].
        Returns:
            [n, out] in x's dtype.
        """
        return F.linear(x.to(self._weight.dtype), self._weight, self._bias).to(x.dtype)
