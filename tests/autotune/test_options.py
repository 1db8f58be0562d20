from __future__ import annotations

from dataclasses import fields

from tilebudget.autotune.config import TuneConfig
from tilebudget.autotune.options import DEVICE, ENGINE, OPTIONS, RUNTIME, SERVER, STUDY, TRAFFIC


def test_every_setting_has_one_option_and_tune_takes_each_once() -> None:
    settings = sorted(field.name for field in fields(TuneConfig))
    assert sorted(OPTIONS) == settings
    assert sorted((*DEVICE, *SERVER, *TRAFFIC, *STUDY, *ENGINE, *RUNTIME)) == settings
