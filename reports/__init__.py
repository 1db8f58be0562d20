"""The HTML tuning report, built from a saved run folder and nothing else."""

from .build import build_report

__all__ = ["build_report"]
