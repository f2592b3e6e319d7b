"""What pip installs besides `common`: the recipes, launch configs, the demo, a command.

`pyproject.toml` maps the repository's folders `recipes`, `accelerate_configs` and `assets` to here.
"""
