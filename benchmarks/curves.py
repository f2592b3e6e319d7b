"""Draws tags of finished runs over `global_step`, a panel each, for the docs. Needs matplotlib.

python benchmarks/curves.py OUT.png TAG[,TAG ...] RUN [RUN ...]      RUN: an --output_dir, or NAME=OUTPUT_DIR
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    out, tags, runs = sys.argv[1], sys.argv[2].split(","), sys.argv[3:]
    columns = min(4, len(tags))
    rows = -(-len(tags) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.6 * columns, 2.6 * rows), squeeze=False, constrained_layout=True
    )
    for axis in axes.flat[len(tags) :]:
        axis.axis("off")
    for run in runs:
        name, _, folder = run.rpartition("=")
        lines = [
            json.loads(line)
            for line in (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        for tag, axis in zip(tags, axes.flat):
            points = [(line["global_step"], line[tag]) for line in lines if tag in line]
            axis.plot(
                *zip(*points),
                marker="o" if len(points) < 10 else "",
                linewidth=1,
                markersize=4,
                label=name or None,
            )
            axis.set_title(tag, fontsize=10)
            axis.grid(alpha=0.3)
            axis.tick_params(labelsize=8)
    if "=" in runs[0]:
        axes.flat[0].legend(fontsize=8)
    figure.supxlabel("global_step", fontsize=9)
    figure.savefig(out, dpi=90)


if __name__ == "__main__":
    main()
