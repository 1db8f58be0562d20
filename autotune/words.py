"""The words that people type for a device and a dtype, in the words that are used here."""

from __future__ import annotations

import re

from ..kernels.errors import did_you_mean
from ..kernels.latency.silicon import SiliconError, list_systems, system_spec

#: Devices whose time is measured here; every other name is a system of the silicon tables, whose time is modelled.
HOST_DEVICES = ("auto", "cpu", "cuda")
#: A device of this name ending is the file of a profile.
PROFILE_SUFFIX = ".json"

DTYPES = ("auto", "fp32", "bf16", "fp16", "fp8")
_DTYPE_WORDS = {
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "fp8_e4m3": "fp8",
}

#: What a GPU's full name adds to that of its system: maker, form factor's generation, kind of memory.
_SURPLUS = re.compile(r"nvidia|tesla|geforce|hbm\d\w?")


def dtype_word(word: str) -> str:
    """Our name of a dtype, in any letter case or as torch and vLLM have it; another word as it is.

    >>> dtype_word("BFloat16"), dtype_word("half"), dtype_word("int4")
    ('bf16', 'fp16', 'int4')
    """
    plain = word.strip().lower().removeprefix("torch.")
    found = _DTYPE_WORDS.get(plain, plain)
    return found if found in DTYPES else word


def device_word(word: str) -> str:
    """Our name of a device: any letter case; hyphens and spaces for underscores; a GPU without its form factor, where
    one system of that GPU is measured (``H100`` is h100_sxm), or with its memory (``A100-80GB``). A profile's file and
    an unknown word stay as they are.

    Raises ValueError for ``cuda:1``, and for a word that several systems fit.
    """
    if word.endswith(PROFILE_SUFFIX):
        return word
    plain = re.sub(r"[-_\s]+", "_", word.strip().lower()).strip("_")
    index = re.fullmatch(r"(?:cuda|gpu):(\d+)", plain)
    if index is not None:
        if int(index[1]) == 0:
            return "cuda"
        raise ValueError(
            f"device={word!r}: must be cuda, which is the first GPU that is visible; CUDA_VISIBLE_DEVICES={index[1]} "
            "makes that one it"
        )
    if plain in HOST_DEVICES:
        return plain
    fitting = fitting_systems(plain)
    if len(fitting) > 1:
        raise ValueError(f"device={word!r}: must be one of {', '.join(fitting)}")
    return fitting[0] if fitting else word


def check_system(device: str) -> None:
    """Raise ValueError unless the silicon tables have the system ``device``: with the nearest name, or with how to get
    the tables."""
    try:
        names = (*HOST_DEVICES, *(system.system for system in list_systems()))
    except SiliconError as error:
        rule = f"{', '.join(HOST_DEVICES)}, or a modelled one, but {error}{did_you_mean(device, HOST_DEVICES)}"
        raise ValueError(f"device={device!r}: must be one of {rule}") from None
    if device not in names:
        raise ValueError(f"device={device!r}: must be one of {', '.join(names)}{did_you_mean(device, names)}")


def fitting_systems(plain: str) -> list[str]:
    """The systems that a word in lower case with underscores fits: the one of that name; else those whose name begins
    with it, of these the measured ones where there are any."""
    try:
        systems = {system.system: system.measured for system in list_systems()}
    except SiliconError:
        return []
    if plain in systems:
        return [plain]
    parts = [re.sub(r"^(sxm|pcie)\d$", r"\1", part) for part in plain.split("_") if not _SURPLUS.fullmatch(part)]
    memory = [int(size[1]) for part in parts if (size := re.fullmatch(r"(\d+)(?:gb|g)", part))]
    name = "_".join(part for part in parts if not re.fullmatch(r"\d+(?:gb|g)", part))
    if not name:
        return []
    fitting = [
        system
        for system in systems
        if f"{system}_".startswith(f"{name}_")
        and all(round(system_spec(system).memory_bytes / 2**30) == size for size in memory)
    ]
    return [system for system in fitting if systems[system]] or fitting
