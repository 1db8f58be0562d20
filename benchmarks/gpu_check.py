"""One validation of everything that needs a GPU, in under eight minutes: `make gpu-check`.

Sections, each in a process of its own with a time limit, so that none takes another down:

- kernels: every Triton kernel against its reference on the device, and every GEMM configuration;
- engine: the same requests through torch's operations, through ours, and through captured CUDA graphs;
- speed: our GEMM beside cuBLAS at 1 to 8192 tokens (layers of Llama-3.1-8B), our attention beside SDPA;
- staircase: both GEMMs at stride 1 around 128, 256, 512, 1024 and 2048 tokens, and the edges found in them;
- configs: which tile configuration wins where;
- profile: a latency table of the device, and its error on whole engine runs;
- tune: a short tuning of Llama-3.1-8B with random weights.

Writes benchmarks/results/<gpu>/<section>.json and summary.json. Exit code 1 when a kernel is out of tolerance, the
engine's tokens differ, or one of these two sections could not finish. Without a GPU it says so, compiles the kernels
for the GPUs of the compile matrix, and exits 0, or 1 if a default configuration is not usable.

    make gpu-check                              # in .venv, as every target
    python -P benchmarks/gpu_check.py           # with the packages of any Python that has them; tilebudget itself need
                                                # not be installed
    python -P benchmarks/gpu_check.py --sections kernels speed --out /tmp/check
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parent.parent

#: Seconds that each section may take; a section stops by itself a little earlier and keeps what it has.
LIMITS_S: dict[str, float] = {
    "kernels": 75,
    "engine": 40,
    "speed": 50,
    "staircase": 35,
    "configs": 50,
    "profile": 65,
    "tune": 100,
}
#: Sections whose failure is the check's.
REQUIRED = ("kernels", "engine")


def make_importable() -> None:
    """Let this process and its children import tilebudget from the checkout where it is not installed."""
    if importlib.util.find_spec("tilebudget") is None:
        # The four packages stand at the root; .typing/tilebudget holds links to them under their installed name.
        namespace = str(ROOT / ".typing")
        sys.path.insert(0, namespace)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [namespace, os.environ.get("PYTHONPATH")]))


def run_section(name: str, out: Path, limit_s: float, seed: int) -> dict[str, object]:
    """Run one section; its status, what it said, and how long it took. Its result is in ``out``."""
    file = out / f"{name}.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / "gpu_sections.py"), name, "--out", str(file)]
    command += ["--limit-s", str(limit_s), "--seed", str(seed)]
    began_s = perf_counter()
    try:
        process = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=limit_s + 30, check=False)
        error = "" if process.returncode == 0 else process.stderr.strip()[-2000:] or f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        error = f"stopped after {limit_s + 30:.0f} s"
    state: dict[str, object] = {"elapsed_s": round(perf_counter() - began_s, 1)}
    if file.exists():
        state |= json.loads(file.read_text(encoding="utf-8"))["summary"]
    return state | ({"error": error} if error else {})


def environment(seed: int) -> dict[str, object]:
    """Versions, commit and device of this check."""
    import torch
    from tilebudget.autotune.environment import package_versions, source_commit

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "num_sms": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda or torch.version.hip,
        "versions": package_versions(),
        "commit": source_commit(),
        "host": platform.machine(),
        "seed": seed,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def compile_only() -> int:
    """The compile matrix, for a machine without a GPU."""
    from tilebudget.kernels.inspect.report import compile_matrix

    print("no CUDA device is visible to torch: compiling the kernels instead of running them")

    def progress(done: int, total: int) -> None:
        if done % 20 == 0 or done == total:
            print(f"  compiled {done} of {total}", file=sys.stderr)

    reports = compile_matrix(on_done=progress)
    for arch in dict.fromkeys(report.arch for report in reports):
        rows = [report for report in reports if report.arch == arch]
        default = sum(report.default for report in rows)
        print(f"{arch:8} {sum(report.usable for report in rows):3} of {len(rows)} usable, {default} default")
    broken = [report for report in reports if report.default and not report.usable]
    for report in broken:
        print(f"default and not usable: {report.arch} {report.kernel} {report.config}: {'; '.join(report.problems)}")
    return 1 if broken else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the flags, run the sections, write and print the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--sections", nargs="+", choices=list(LIMITS_S), default=list(LIMITS_S))
    parser.add_argument("--out", type=Path, help="folder for the results; default: benchmarks/results/<gpu>")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    make_importable()
    import torch

    if not torch.cuda.is_available():
        return compile_only()
    about = environment(args.seed)
    slug = re.sub(r"[^a-z0-9]+", "-", str(about["device"]).lower()).strip("-")
    out = args.out or ROOT / "benchmarks" / "results" / slug
    out.mkdir(parents=True, exist_ok=True)
    sections: dict[str, Mapping[str, object]] = {}
    for name in args.sections:
        sections[name] = run_section(name, out, LIMITS_S[name], args.seed)
        print(f"{name:10} {json.dumps(sections[name])}", flush=True)
        document = {"environment": about, "sections": sections}
        (out / "summary.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    failed = [name for name in REQUIRED if name in sections and not sections[name].get("passed", False)]
    print(f"results in {out}" + (f"; FAILED: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
