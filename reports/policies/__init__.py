"""The batching policies side by side on the same requests: iterations, stalls, times between tokens."""
