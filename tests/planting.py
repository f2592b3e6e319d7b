"""Edits of a program by its syntax tree: it does not matter where a line is or how it looks.

An edit names a function and quotes a piece of its code. The quote and the code are compared as
trees. So comments, line breaks, quotation marks and other functions may change, and the edit still
fits. It must fit exactly once.
"""

import ast
import copy
from collections.abc import Callable

Node = ast.stmt | ast.expr
Plant = Callable[[ast.Module], None]  # changes the tree of a file

DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


class Misfit(Exception):
    """An edit that fits nowhere, or more than once."""


# ============================================================ the edits


def replace(function: str, find: str, by: str) -> Plant:
    """Puts `by` in the place of a statement or an expression.

    Args:
        function: such as `Progress.update_done`; `main.reference_logps` for one inside another.
        find: one statement, or one expression, as Python code.
        by: an expression for an expression, else any number of statements.
    """
    quoted = ast.parse(find).body
    new = ast.parse(by).body
    if len(quoted) != 1:
        raise ValueError(f"expected one statement or expression: {find}")
    old = quoted[0]
    if len(new) == 1 and isinstance(old, ast.Expr) and isinstance(new[0], ast.Expr):
        old = old.value
        new = new[0].value

    looked_for = ast.dump(old)

    def is_wanted(node: ast.AST) -> bool:
        return type(node) is type(old) and ast.dump(node) == looked_for

    return edit(function, find, is_wanted, lambda node: copy.deepcopy(new))


def drop(function: str, statement: str) -> Plant:
    """Leaves a statement out."""
    return replace(function, statement, by="pass")


def drop_call(function: str, call: str) -> Plant:
    """Leaves out the statement that calls `call`, whatever the arguments are."""

    def is_wanted(node: ast.AST) -> bool:
        return isinstance(node, ast.Expr) and is_call_of(call, node.value)

    return edit(function, f"{call}(...)", is_wanted, lambda node: ast.Pass())


def argument(function: str, call: str, keyword: str, value: str) -> Plant:
    """Gives one keyword argument of a call, which must have it, another value."""

    def is_wanted(node: ast.AST) -> bool:
        return is_call_of(call, node) and any(each.arg == keyword for each in node.keywords)

    def change(node: ast.Call) -> ast.Call:
        for each in node.keywords:
            if each.arg == keyword:
                each.value = expression(value)
        return node

    return edit(function, f"{call}({keyword}=...)", is_wanted, change)


def together(*plants: Plant) -> Plant:
    """Several edits of one file as one."""

    def plant(tree: ast.Module) -> None:
        for each in plants:
            each(tree)

    return plant


# ============================================================ how they work


def edit(
    function: str,
    described: str,
    is_wanted: Callable[[ast.AST], bool],
    change: Callable[[ast.AST], Node | list[ast.stmt]],
) -> Plant:
    """Returns the edit that changes the one wanted node of a function.

    Args:
        described: the wanted node, for messages.
        change: returns what takes its place.
    """

    def plant(tree: ast.Module) -> None:
        editor = Editor(is_wanted, change)
        editor.generic_visit(find_definition(tree, function))
        if editor.found != 1:
            raise Misfit(f"{described!r} is {editor.found} times in {function}, expected once")

    return plant


class Editor(ast.NodeTransformer):
    """Changes all wanted nodes of a tree, and counts them in `found`."""

    def __init__(self, is_wanted, change):
        self.is_wanted = is_wanted
        self.change = change
        self.found = 0

    def visit(self, node: ast.AST):
        if not self.is_wanted(node):
            return self.generic_visit(node)
        self.found += 1
        return self.change(node)


def find_definition(tree: ast.Module, name: str) -> ast.FunctionDef | ast.ClassDef:
    """Returns the function or class of a dotted name."""
    scope = tree
    for part in name.split("."):
        inside = [node for node in ast.walk(scope) if node is not scope]
        found = [node for node in inside if isinstance(node, DEFINITIONS) and node.name == part]
        if len(found) != 1:
            raise Misfit(f"{part!r} of {name} is defined {len(found)} times, expected once")
        scope = found[0]
    return scope


def is_call_of(name: str, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == name


def expression(code: str) -> ast.expr:
    return ast.parse(code, mode="eval").body
