"""Where a figure comes from: versions, device, commit."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("tilebudget", "torch", "triton", "optuna", "numpy", "pandas", "plotly", "pyarrow", "safetensors")


_PASSWORD = re.compile(r"(://[^:/@\s]*:)[^@\s]+(?=@)")


def mask_passwords(text: str) -> str:
    """``text`` without the passwords of the URLs in it."""
    return _PASSWORD.sub(r"\1***", text)


def command_line() -> str:
    """The command that runs, without passwords."""
    return mask_passwords(" ".join(["tilebudget", *sys.argv[1:]]))


def package_versions() -> dict[str, str]:
    """Versions of the packages that a result depends on, and of Python; absent ones are left out."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def source_commit() -> str | None:
    """The commit that the package runs from, with ``+`` when the tree is dirty; None outside a checkout."""
    here = Path(__file__).resolve().parent.parent
    if not (here / ".git").exists():
        return None
    try:
        commit = _git(here, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    result = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return result.stdout.strip()
