"""Group-relative advantages against numbers derived by hand."""

import pytest
import torch

from grpo_core.advantages import group_advantages, has_signal

REWARDS = torch.tensor([1.0, 0.0, 0.0, 0.0])
ALL = torch.ones(4, dtype=torch.bool)

# mean 1/4; Bessel std sqrt((0.75^2 + 3 * 0.25^2) / 3) = 0.5
CASES = {
    "group_mean": [0.75, -0.25, -0.25, -0.25],
    "group_std": [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001],  # 1.4997, -0.4999
    "leave_one_out": [1.0, -1 / 3, -1 / 3, -1 / 3],  # 4/3 of the centred ones
}


@pytest.mark.parametrize(("kind", "expected"), CASES.items())
def test_advantages_of_one_success_in_four(kind: str, expected: list[float]) -> None:
    assert group_advantages(REWARDS, ALL, kind).tolist() == pytest.approx(expected, abs=1e-6)


def test_standard_deviation_is_the_groups_own_not_the_batchs() -> None:
    # 0.75 / (0.5 + 1e-4) and 7.5 / (5 + 1e-4): each group is scaled by itself
    assert float(group_advantages(REWARDS, ALL, "group_std")[0]) == pytest.approx(1.4997, abs=1e-4)
    assert float(group_advantages(10 * REWARDS, ALL, "group_std")[0]) == pytest.approx(1.5000, abs=1e-4)


@pytest.mark.parametrize("kind", CASES)
def test_rounding_noise_is_not_blown_up_into_advantages(kind: str) -> None:
    rewards = torch.tensor([0.7, 0.7, 0.7, 0.7 + 6e-8])
    assert not has_signal(rewards, ALL)
    assert group_advantages(rewards, ALL, kind).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("kind", CASES)
def test_each_group_has_its_own_baseline(kind: str) -> None:
    # One prompt always solved and one never: nothing to learn from either, although rewards differ between them.
    for reward in (0.0, 1.0):
        assert group_advantages(torch.full((4,), reward), ALL, kind).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("kind", CASES)
def test_invalid_items_leave_the_baseline(kind: str) -> None:
    rewards = torch.tensor([1.0, 0.0, float("nan"), 0.0])
    valid = torch.tensor([True, True, False, True])
    kept = group_advantages(rewards[valid], ALL[:3], kind)
    advantages = group_advantages(rewards, valid, kind)
    assert advantages.tolist() == [float(kept[0]), float(kept[1]), 0.0, float(kept[2])]
    assert float(kept[0]) > 0


def test_one_valid_item_has_no_group() -> None:
    assert not has_signal(REWARDS, torch.tensor([True, False, False, False]))


def test_advantages_share_no_memory_with_rewards() -> None:
    rewards = REWARDS.clone()
    advantages = group_advantages(rewards, ALL, "group_mean")
    advantages += 100
    assert rewards.tolist() == [1, 0, 0, 0]
