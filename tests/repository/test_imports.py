"""Arrows run one way: recipes -> rollouts -> models -> common, recipes, rollouts, models -> data; no cycle."""

import ast
from pathlib import Path

from runs import REPOSITORY

# What each room may import besides itself. `models` knows `data` for stop tokens and images.
MAY_IMPORT = {
    "common": set(),
    "data": {"common"},
    "models": {"common", "data"},
    "rollouts": {"common", "data", "models"},
    "tools": {"common", "data", "models", "rollouts"},
}


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[0] if parts[0] == "common" else parts[1]


def modules() -> dict[str, Path]:
    files = [*REPOSITORY.glob("common/*.py"), *REPOSITORY.glob("preference_recipes/*/*.py")]
    return {".".join(file.relative_to(REPOSITORY).with_suffix("").parts): file for file in files}


def imports_of(file: Path, known: dict[str, Path], loaded: bool = False) -> set[str]:
    """Modules of ours that a file names: within functions and for annotations, too, unless only those `loaded` count."""
    found = set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in tree.body if loaded else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name in known}


def arrows() -> dict[str, set[str]]:
    known = modules()
    return {name: imports_of(file, known) - {name} for name, file in known.items()}


def test_no_room_imports_one_above_it():
    wrong = [
        f"{name} -> {other}"
        for name, others in arrows().items()
        for other in others
        if room_of(other) not in {room_of(name), *MAY_IMPORT[room_of(name)]}
    ]
    assert wrong == []


def test_no_library_reaches_the_run():
    """Neither by an import of its own nor by one of what it imports."""
    known = arrows()

    def reachable(name: str, seen: set[str]) -> set[str]:
        for other in known[name] - seen:
            seen.add(other)
            reachable(other, seen)
        return seen

    libraries = [name for name in known if room_of(name) != "common"]
    assert len(libraries) > 30
    assert [name for name in libraries if "common.run" in reachable(name, set())] == []


def test_text_loads_no_code_of_images():
    """Only functions import it, where a row or a model has some."""
    known = modules()
    of_images = {"preference_recipes.data.images", "preference_recipes.models.vision"}
    loading = [name for name in known if imports_of(known[name], known, loaded=True) & of_images]
    assert loading == ["preference_recipes.models.vision"] and of_images <= known.keys()


def test_no_circle():
    left = arrows()
    while True:  # takes away, again and again, what imports nothing that is left
        free = {name for name, others in left.items() if not others & left.keys()}
        if not free:
            break
        left = {name: others for name, others in left.items() if name not in free}
    assert sorted(left) == []
