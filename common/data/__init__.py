"""Data sets: reading files, recognising the formats of rows, token ids, and what is cached."""
