"""Runs the recipe named first, and adds to each training line what `perf/mfu` is computed from: `perf/flop`.

`perf/mfu` itself is for GPUs only.
"""

import runpy
import sys

from common.speed import Speed

values = Speed.values


def with_flop(self, elapsed: float, flop: float) -> dict[str, float]:
    all_processes = flop * self.accelerator.num_processes
    return {**values(self, elapsed, flop), "perf/flop": all_processes}


Speed.values = with_flop
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
