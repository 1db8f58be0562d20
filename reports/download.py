"""The raw data inside the page: one ZIP archive behind a link, so that the report alone is enough to check it."""

from __future__ import annotations

import base64
import io
import zipfile
from dataclasses import dataclass

import numpy as np
import pandas as pd

from .data.run_folder import RunFolder
from .text import listing

#: The archive grows by whole files up to this size; what does not fit is named and stays in the run folder.
MAX_BYTES = 450_000
_DOCUMENTS = (
    "recommendation.json",
    "environment.json",
    "profile.json",
    "importance.json",
    "cost_curves.json",
    "tiles.json",
    "latency.json",
    "iterations.parquet",
    "requests.parquet",
)
#: A fixed stamp: the same folder gives the same page.
_STAMP = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class Download:
    """A link to the archive: its ``data:`` address, file name, size, and the files inside and left out in words."""

    href: str
    name: str
    kilobytes: str
    holds: str
    left_out: str


def download_link(folder: RunFolder) -> Download:
    """The archive of ``folder``: trials and their TBT quantiles as CSV, then its JSON and parquet files as they are."""
    quantiles = folder.trials["tbt_quantiles_ms"]
    known = {
        run: pd.Series(levels)
        for run, levels in zip(folder.trials["run"], quantiles, strict=True)
        if isinstance(levels, list | np.ndarray)
    }
    contents = {
        "trials.csv": folder.trials.drop(columns="tbt_quantiles_ms").to_csv(index=False).encode(),
        "tbt_quantiles_ms.csv": pd.DataFrame(known).T.to_csv(index_label="run").encode(),
    }
    files = [folder.path / name for name in _DOCUMENTS if (folder.path / name).is_file()]
    held, absent, size = [], [], 0
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in contents.items():
            archive.writestr(_entry(name), content)
            held.append(name)
        for file in files:
            # Parquet is packed already, text shrinks several times; the archive tells what it came to.
            expected = file.stat().st_size // (1 if file.suffix == ".parquet" else 4)
            size = buffer.tell()
            if size + expected > MAX_BYTES:
                absent.append(file.name)
                continue
            archive.writestr(_entry(file.name), file.read_bytes())
            held.append(file.name)
    data = buffer.getvalue()
    return Download(
        href=f"data:application/zip;base64,{base64.b64encode(data).decode('ascii')}",
        name=f"tilebudget-{folder.path.resolve().name}.zip",
        kilobytes=f"{len(data) / 1000:,.0f} kB",
        holds=listing(held, limit=12),
        left_out=listing(absent, limit=12),
    )


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, date_time=_STAMP)
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry
