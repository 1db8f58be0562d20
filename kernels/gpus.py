"""Hardware limits of the devices that kernels are inspected for, and the occupancy that follows from them.

Sources:
- NVIDIA: CUDA C++ Programming Guide, appendix "Compute Capabilities", tables "Technical Specifications per
  Compute Capability"; SM counts from the A100, H100, H200, L40S and Blackwell data sheets and architecture
  white papers; the 1 KiB of shared memory that CUDA reserves for each CTA from the tuning guides for
  capability 8.0 and later.
- AMD: "AMD Instinct MI300" (CDNA3) instruction set architecture guide and the ROCm hardware specification
  table (LDS, VGPRs, waves); workgroups per CU from LLVM's AMDGPU backend (16 barriers per CU on gfx9).

Pure arithmetic: importing this module imports neither torch nor triton.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import did_you_mean

KIB = 1024


_MAY_BE_ZERO = ("reserved_shared_per_cta_bytes", "tensor_columns")


@dataclass(frozen=True, kw_only=True)
class DeviceLimits:
    """What one GPU can hold. On AMD read SM as CU, CTA as workgroup, warp as wavefront, shared memory as LDS.

    ``registers_per_sm`` counts 32-bit registers of single lanes. Every SM has four partitions, each with its
    own quarter of the registers and warps. ``mma_per_sm_clock`` is the peak rate of dense 16-bit matrix
    multiply-adds (peak FLOP/s of the data sheet / 2 / SMs / boost clock). ``tensor_columns`` is the tensor
    memory of an SM (PTX ISA, "Tensor Memory"): 512 columns on Blackwell, none before.
    """

    name: str
    arch: str
    num_sms: int
    warp_size: int
    shared_per_sm_bytes: int
    max_shared_per_cta_bytes: int
    reserved_shared_per_cta_bytes: int
    registers_per_sm: int
    max_registers_per_thread: int
    register_unit_per_warp: int
    max_warps_per_sm: int
    max_ctas_per_sm: int
    mma_per_sm_clock: int
    tensor_columns: int = 0

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if isinstance(value, int) and value < (0 if field in _MAY_BE_ZERO else 1):
                raise ValueError(f"{field}={value}: must be positive")

    @property
    def vendor(self) -> str:
        """``cuda`` or ``hip``, as triton names its backends."""
        return "hip" if self.arch.startswith("gfx") else "cuda"


PARTITIONS_PER_SM = 4


def _nvidia(
    name: str, arch: str, num_sms: int, shared_per_sm_kib: int, max_warps: int, max_ctas: int, mma: int
) -> DeviceLimits:
    return DeviceLimits(
        name=name,
        arch=arch,
        num_sms=num_sms,
        warp_size=32,
        shared_per_sm_bytes=shared_per_sm_kib * KIB,
        max_shared_per_cta_bytes=(shared_per_sm_kib - 1) * KIB,
        reserved_shared_per_cta_bytes=KIB,
        registers_per_sm=64 * KIB,
        max_registers_per_thread=255,
        register_unit_per_warp=256,
        max_warps_per_sm=max_warps,
        max_ctas_per_sm=max_ctas,
        mma_per_sm_clock=mma,
        tensor_columns=512 if arch == "sm_100" else 0,
    )


_ALL = (
    _nvidia("a100_sxm", "sm_80", 108, 164, 64, 32, 1024),
    _nvidia("l40s", "sm_89", 142, 100, 48, 24, 256),
    _nvidia("h100_sxm", "sm_90", 132, 228, 64, 32, 2048),
    _nvidia("h100_pcie", "sm_90", 114, 228, 64, 32, 2048),
    _nvidia("h200_sxm", "sm_90", 132, 228, 64, 32, 2048),
    _nvidia("b200_sxm", "sm_100", 148, 228, 64, 32, 4096),
    DeviceLimits(
        name="mi300x",
        arch="gfx942",
        num_sms=304,
        warp_size=64,
        shared_per_sm_bytes=64 * KIB,
        max_shared_per_cta_bytes=64 * KIB,
        reserved_shared_per_cta_bytes=0,
        registers_per_sm=128 * KIB,
        max_registers_per_thread=512,
        register_unit_per_warp=8 * 64,
        max_warps_per_sm=32,
        max_ctas_per_sm=16,
        mma_per_sm_clock=1024,
    ),
)

#: Limits by device name (the names of the silicon tables where a table exists).
DEVICES: dict[str, DeviceLimits] = {limits.name: limits for limits in _ALL}

#: The device that stands for an architecture when only that is known.
REPRESENTATIVE: dict[str, str] = {
    "sm_80": "a100_sxm",
    "sm_89": "l40s",
    "sm_90": "h200_sxm",
    "sm_100": "b200_sxm",
    "gfx942": "mi300x",
}


def device_limits(name: str) -> DeviceLimits:
    """Limits of a device (``h200_sxm``), or of the device that stands for an architecture (``sm_90``).

    Raises ValueError if the name is neither.
    """
    found = DEVICES.get(REPRESENTATIVE.get(name, name))
    if found is None:
        known = [*DEVICES, *REPRESENTATIVE]
        raise ValueError(f"device={name!r}: must be one of {', '.join(known)}{did_you_mean(name, known)}")
    return found


def resident_ctas(
    limits: DeviceLimits, *, registers_per_thread: int, shared_bytes: int, num_warps: int, tensor_columns: int = 0
) -> int:
    """CTAs that one SM holds at a time; 0 where not even one fits.

    The minimum over warps, CTA slots, registers (allocated per warp in whole units, in each of the four
    partitions) and shared memory. Source: the rules of NVIDIA's CUDA occupancy calculator; AMD's follow the
    same form.
    """
    if num_warps < 1 or registers_per_thread < 0 or shared_bytes < 0:
        raise ValueError(
            f"num_warps={num_warps}, registers_per_thread={registers_per_thread}, "
            f"shared_bytes={shared_bytes}: num_warps must be at least 1, the others at least 0"
        )
    if shared_bytes > limits.max_shared_per_cta_bytes or registers_per_thread > limits.max_registers_per_thread:
        return 0
    ctas = min(limits.max_ctas_per_sm, limits.max_warps_per_sm // num_warps)
    if registers_per_thread:
        unit = limits.register_unit_per_warp
        per_warp = -(-registers_per_thread * limits.warp_size // unit) * unit
        warps = limits.registers_per_sm // PARTITIONS_PER_SM // per_warp * PARTITIONS_PER_SM
        ctas = min(ctas, warps // num_warps)
    shared = shared_bytes + limits.reserved_shared_per_cta_bytes
    if tensor_columns:
        ctas = min(ctas, limits.tensor_columns // tensor_columns)
    if shared:
        ctas = min(ctas, limits.shared_per_sm_bytes // shared)
    return ctas


def occupancy(limits: DeviceLimits, num_ctas: int, num_warps: int) -> float:
    """Share of the SM's warp slots that num_ctas resident CTAs of num_warps take, in [0, 1]."""
    return num_ctas * num_warps / limits.max_warps_per_sm
