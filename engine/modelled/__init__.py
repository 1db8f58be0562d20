"""Devices that are computed instead of run: iterations priced by a latency table, pipelines of them, their scatter."""
