#!/usr/bin/env bash
# pyarrow 26.0.1: groups do not come in the order of their rows, also with use_threads=False.
#
# The good guess: the page says that only with threads "no stable ordering of the output is guaranteed", and without
# them a small table gives the groups in the order in which they first appear. So a table that is sorted by time, summed
# by person and time, and then asked for the "last" of each person, tells the latest.
# What was seen: from about twenty groups by two keys on, some groups come after later ones. "last" is then of an
# earlier time, for some persons, without a warning.
# Why it matters: the newest value of a row over a run is that of another update, for a few rows of many.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q pyarrow==26.0.1
"$folder/env/bin/python" - <<'PYTHON'
import pyarrow


def latest(n_persons: int) -> set[int]:
    """The last time that is found for each of so many persons, all of them seen at 0, 6 and 12."""
    persons = list(range(n_persons)) * 3
    times = [time for time in (0, 6, 12) for _ in range(n_persons)]
    table = pyarrow.table({"person": persons, "time": times, "value": [1.0] * len(times)})
    sums = table.group_by(["person", "time"], use_threads=False).aggregate([("value", "sum")])
    last = sums.group_by("person", use_threads=False).aggregate([("time", "last")])
    return set(last["time_last"].to_pylist())


print(pyarrow.__version__, latest(5), latest(44))
assert latest(5) == {12} and latest(44) > {12}
PYTHON
echo "as described"
