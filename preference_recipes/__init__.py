"""The libraries that recipes build on. Importing this package also makes `common` ours.

Others have packages of that name, too. A wheel has ours in this folder, and also the repository's
folders `recipes`, `accelerate_configs` and `assets`.
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
elif getattr(sys.modules["common"], "FILES", None) != COMMON.parent:
    raise ImportError(
        f"{sys.modules['common']} was imported before preference_recipes, whose `common` is "
        f"{COMMON}: import preference_recipes first"
    )
