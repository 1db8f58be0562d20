"""The run folder: every file is written whole or not at all (ARCHITECTURE.md lists them)."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

import pandas as pd

from ..engine import RunRecord
from .problem import DeviceFacts
from .record_files import ITERATIONS_FILE, REQUESTS_FILE, iteration_table, request_table, write_tables
from .trial import TrialRow


class RunFolder:
    """Files of one study below ``path``; created when missing."""

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_dir():
            raise ValueError(f"run_dir={path}: is a file, must be a folder")
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    @property
    def journal(self) -> Path:
        """Optuna's journal file."""
        return self.path / "study.journal"

    def read_facts(self) -> DeviceFacts | None:
        """What an earlier run of this study read off the device; None when there was none.

        Raises ValueError when ``profile.json`` is damaged.
        """
        file = self.path / "profile.json"
        if not (self.journal.exists() and file.exists()):
            return None
        try:
            return DeviceFacts.from_json(json.loads(file.read_text()))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{file}: damaged ({type(error).__name__}: {error}); use another run folder") from None

    def write_json(self, name: str, data: Mapping[str, object]) -> None:
        """Write ``data`` as JSON."""
        text = json.dumps(data, indent=2, default=str) + "\n"
        self._write(name, lambda file: file.write_text(text))

    def write_trials(self, rows: Sequence[TrialRow]) -> None:
        """Write ``trials.parquet``: all engine runs of the study so far."""
        frame = pd.DataFrame([row.to_row() for row in rows])
        self._write("trials.parquet", lambda file: frame.to_parquet(file, index=False))

    def write_records(self, records: Sequence[tuple[TrialRow, RunRecord]]) -> None:
        """Write ``iterations.parquet`` and ``requests.parquet`` of the runs that the report draws.

        Nothing is written where there are none.
        """
        for name, make in ((ITERATIONS_FILE, iteration_table), (REQUESTS_FILE, request_table)):
            if records:
                tables = (make(row, record) for row, record in records)
                self._write(name, partial(write_tables, tables, name))

    def point_latest(self) -> None:
        """Let ``latest`` beside the folder point to it; skipped where the place is taken by something else."""
        latest = self.path.parent / "latest"
        if self.path.name == "latest" or (latest.exists() and not latest.is_symlink()):
            return
        temporary = self.path.parent / f".latest-{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(self.path.name)
        temporary.replace(latest)

    def _write(self, name: str, write: Callable[[Path], object]) -> None:
        handle, temporary = tempfile.mkstemp(dir=self.path, prefix=f".{name}-")
        os.close(handle)
        try:
            write(Path(temporary))
            os.chmod(temporary, 0o644)
            os.replace(temporary, self.path / name)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def default_run_dir(model: str) -> Path:
    """``runs/<time>-<model>`` below the current folder."""
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{Path(model).name}"
