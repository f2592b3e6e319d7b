"""`python -m common.prove`: whether a recipe, or a fork of one, keeps the project's contracts."""
