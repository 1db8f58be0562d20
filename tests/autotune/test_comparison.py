from __future__ import annotations

import pytest
from tilebudget.autotune.scoring.comparison import compare

#: Student's own example (Biometrika 1908): hours of sleep gained by ten patients under each of two drugs.
DRUG_1 = (0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0)
DRUG_2 = (1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4)


def rounds(values: tuple[float, ...]) -> dict[int, float]:
    return dict(enumerate(values))


def test_the_paired_interval_is_the_published_one() -> None:
    """Difference 1.58 h, 95% confidence interval 0.70 to 2.46 (R's documentation of t.test on `sleep`)."""
    found = compare(rounds(DRUG_2), rounds(DRUG_1))
    scale = sum(abs(value) for value in DRUG_1) / 10
    assert found.outcome == "higher"
    assert found.difference * scale == pytest.approx(1.58)
    assert found.low * scale == pytest.approx(0.7001142, rel=1e-4)
    assert found.high * scale == pytest.approx(2.4598858, rel=1e-4)
    assert compare(rounds(DRUG_1), rounds(DRUG_2)).outcome == "lower"


def test_pairing_sees_through_what_a_round_does_to_both() -> None:
    """A machine that slows by a third over the rounds hides 3% from the ranges, not from the pairs."""
    drift = (1.0, 0.9, 0.8, 0.7)
    one = rounds(tuple(103.0 * factor for factor in drift))
    other = rounds(tuple(100.0 * factor + wobble for factor, wobble in zip(drift, (0.2, -0.2, 0.1, -0.1), strict=True)))
    assert compare(one, other).outcome == "higher"


def test_noise_is_open_a_small_interval_is_a_tie() -> None:
    assert compare(rounds((100.0, 90.0, 110.0)), rounds((95.0, 104.0, 100.0))).outcome == "open"
    assert compare(rounds((100.0, 100.2, 99.9)), rounds((100.1, 100.0, 100.0))).outcome == "tie"


def test_a_small_difference_counts_only_beyond_the_scatter_of_the_rounds() -> None:
    assert compare(rounds((100.5, 100.5, 100.5)), rounds((100.0, 100.0, 100.0))).outcome == "higher"
    assert compare(rounds((98.5, 100.5, 102.5)), rounds((98.0, 100.0, 102.0))).outcome == "tie"


def test_one_round_decides_only_on_a_device_that_repeats_itself() -> None:
    assert compare({0: 101.0}, {0: 100.0}).outcome == "open"
    assert compare({0: 101.0}, {0: 100.0}, exact=True).outcome == "higher"
    assert compare({0: 101.0}, {0: 100.0}, exact=True, resolution=0.02).outcome == "tie"
    assert compare({0: 100.0}, {1: 100.0}, exact=True).outcome == "open"


def test_only_common_rounds_are_paired() -> None:
    found = compare({0: 10.0, 2: 30.0, 5: 99.0}, {0: 10.0, 1: 50.0, 2: 30.0})
    assert (found.num_pairs, found.difference) == (2, 0.0)
