"""What `tests/contracts/test_recipe.py` consists of: promises, and the runs that show whether a recipe keeps them."""
