"""Answers `--help` and refuses wrong flags before a recipe imports torch, which takes seconds.

A recipe reads its command line in `main`, by `arguments.parse(Args, demo=...)`. This runs the same
call beforehand, with no more of the recipe than it needs: the class `Args` and what that names.
"""

import ast
import gc
import sys
from pathlib import Path

from common import errors


def read_arguments(recipe_file: str) -> None:
    """Reads the command line as the recipe will, if that is what Python was started with.

    If it cannot be read like this, nothing happens: the recipe itself reads it later.

    Raises:
        SystemExit: after `--help`, or with the recipe's own refusal.
    """
    main_file = getattr(sys.modules["__main__"], "__file__", None)
    if recipe_file == main_file and "torch" not in sys.modules:
        errors.run(lambda: run_call(Path(recipe_file).read_text(encoding="utf-8")))


def run_call(source: str) -> None:
    """Runs a recipe's call of `arguments.parse` as one of `arguments.read`.

    Then garbage collection is off until the recipe itself makes that call.
    """
    from common import arguments  # slow to import

    try:
        tree = ast.parse(source)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        (call,) = [each for each in calls if ast.unparse(each.func) == "arguments.parse"]
        call.func = ast.Name("read", ast.Load())
        body = [*statements_for(call, tree), ast.Expr(call)]
        program = ast.fix_missing_locations(ast.Module(body, type_ignores=[]))
        exec(compile(program, "recipe", "exec"), {"__name__": "__main__", "read": arguments.read})
    except Exception:  # whatever a changed recipe may do: it will say so itself
        return
    # Modules are never freed, and looking through them again and again takes a fifth of a recipe's
    # start. `arguments.parse`, which comes after all imports, turns the collector on again.
    gc.disable()


def statements_for(node: ast.AST, tree: ast.Module) -> list[ast.stmt]:
    """Returns the top-level statements that define what a node names, in their order.

    Of an import only the names that are needed. Example: for the node `f(Args)`

        from dataclasses import dataclass, field        from dataclasses import dataclass
        import torch                               ->
        @dataclass                                      @dataclass
        class Args: ...                                 class Args: ...
    """
    needed = names_in(node)
    statements: list[ast.stmt] = []
    for statement in reversed(tree.body):
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            bound = [alias for alias in statement.names if name_of(alias) in needed]
            if bound:
                statement.names = bound
                statements.append(statement)
        elif defined_by(statement) & needed:
            needed |= names_in(statement)
            statements.append(statement)
    return statements[::-1]


def names_in(node: ast.AST) -> set[str]:
    """Returns all names in a piece of code."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def name_of(alias: ast.alias) -> str:
    """Returns the name that an import defines: `np`, or `torch` for `import torch.nn`."""
    return alias.asname or alias.name.partition(".")[0]


def defined_by(statement: ast.stmt) -> set[str]:
    """Returns the names that a class, a function or an assignment defines; none for others."""
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
        return {statement.name}
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return names_in(statement)
    return set()
