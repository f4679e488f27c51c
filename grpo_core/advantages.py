"""Group-relative advantages: what a completion earned beyond the others of its own group."""

from __future__ import annotations

import torch
from torch import Tensor

STD_EPSILON = 1e-4
"""Added to the standard deviation (as in TRL), so that a nearly constant group is not blown up."""

ZERO_VARIANCE = 1e-6
"""A standard deviation below this share of the rewards' scale is rounding, not signal."""


def has_signal(rewards: Tensor, valid: Tensor) -> bool:
    """Whether a group's valid rewards differ by more than rounding.

    Args:
        rewards: ``float[group]``. valid: ``bool[group]``.
    """
    kept = rewards[valid].double()
    if kept.numel() < 2:
        return False
    scale = max(float(kept.abs().max()), 1.0)
    return float(kept.std()) >= ZERO_VARIANCE * scale


def group_advantages(rewards: Tensor, valid: Tensor, kind: str) -> Tensor:
    """Advantages of one group.

    - ``group_std``: (r - mean) / (std + 1e-4), std with Bessel's correction (GRPO, arXiv 2402.03300, section 4.1.1).
    - ``group_mean``: r - mean (Dr. GRPO, arXiv 2503.20783, equation 3).
    - ``leave_one_out``: r - mean of the others (RLOO, arXiv 2402.14740, equation 5).

    Args:
        rewards: ``float[group]``; entries of invalid items are ignored.
        valid: ``bool[group]``, items that could be scored.

    Returns:
        ``float32[group]``, 0 for invalid items and throughout a group without signal.
    """
    advantages = torch.zeros(len(rewards))
    if not has_signal(rewards, valid):
        return advantages
    kept = rewards[valid].double()
    centred = kept - kept.mean()
    if kind == "group_std":
        centred = centred / (kept.std() + STD_EPSILON)
    elif kind == "leave_one_out":
        centred = centred * len(kept) / (len(kept) - 1)
    advantages[valid] = centred.float()
    return advantages
