"""Data sets: files, formats, token ids."""
