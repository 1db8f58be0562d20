"""GPU latencies that somebody else measured: the parquet tables inside ``aiconfigurator-core``.

The package (extra ``silicon``) holds ``systems/data/<system>/<kind>/<framework>/<version>/*.parquet``, latency in
ms. Only its files are read: its Python API is not stable. Where a table lacks a GEMM shape, the latency is
moved from the neighbouring shapes and marked so.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd

from ..errors import TileBudgetError
from .sweep import FloatArray, IntArray, Sweep

FRAMEWORKS = ("vllm", "sglang", "trtllm")

DTYPES = {"bf16": "bfloat16", "fp8": "fp8"}
"""Our names of the GEMM dtypes, and the tables'."""

TRANSFER_RULE = "log-log interpolation between the nearest measured shapes"
TRANSFER_SPREAD = 0.05
"""Relative error of TRANSFER_RULE: the median over held-out shapes of five tables, m = 128 to 4353 (p90: 0.17)."""


class SiliconError(TileBudgetError):
    """The silicon tables are not installed, or lack what was asked for."""


@dataclass(frozen=True, kw_only=True)
class SystemSpec:
    """A GPU system's data sheet. ``flops`` is peak dense FLOP/s by our dtype name; links are of one GPU, one direction,
    within its node and to another."""

    system: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    link_bytes_per_s: float
    inter_node_bytes_per_s: float
    link_latency_s: float
    flops: dict[str, float]
    num_gpus_per_node: int


@dataclass(frozen=True, kw_only=True)
class SystemInfo:
    """One system, and what is measured on it: framework -> version -> dtypes of its GEMM table."""

    system: str
    frameworks: dict[str, dict[str, tuple[str, ...]]]

    @property
    def measured(self) -> bool:
        """Whether there is any GEMM table; without one only the data sheet is known."""
        return bool(self.frameworks)


def systems_dir() -> Path:
    """Where the tables lie. SiliconError that names the extra when the package is not installed."""
    spec = importlib.util.find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations:
        raise SiliconError(
            "the measured GPU tables are not installed: they come with the extra 'silicon' "
            "(pip install 'tilebudget[silicon]')"
        )
    path = Path(next(iter(spec.submodule_search_locations))) / "systems"
    if not path.is_dir():
        raise SiliconError("aiconfigurator-core has no systems folder: version 0.12 is needed")
    return path


def list_systems() -> list[SystemInfo]:
    """Every system of the package, by name, with the frameworks and versions that were measured on it."""
    root = systems_dir()
    return [
        SystemInfo(
            system=path.stem,
            frameworks={
                framework: {
                    version: _gemm_dtypes(_table_path(path.stem, "gemm", framework, version, "gemm_perf"))
                    for version in versions
                }
                for framework in FRAMEWORKS
                if (versions := _versions(path.stem, "gemm", framework, "gemm_perf"))
            },
        )
        for path in sorted(root.glob("*.yaml"))
        if _is_spec(path)
    ]


def system_spec(system: str) -> SystemSpec:
    """The data sheet of a system; SiliconError lists the systems when there is no such one."""
    import yaml  # comes with the extra

    path = systems_dir() / f"{system}.yaml"
    if not path.is_file():
        raise SiliconError(f"there is no system {system!r}: the tables know {', '.join(_system_names())}")
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    gpu, node = document["gpu"], document["node"]
    keys = {"bf16": "bfloat16_tc_flops", "fp8": "fp8_tc_flops"}
    return SystemSpec(
        system=system,
        memory_bytes=int(gpu["mem_capacity"]),
        bandwidth_bytes_per_s=float(gpu["mem_bw"]),
        link_bytes_per_s=float(node["intra_node_bw"]),
        inter_node_bytes_per_s=float(node["inter_node_bw"]),
        link_latency_s=float(node["p2p_latency"]),
        flops={dtype: float(gpu[key]) for dtype, key in keys.items() if gpu.get(key)},
        num_gpus_per_node=int(node["num_gpus_per_node"]),
    )


@dataclass(frozen=True, kw_only=True)
class Silicon:
    """The tables of one system under one framework (at its newest measured version, unless one is named)."""

    system: str
    framework: str
    version: str

    @classmethod
    def open(cls, system: str, framework: str, version: str | None = None) -> Silicon:
        """The tables of a system; SiliconError says what there is when the system, framework or version is unknown."""
        names = _system_names()
        if system not in names:
            raise SiliconError(f"there is no system {system!r}: the tables know {', '.join(names)}")
        if framework not in FRAMEWORKS:
            raise ValueError(f"framework is {framework!r}: it must be one of {', '.join(FRAMEWORKS)}")
        versions = _versions(system, "gemm", framework, "gemm_perf")
        if not versions:
            having = [f for f in FRAMEWORKS if _versions(system, "gemm", f, "gemm_perf")]
            raise SiliconError(
                f"{system} has no measured {framework} tables "
                f"(measured: {', '.join(having) or 'none, there is only a data sheet'})"
            )
        if version is not None and version not in versions:
            raise SiliconError(f"{system} {framework} has no version {version!r}: measured are {', '.join(versions)}")
        return cls(system=system, framework=framework, version=version or versions[-1])

    def gemm_dtypes(self) -> tuple[str, ...]:
        """Our names of the dtypes that the GEMM table has."""
        return _gemm_dtypes(_table_path(self.system, "gemm", self.framework, self.version, "gemm_perf"))

    def gemm(self, n: int, k: int, dtype: str, op: str = "gemm", tensor_parallel: int = 1) -> Sweep:
        """Latency in ms of an m x k by k x n GEMM at every m the table has.

        A shape that the table lacks is moved from its neighbours by TRANSFER_RULE (beyond the largest measured
        n or k in proportion) and the sweep's source says "transferred". SiliconError when the dtype is not measured.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}: it must be one of {', '.join(DTYPES)}")
        if dtype not in self.gemm_dtypes():
            raise SiliconError(
                f"{self.system} {self.framework} {self.version} has no {dtype} GEMM table "
                f"(it has {', '.join(self.gemm_dtypes())})"
            )
        if n < 1 or k < 1:
            raise ValueError(f"n is {n} and k is {k}: both must be 1 or more")
        path = _table_path(self.system, "gemm", self.framework, self.version, "gemm_perf")
        table = _gemm_table(path, dtype)
        tokens, latency_ms, note = table.at(n, k)
        return Sweep(
            op=op,
            tensor_parallel=tensor_parallel,
            tokens=tokens,
            latency_ms=latency_ms,
            std_ms=latency_ms * TRANSFER_SPREAD if note else None,
            source="transferred" if note else "table",
            note=note,
        )

    def frame(self, kind: str, name: str) -> pd.DataFrame:
        """A table of another kind (attention, comm), at this version or else the newest that has it.

        SiliconError when this system and framework have none.
        """
        versions = _versions(self.system, kind, self.framework, name)
        if not versions:
            raise SiliconError(f"{self.system} has no {name} table for {self.framework}")
        version = self.version if self.version in versions else versions[-1]
        return pd.read_parquet(_table_path(self.system, kind, self.framework, version, name))


@dataclass(frozen=True)
class _GemmTable:
    """The measured shapes of one GEMM table; rows[(n, k)] is (m ascending, latency in ms)."""

    rows: dict[tuple[int, int], tuple[IntArray, FloatArray]]

    def at(self, n: int, k: int) -> tuple[IntArray, FloatArray, str]:
        if (n, k) in self.rows:
            return *self.rows[n, k], ""
        sizes_n = sorted({shape[0] for shape in self.rows})
        sizes_k = sorted({shape[1] for shape in self.rows})
        corners = [
            ((a, b), weight_n * weight_k, scale_n * scale_k)
            for a, weight_n, scale_n in _neighbours(n, sizes_n)
            for b, weight_k, scale_k in _neighbours(k, sizes_k)
            if (a, b) in self.rows
        ]
        if not corners:
            raise SiliconError(f"the GEMM table has no neighbour of the shape n={n}, k={k}")
        total = sum(weight for _, weight, _ in corners)
        tokens = self.rows[corners[0][0]][0]
        for shape, _, _ in corners[1:]:
            tokens = np.intersect1d(tokens, self.rows[shape][0])
        log_ms = np.zeros(tokens.size)
        for shape, weight, scale in corners:
            measured_at, latency_ms = self.rows[shape]
            log_ms += weight / total * np.log(latency_ms[np.searchsorted(measured_at, tokens)] * scale)
        parts = " and ".join(f"{a}x{b}" for (a, b), _, _ in corners)
        return tokens, np.exp(log_ms), f"{n}x{k} is not in the table: {TRANSFER_RULE} {parts} (n x k)"


def _neighbours(size: int, measured: Sequence[int]) -> Iterator[tuple[int, float, float]]:
    """(measured size, weight, scale) to interpolate in log size; beyond the largest one, in proportion to it."""
    if size in measured:
        yield size, 1.0, 1.0
    elif size > measured[-1]:
        yield measured[-1], 1.0, size / measured[-1]
    elif size < measured[0]:
        yield measured[0], 1.0, 1.0
    else:
        above = next(i for i, value in enumerate(measured) if value > size)
        low, high = measured[above - 1], measured[above]
        weight = float(np.log(size / low) / np.log(high / low))
        yield low, 1 - weight, 1.0
        yield high, weight, 1.0


@lru_cache(maxsize=8)
def _gemm_table(path: Path, dtype: str) -> _GemmTable:
    frame = pd.read_parquet(path, columns=["m", "n", "k", "latency"], filters=[("gemm_dtype", "==", DTYPES[dtype])])
    frame = frame[frame["latency"] > 0].sort_values(["n", "k", "m", "latency"], kind="stable")
    # Where several kernels were timed for one shape, the framework is taken to use the fastest.
    frame = frame.drop_duplicates(["n", "k", "m"])
    n, k, m = (frame[column].to_numpy(dtype=np.int64) for column in ("n", "k", "m"))
    latency_ms = frame["latency"].to_numpy(dtype=np.float64)
    bounds = np.flatnonzero(np.diff(n) | np.diff(k)) + 1
    starts, ends = [0, *bounds.tolist()], [*bounds.tolist(), n.size]
    return _GemmTable(
        {(int(n[a]), int(k[a])): (m[a:b], latency_ms[a:b]) for a, b in zip(starts, ends, strict=True) if b > a}
    )


@lru_cache(maxsize=256)
def _gemm_dtypes(path: Path) -> tuple[str, ...]:
    present = set(pd.read_parquet(path, columns=["gemm_dtype"])["gemm_dtype"].unique())
    return tuple(ours for ours, theirs in DTYPES.items() if theirs in present)


def _table_path(system: str, kind: str, framework: str, version: str, name: str) -> Path:
    return systems_dir() / "data" / system / kind / framework / version / f"{name}.parquet"


def _versions(system: str, kind: str, framework: str, name: str) -> list[str]:
    folder = systems_dir() / "data" / system / kind / framework
    found = [path.parent.name for path in folder.glob(f"*/{name}.parquet")]
    return sorted(found, key=lambda version: [int(part) for part in re.findall(r"\d+", version)])


def _is_spec(path: Path) -> bool:
    return "\ngpu:" in path.read_text(encoding="utf-8")


def _system_names() -> list[str]:
    return [path.stem for path in sorted(systems_dir().glob("*.yaml")) if _is_spec(path)]
