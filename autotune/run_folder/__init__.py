"""What a study leaves on disk: the run folder and the files in it."""
