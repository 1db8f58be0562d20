"""What is served: traces of every format, workloads by published statistics, and when requests arrive."""
