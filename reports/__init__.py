"""The HTML tuning report and the comparison of several studies, built from saved run folders and nothing else."""

from .build import build_report
from .compare import COMPARE_NAME, build_comparison

__all__ = ["COMPARE_NAME", "build_comparison", "build_report"]
