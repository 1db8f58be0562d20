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

from ...engine import RunRecord
from ...kernels.errors import TileBudgetError
from ..study.file_lock import FileLock
from ..study.storages import JOURNAL_NAME
from ..study.trial import TrialRow
from .records import ITERATIONS_FILE, REQUESTS_FILE, iteration_table, request_table, write_tables


class RunFolderError(TileBudgetError):
    """A file of the run folder cannot be written."""


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
        return self.path / JOURNAL_NAME

    @property
    def logs(self) -> Path:
        """Folder of the logs of a server that the study starts, one for each run; there once it has started one."""
        return self.path / "logs"

    def locked(self) -> FileLock:
        """A context manager within which no other study writes here; LockedError, with its name, where one does."""
        return FileLock(
            self.path / ".lock", f"run folder {self.path}", advice="; wait for it, or give another --run-dir"
        )

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
        try:
            handle, temporary = tempfile.mkstemp(dir=self.path, prefix=f".{name}-")
            os.close(handle)
            try:
                write(Path(temporary))
                os.chmod(temporary, 0o644)
                os.replace(temporary, self.path / name)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise RunFolderError(
                f"{self.path / name}: cannot be written ({error.strerror or error}); the study is kept in its storage, "
                "and once it can be written the same command goes on from there"
            ) from error


def default_run_dir(model: str) -> Path:
    """``runs/<time>-<model>`` below the current folder."""
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{Path(model).name}"
