"""The answer of a study: how it is made, how sure it is, its file, its store, and its form for each server."""
