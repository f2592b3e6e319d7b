"""Runs the recipe named first, and adds to each training line what `perf/mfu` is computed from: `perf/flop`.

`perf/mfu` itself is for GPUs only.
"""

import runpy
import sys

from common.speed import Speed

init, values = Speed.__init__, Speed.values


def init_with_peak(self, *arguments) -> None:
    init(self, *arguments)
    self.peak = 1.0  # of any device: operations are counted where a peak is known


def values_with_flop(self) -> dict[str, float]:
    return {**values(self), "perf/flop": self.accelerator.reduce(self.flop, "sum").item()}


Speed.__init__ = init_with_peak
Speed.values = values_with_flop
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
