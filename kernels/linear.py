"""Matrix products with weights: prepared once at load, multiplied every step."""

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch reader knows
from torch import Tensor

# Rows the packed layout is chosen for. Any number above 1 gives oneDNN's blocked layout, which wins from 2 rows up.
_PACKED_FOR_ROWS = 16


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


def integer_rows_ref(x: Tensor) -> Tensor:
    """What the native library's integer products see of their rows: 14 bits and a sign of each, relative to its group.

    Args:
        x: [n, in] float32, finite.
    Returns:
        [n, in] float32: the nearest multiples of 1 / 16,383 of the largest of 64 neighbours.
    """
    groups = F.pad(x, (0, -x.shape[1] % 64)).view(len(x), -1, 64)
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    inverse = torch.tensor(16383.0) / largest  # of a number, torch would multiply with the reciprocal
    codes = (groups.double() * inverse).round().float()  # rounded once
    return (codes * (largest / 16383)).flatten(1)[:, : x.shape[1]]


class Linear:
    """x @ weight.T + bias.

    A dtype the CPU cannot multiply is emulated by torch at a third of float32's speed, so there the (rounded) weights
    are kept as float32, the product is computed in float32, and only its result is rounded.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, fixed_rows: int | None = None) -> None:
        """Prepare the weights; on a CPU that is a copy in the order in which oneDNN reads them.

        Args:
            weight: [out, in].
            bias: [out], or None.
            fixed_rows: multiply this many rows at a time, always: a row's result then does not depend on the batch, since
                oneDNN chooses its order of additions by the number of rows.
        """
        self._fixed_rows = fixed_rows
        self._dtype = weight.dtype if is_native(weight.dtype, weight.device) else torch.float32
        self._bias = None if bias is None else bias.to(self._dtype)
        has_onednn = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        self._is_packed = weight.device.type == "cpu" and has_onednn
        self._weight = weight.to(self._dtype)
        if self._is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, _PACKED_FOR_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply.

        Args:
            x: [n, in].
        Returns:
            [n, out] in x's dtype.
        """
        wide = x.to(self._dtype)
        if self._fixed_rows is None:
            return self._multiply(wide).to(x.dtype)
        padded = F.pad(wide, (0, 0, 0, -len(x) % self._fixed_rows))
        out = torch.cat([self._multiply(rows) for rows in torch.split(padded, self._fixed_rows)])
        return out[: len(x)].to(x.dtype)

    def _multiply(self, x: Tensor) -> Tensor:
        if self._is_packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return out
        return F.linear(x, self._weight, self._bias)
