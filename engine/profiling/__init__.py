"""Measuring the latency table of a device here, by timing iterations and whole runs of the real model."""
