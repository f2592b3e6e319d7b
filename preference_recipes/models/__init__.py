"""Models: loading, log-probabilities, packing, preparing."""
