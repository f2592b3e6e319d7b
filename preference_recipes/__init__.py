"""The libraries that recipes build on. Importing this package also makes `common` ours.

A wheel has the repository's `common`, `recipes`, `accelerate_configs` and `assets` in this folder.
"""

import sys
from importlib import util
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMON = HERE / "common" if (HERE / "common").is_dir() else HERE.parent / "common"

if str(HERE) in sys.path:  # put there by a recipe of the wheel: `data`, `tools` would be ours, too
    sys.path.remove(str(HERE))
if "common" not in sys.modules:
    spec = util.spec_from_file_location("common", COMMON / "__init__.py")
    sys.modules["common"] = util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["common"])
elif getattr(sys.modules["common"], "ROOT", None) != COMMON.parent:
    other = sys.modules["common"]
    raise ImportError(f"import preference_recipes before {other}: its own `common` is {COMMON}")
