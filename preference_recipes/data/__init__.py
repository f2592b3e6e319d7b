"""Reads data sets, recognises the formats of their rows, and turns them into cached token ids."""
