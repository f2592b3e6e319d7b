"""Runs the recipe named first, and adds to each training line what `perf/mfu` is computed from: `perf/flop`.

`perf/mfu` itself is for GPUs only.
"""

import runpy
import sys

from common.metrics import Metrics

performance = Metrics.performance


def with_flop(self, elapsed: float, flop: float) -> dict[str, float]:
    return {**performance(self, elapsed, flop), "perf/flop": flop}


Metrics.performance = with_flop
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
