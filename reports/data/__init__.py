"""A run folder's files, read and checked: the only thing that the rest of ``reports`` knows about a study."""
