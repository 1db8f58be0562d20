"""Measuring a server that speaks the OpenAI completions API: its process, its streams, its own metrics."""
