"""Commands around a run."""
