"""Compiles kernel variants for GPUs that are not here, in worker processes, and remembers what came out.

Workers are processes of their own for three reasons: TRITON_INTERPRET decides at import time what a kernel is, and the
caller may need the interpreter; a compiler that dies takes only its worker along; and two cores compile twice as fast.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import ops
from ..errors import TileBudgetError
from ..gpus import KIB, REPRESENTATIVE
from .variants import Variant

#: Part of every cache key: raise it when `CompiledKernel` or the way it is read changes.
FORMAT = 1

_MMA = ("wgmma.mma_async", "tcgen05.mma", "mma.sync", "v_mfma")
_MMA_NAMES = {"wgmma.mma_async": "wgmma", "tcgen05.mma": "tcgen05", "mma.sync": "mma.sync", "v_mfma": "mfma"}


class KernelCompileError(TileBudgetError):
    """The compile workers could not do their work at all (a failing kernel is a result, not this)."""


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """What the compiler made of one variant for one architecture; only ``error`` is set where it failed.

    ``registers`` are per thread. ``spill_bytes`` are the stack and local memory of a thread, for which Triton has no
    other use. ``dynamic_shared_bytes`` are asked for at launch. ``mma`` names the matrix instructions: wgmma, mma.sync,
    tcgen05, mfma, or nothing. ``tensor_columns`` is Blackwell's tensor memory.
    """

    registers: int = 0
    spill_bytes: int = 0
    static_shared_bytes: int = 0
    dynamic_shared_bytes: int = 0
    tensor_columns: int = 0
    mma: str = ""
    error: str | None = None


def cache_dir() -> Path:
    """Where compiled facts are kept: TILEBUDGET_CACHE_DIR, else XDG_CACHE_HOME/tilebudget, else ~/.cache/tilebudget."""
    override = os.environ.get("TILEBUDGET_CACHE_DIR")
    if override:
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tilebudget"


def cache_key(variant: Variant, arch: str) -> str:
    """Hash of everything the result depends on: kernel source, variant, architecture, Triton's version."""
    module = variant.function.partition(":")[0]
    source = (Path(ops.__file__).parent / f"{module}.py").read_text(encoding="utf-8")
    facts = [FORMAT, importlib.metadata.version("triton"), arch, _job(variant), source]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def compile_variants(
    jobs: Sequence[tuple[Variant, str]],
    *,
    workers: int | None = None,
    use_cache: bool = True,
    on_done: Callable[[int, int], None] | None = None,
) -> list[CompiledKernel]:
    """What the compiler makes of each (variant, architecture), in the order of the jobs. Needs no GPU.

    workers defaults to the number of usable cores; on_done(finished, total) is called after every job. Raises
    ValueError for an unknown architecture and KernelCompileError if a worker cannot start.
    """
    for _, arch in jobs:
        if arch not in REPRESENTATIVE:
            raise ValueError(f"arch={arch!r}: must be one of {', '.join(REPRESENTATIVE)}")
    results: dict[int, CompiledKernel] = {}
    missing: list[int] = []
    for index, (variant, arch) in enumerate(jobs):
        cached = _read_cached(cache_key(variant, arch)) if use_cache else None
        if cached is None:
            missing.append(index)
        else:
            results[index] = cached
    # Attention takes longest to compile: started last it would leave one core waiting for the other.
    missing.sort(key=lambda index: jobs[index][0].kernel != "attention")
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in missing:
        todo.put(index)
    failures: list[KernelCompileError] = []
    report = threading.Lock()

    def work() -> None:
        with _Worker() as worker:
            while not failures:
                try:
                    index = todo.get_nowait()
                except queue.Empty:
                    return
                variant, arch = jobs[index]
                try:
                    result = worker.compile(variant, arch)
                except KernelCompileError as error:
                    failures.append(error)
                    return
                with report:
                    results[index] = result
                    if use_cache:
                        _write_cached(cache_key(variant, arch), result)
                    if on_done is not None:
                        on_done(len(results), len(jobs))

    threads = [threading.Thread(target=work) for _ in range(min(workers or _usable_cores(), len(missing)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[index] for index in range(len(jobs))]


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_cached(key: str) -> CompiledKernel | None:
    path = cache_dir() / "kernels" / f"{key}.json"
    try:
        return CompiledKernel(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        # Absent, or cut short by a full disk: compiled again and written over.
        return None


def _write_cached(key: str, result: CompiledKernel) -> None:
    folder = cache_dir() / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False, encoding="utf-8") as handle:
        json.dump(asdict(result), handle)
    os.replace(handle.name, folder / f"{key}.json")


def _job(variant: Variant) -> dict[str, object]:
    return {
        "function": variant.function,
        "arguments": dict(variant.arguments),
        "constants": dict(variant.constants),
        "divisible": list(variant.divisible),
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
    }


class _Worker:
    """One compiling process, started when needed and again after it died."""

    def __enter__(self) -> _Worker:
        self._process: subprocess.Popen[str] | None = None
        self._scratch = tempfile.TemporaryDirectory(prefix="tilebudget-compile-")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop()
        self._scratch.cleanup()

    def compile(self, variant: Variant, arch: str) -> CompiledKernel:
        process = self._process or self._start()
        if process.stdin is None or process.stdout is None:
            raise KernelCompileError("the compile worker has no pipes")
        with contextlib.suppress(BrokenPipeError):  # the empty answer below tells the same
            process.stdin.write(json.dumps({"arch": arch, **_job(variant)}) + "\n")
            process.stdin.flush()
        answer = process.stdout.readline()
        if answer:
            return CompiledKernel(**json.loads(answer))
        code = process.wait()
        log = Path(self._scratch.name, "log").read_text(encoding="utf-8", errors="replace").strip()
        self._stop()
        last_line = log.splitlines()[-1] if log else "no output"
        return CompiledKernel(error=f"the compiler ended with exit code {code}: {last_line}")

    def _start(self) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        # Triton's own cache keeps every intermediate; ours keeps the few numbers, so its files go with the worker.
        environment["TRITON_CACHE_DIR"] = str(Path(self._scratch.name, "triton"))
        with Path(self._scratch.name, "log").open("w", encoding="utf-8") as log_file:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"{__package__}.compiler"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
                env=environment,
            )
        if self._process.stdout is None or self._process.stdout.readline().strip() != "ready":
            code = self._process.wait()
            self._stop()
            log = Path(self._scratch.name, "log").read_text(encoding="utf-8", errors="replace").strip()
            raise KernelCompileError(f"the compile worker did not start (exit code {code}): {log[-2000:]}")
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
            self._process.wait()
            self._process = None


def _compile_here(job: dict[str, object]) -> CompiledKernel:
    """Compiles in this process, which must have been started without TRITON_INTERPRET."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, name = str(job["function"]).partition(":")
    function = getattr(importlib.import_module(f".{module}", ops.__name__), name)
    arguments, given, divisible = job["arguments"], job["constants"], job["divisible"]
    if not isinstance(arguments, dict) or not isinstance(given, dict) or not isinstance(divisible, list):
        raise TypeError("job: arguments and constants must be objects, divisible a list")
    names = list(function.arg_names)
    if sorted(names) != sorted([*arguments, *given]):
        raise ValueError(f"{job['function']}: takes {sorted(names)}, given {sorted([*arguments, *given])}")
    constants = {**given, **{name: None for name, kind in arguments.items() if kind is None}}
    signature = {name: "constexpr" if name in constants else arguments[name] for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    arch = str(job["arch"])
    target = GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch[3:]), 32)
    compiled = triton.compile(
        ASTSource(function, signature, constants, attributes),
        target=target,
        options={"num_warps": job["num_warps"], "num_stages": job["num_stages"]},
    )
    if target.backend == "hip":
        return _read_amd(compiled.asm["amdgcn"], compiled.metadata.shared)
    tensor_columns = getattr(compiled.metadata, "tmem_size", 0) or 0
    usage = _resource_usage(compiled.asm["cubin"])
    # From sm_90 on, the usage counts the 1 KiB that CUDA reserves for each CTA; the limits count it already.
    reserved = KIB if target.arch >= 90 else 0
    return CompiledKernel(
        registers=usage["REG"],
        spill_bytes=usage["STACK"] + usage["LOCAL"],
        static_shared_bytes=max(usage["SHARED"] - reserved, 0),
        dynamic_shared_bytes=compiled.metadata.shared,
        tensor_columns=tensor_columns,
        mma=_mma_names(compiled.asm["ptx"]),
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, SHARED and LOCAL of a cubin, as the cuobjdump that ships with Triton prints them."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as handle:
        handle.write(cubin)
        handle.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", handle.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    if len(found) != 4:
        raise KernelCompileError(f"cuobjdump printed no resource usage: {text[-500:]!r}")
    return found


def _read_amd(assembly: str, dynamic_shared_bytes: int) -> CompiledKernel:
    """Resources from the metadata that LLVM appends to AMD assembly."""

    def value(name: str) -> int:
        match = re.search(rf"\.{name}:\s+(\d+)", assembly)
        if match is None:
            raise KernelCompileError(f"the AMD assembly has no .{name}")
        return int(match.group(1))

    return CompiledKernel(
        # gfx942 has one file for vector and accumulation registers; vgpr_count is their sum.
        registers=value("vgpr_count"),
        spill_bytes=value("private_segment_fixed_size"),
        static_shared_bytes=value("group_segment_fixed_size"),
        dynamic_shared_bytes=dynamic_shared_bytes,
        mma=_mma_names(assembly),
    )


def _mma_names(assembly: str) -> str:
    return "+".join(_MMA_NAMES[kind] for kind in _MMA if re.search(rf"\b{re.escape(kind)}", assembly))


def _serve() -> None:
    """The worker: one JSON job a line on stdin, one `CompiledKernel` a line on stdout."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Triton prints the kernels that ptxas rejects; that must not land between the answers.
    os.dup2(2, 1)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        try:
            result = _compile_here(json.loads(line))
        except Exception as error:  # whatever the compiler raises is the variant's result
            result = CompiledKernel(error=f"{type(error).__name__}: {error}"[:500])
        print(json.dumps(asdict(result)), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
