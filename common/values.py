"""The values of single samples behind the logged means, which `--values_steps` records."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.parquet
import torch
from accelerate.utils import gather_object

from common import folders

# The folder in which a run records them, in parts that Parquet's readers take for one table.
VALUES = "values.parquet"
COUNT = ":count"  # after the name of a metric, in the name of the column that counts it
# What changes nothing when it is joined, by the reduction.
NOTHING = {"mean": 0.0, "min": math.inf, "max": -math.inf}
SAMPLES_OF_A_PART = 4096  # of a process; fewer before a checkpoint and at the end
INTEGER, TEXT, NUMBER = pyarrow.int32(), pyarrow.string(), pyarrow.float64()
SAMPLE = pyarrow.schema(
    dict(global_step=INTEGER, source=TEXT, row=INTEGER, response=INTEGER, weight=NUMBER)
)


@dataclasses.dataclass
class Recorder:
    """Records the values of each sample of one source: no micro-batch waits for a GPU."""

    run: Any  # a `Run`
    source: str  # `train`; `rollout` in a recipe that samples; `eval` or `eval/<name>`
    # Micro-batches of an update that is not applied yet, and tables that are in no part yet.
    pending: list[tuple] = dataclasses.field(default_factory=list)
    tables: list[pyarrow.Table] = dataclasses.field(default_factory=list)
    # With `--values_tokens`, of the last forward pass in training: log-probs and their mask.
    logps: tuple[torch.Tensor, torch.Tensor] | None = None

    def keep_logps(self, model, inputs, output) -> None:
        """Notes the log-probs of a forward pass, `[answers, tokens]`; a hook of the model."""
        if torch.is_grad_enabled() and isinstance(output, dict):
            self.logps = (output["logps"].detach(), inputs[0]["mask"])

    @torch.no_grad()
    def add(self, values: dict, weights: torch.Tensor, rows: list, responses=None) -> None:
        """Keeps each sample's values if the update of this micro-batch is due; see `Means.add`."""
        every = self.run.every(self.run.args.values_steps)
        if not self.source.startswith("eval") and (self.run.global_step + 1) % every:
            return
        schema = SAMPLE
        columns = [weights.double()]
        shape = (len(weights), -1)
        for name, (numbers, counts, reduce) in values.items():
            counts = counts.double().reshape(shape)
            kept = torch.where(counts > 0, numbers.double().reshape(shape), NOTHING[reduce])
            mean = (kept * counts).sum(1) / counts.sum(1)
            columns += [{"mean": mean, "min": kept.amin(1), "max": kept.amax(1)}[reduce]]
            columns += [counts.sum(1)]
            schema = schema.append(pyarrow.field(name, NUMBER, metadata={"reduce": reduce}))
            schema = schema.append(pyarrow.field(name + COUNT, NUMBER))
        self.pending.append((torch.stack(columns), (schema, rows, responses, self.logps)))

    def close_update(self, applied: bool) -> None:
        """Keeps the values of an update that was applied, and drops those of a skipped one.

        Writes them when they are many, and at the end of an evaluation or of the run.
        """
        pending, self.pending = self.pending, []
        if pending and applied:
            kept, others = zip(*pending)
            sizes = [each.shape[1] for each in kept]
            numbers = torch.cat(kept, 1).cpu().split(sizes, 1)  # a GPU waits for one copy
            parts = [self.table_of(part, *other) for part, other in zip(numbers, others)]
            table = pyarrow.concat_tables(parts)
            self.tables.append(table.filter(pyarrow.compute.greater(table["weight"], 0)))
            everyone = pyarrow.concat_tables(gather_object(self.tables[-1:]))
            if self.run.board:
                self.run.board.add_histograms(self.source, everyone, self.run.global_step)
        is_end = self.source.startswith("eval") or self.run.finished
        if is_end or sum(map(len, self.tables)) >= SAMPLES_OF_A_PART:
            self.write()

    def table_of(self, numbers, schema, rows, responses, logps) -> pyarrow.Table:
        """Returns a micro-batch that `add` has kept, a row for each sample."""
        weights, *values = numbers.numpy()
        columns = [[self.run.global_step] * len(rows), [self.source] * len(rows)]
        columns += [rows, responses or [None] * len(rows), weights]
        for means, counts in zip(values[::2], values[1::2]):
            columns += [pyarrow.array(means, mask=counts == 0), counts]
        if logps is not None:
            schema = schema.append(pyarrow.field("logps", pyarrow.list_(pyarrow.float32())))
            of_answers = [each[mask.bool()] for each, mask in zip(*(each.cpu() for each in logps))]
            # Those of a sample: in a pair, of the chosen answer, then of the rejected.
            by_sample = [torch.cat(of_answers[place :: len(rows)]) for place in range(len(rows))]
            columns.append([each.tolist() for each in by_sample])
        return pyarrow.table(columns, schema=schema)

    def write(self) -> None:
        """Writes what is in no file yet as a part, which is whole or not there."""
        tables, self.tables = self.tables, []
        if any(map(len, tables)):
            folder = self.run.output_dir / VALUES
            folder.mkdir(exist_ok=True)
            source = self.source.replace("/", "-")
            process = self.run.accelerator.process_index  # each writes parts of its own
            name = f"{self.run.global_step:06d}-{source}-{process}.parquet"
            table = pyarrow.concat_tables(tables, promote_options="default")
            with folders.writing(folder / f".{name}"):
                pyarrow.parquet.write_table(table, folder / f".{name}")
                (folder / f".{name}").rename(folder / name)
