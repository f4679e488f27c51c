"""Weights laid out in advance for products with few rows, as decoding makes them.

oneDNN lays a weight out for its kernels at every call; with few rows that costs as much as the product. The layout is
made once here, by the operators that torch's own compiler uses on a CPU, at the price of a second copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_ROWS = 64
"""Up to so many rows the layout in advance is faster; from about 500 on it makes no difference."""


def packed_linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """``x[rows, d_in] -> x W^T[rows, d_out]`` for a frozen ``weight[d_out, d_in]`` and few rows; no gradients.

    The plain product where a layout in advance is not to be had: other devices, other number formats than bfloat16.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return partial(F.linear, weight=weight)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, FEW_ROWS // 2)
        product = torch.ops.mkldnn._linear_pointwise
    except (AttributeError, RuntimeError):  # operators without a promise: absent from this build of torch
        return partial(F.linear, weight=weight)
    return lambda x: product(x, packed, None, "none", [], "")
