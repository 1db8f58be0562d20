"""The shape of the house: import arrows, the package list, and a wheel that works outside the checkout."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("autotune", "engine", "kernels", "reports")
ARROWS = {"kernels": set(), "engine": {"kernels"}, "reports": set(), "autotune": {"kernels", "engine", "reports"}}


def imported_siblings(package: str) -> set[tuple[str, str]]:
    """(file, sibling package) of every import of another of the four, relative or absolute."""
    found = set()
    for file in sorted((ROOT / package).rglob("*.py")):
        here = ["tilebudget", *file.parent.relative_to(ROOT).parts]
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                base = here[: len(here) + 1 - node.level] if node.level else []
                base = [*base, *(node.module or "").split(".")] if node.module else base
                names = [".".join([*base, alias.name]) for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            found |= {(file.name, name.split(".")[1]) for name in names if name.startswith("tilebudget.")}
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_follow_the_arrows(package: str) -> None:
    siblings = {(file, name) for file, name in imported_siblings(package) if name != package}
    assert {pair for pair in siblings if pair[1] not in ARROWS[package]} == set()


def test_the_arrow_check_sees_imports() -> None:
    assert {name for _, name in imported_siblings("autotune")} >= {"engine", "reports", "kernels"}


def test_every_package_is_listed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {
        "tilebudget." + ".".join(file.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
    }
    assert set(listed) == folders


def test_every_module_imports_from_a_built_wheel(tmp_path: Path) -> None:
    # setuptools builds in the source tree, so it gets a copy without what git ignores.
    source = tmp_path / "source"
    files = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        capture_output=True,
        check=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, files):
        origin = ROOT / name
        if origin.is_file() and name.split("/")[0] in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(origin.read_bytes())
    build = [sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist")]
    subprocess.run([*build, str(source)], check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    unpacked = tmp_path / "unpacked"
    with ZipFile(wheel) as archive:
        archive.extractall(unpacked)
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")} == {"tilebudget"}
    assert any(name.endswith("reports/templates/report.html.j2") for name in names)
    modules = sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names if name.endswith(".py")
    )
    program = (
        f"import sys, importlib; sys.path.insert(0, {str(unpacked)!r})\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
        f"for name in {modules!r}:\n"
        "    module = importlib.import_module(name)\n"
        f"    assert module.__file__.startswith({str(unpacked)!r}), module.__file__\n"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True, cwd=tmp_path, timeout=120)
