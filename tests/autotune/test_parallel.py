from __future__ import annotations

import os

import pytest
from tilebudget.autotune.study import parallel
from tilebudget.autotune.study.parallel import side_by_side


@pytest.mark.parametrize("cores", [1, 2])
def test_results_come_in_order_whatever_the_cores(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "num_cores", lambda: cores)
    offset = 10  # a closure, which only a fork can carry over

    results = list(side_by_side(lambda item: (item + offset, os.getpid()), [3, 1, 2]))

    assert [value for value, _ in results] == [13, 11, 12]
    assert any(pid != os.getpid() for _, pid in results) == (cores > 1)


def test_an_error_of_one_item_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "num_cores", lambda: 2)
    with pytest.raises(ZeroDivisionError):
        list(side_by_side(lambda item: 1 / item, [1, 0]))
