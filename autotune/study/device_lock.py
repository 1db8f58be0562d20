"""One run at a time on a device, whoever starts it: times of two would be times of neither."""

from __future__ import annotations

import logging
import re
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from ...engine.server.engine import ServerEngine, Target
from .file_lock import FileLock

_log = logging.getLogger(__name__)


def device_lock(executor: Target) -> AbstractContextManager[object]:
    """A context manager within which no other process of this machine runs on the executor's device.

    It waits for its turn, and says whose turn it is. A modelled device, whose time nothing disturbs, needs none.
    """
    if executor.virtual_time:
        return nullcontext()
    name = _device_id(executor)
    file = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    path = Path(tempfile.gettempdir()) / f"tilebudget-{file}.lock"
    return FileLock(path, f"device {name}", on_wait=lambda message: _log.warning("%s; waiting for it", message))


def _device_id(executor: Target) -> str:
    """What all processes of this machine call the device: a GPU's serial, whatever its number is for this process."""
    described = executor.describe()
    device = str(described["device"])
    if isinstance(executor, ServerEngine):  # torch is not asked: it would take memory of the GPU that the server wants
        return str(described.get("base_url", f"{device} {described.get('gpu_uuid', '')}".rstrip()))
    if device == "cuda":
        return f"cuda {torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    return device
