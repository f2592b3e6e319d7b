"""Rollouts: generation and rewards."""
