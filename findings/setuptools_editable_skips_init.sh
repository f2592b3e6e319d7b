#!/usr/bin/env bash
# setuptools 84.2.1: beside an empty folder of its name an editable installation is imported without its __init__.py.
#
# The good guess: `pip install -e .` installs as `pip install .` does, only that changes of the files count. A folder
# without an __init__.py loses against a package.
# What was seen: in a directory with an empty folder `tool`, `import tool.part` works, but tool/__init__.py is not run:
# `tool.NAME` is an AttributeError. After `pip install .` it is there.
# Why it matters: who keeps a clone that is named as its package beside his scripts has such a folder. What the
# __init__.py sets up is missing, and no import fails.
# Where: for a package at the root of its project setuptools writes a finder (editable_wheel.py). It is asked after
# Python's own, which takes the folder for a namespace package. With the layout src/ a path is written, and all is well.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q setuptools==84.2.1
mkdir -p "$folder/project/tool" "$folder/elsewhere/tool"
echo "NAME = 'found'" > "$folder/project/tool/__init__.py"
touch "$folder/project/tool/part.py"
cat > "$folder/project/pyproject.toml" << 'END'
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "tool"
version = "1"
[tool.setuptools]
packages = ["tool"]
END

cd "$folder/elsewhere"
installed() { # how it is installed: what an import says
    "$folder/env/bin/pip" install -q --no-build-isolation --force-reinstall "$@" "$folder/project"
    "$folder/env/bin/python" -c "import tool.part; print(tool.NAME)" 2>&1 | tail -n 1 || true
}
ordinary=$(installed)
editable=$(installed -e)
echo "ordinary: $ordinary; editable: $editable"
[ "$ordinary" = found ] && [ "$editable" = "AttributeError: module 'tool' has no attribute 'NAME'" ]
echo "as described"
