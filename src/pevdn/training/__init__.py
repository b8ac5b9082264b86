"""A run from settings to summary: the training loop and the files it keeps."""
