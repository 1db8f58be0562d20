from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from tilebudget.autotune.config import TuneConfig
from tilebudget.autotune.options import DEVICE, ENGINE, OPTIONS, RUNTIME, SERVER, STUDY, TRAFFIC


def test_every_setting_has_one_option_and_tune_takes_each_once() -> None:
    settings = sorted(field.name for field in fields(TuneConfig))
    assert sorted(OPTIONS) == settings
    assert sorted((*DEVICE, *SERVER, *TRAFFIC, *STUDY, *ENGINE, *RUNTIME)) == settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tbt_slo": 5}, "tbt_slo=5: must be of type str, not int"),
        ({"num_trials": "4"}, "num_trials='4': must be of type int, not str"),
        ({"seed": True}, "seed=True: must be of type int, not bool"),
        ({"warm_start": 1}, "warm_start=1: must be of type bool, not int"),
        ({"tbt_slo": "banana"}, "tbt_slo='banana': must be strict, relaxed, or a positive duration"),
    ],
)
def test_settings_of_a_wrong_type_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TuneConfig(**settings)  # type: ignore[arg-type]


def test_whole_numbers_and_paths_serve_where_floats_and_names_are_asked(tmp_path: Path) -> None:
    assert TuneConfig(time_limit=5, model=tmp_path).time_limit == 5  # type: ignore[arg-type]
