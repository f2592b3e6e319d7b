"""The values of single samples behind the logged means, which `--values_steps` records."""

import dataclasses
import math
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.parquet
import torch
from accelerate.utils import gather_object

from common import folders

# The folder of a run's records, in parts that Parquet's readers read as one table.
VALUES = "values.parquet"
COUNT = ":count"  # the suffix of the column with a metric's counts
# Identity element of each reduction.
IDENTITY = {"mean": 0.0, "min": math.inf, "max": -math.inf}
SAMPLES_PER_PART = 4096  # per process; fewer before a checkpoint and at the end
INTEGER, TEXT, NUMBER = pyarrow.int32(), pyarrow.string(), pyarrow.float64()
SAMPLE = pyarrow.schema(
    dict(global_step=INTEGER, source=TEXT, row=INTEGER, response=INTEGER, weight=NUMBER)
)


@dataclasses.dataclass
class Recorder:
    """Records the values of each sample of one source, without waiting for a GPU in between."""

    run: Any  # a `Run`
    source: str  # `train`; `rollout` in a recipe that samples; `eval` or `eval/<name>`
    # Micro-batches of an update that is not applied yet, and tables that are not written yet.
    pending: list[tuple] = dataclasses.field(default_factory=list)
    tables: list[pyarrow.Table] = dataclasses.field(default_factory=list)
    # With `--values_tokens`: log-probs of the last forward pass in training, and their mask.
    logps: tuple[torch.Tensor, torch.Tensor] | None = None

    def keep_logps(self, model, inputs, output) -> None:
        """Keeps the log-probs of a forward pass, `[answers, tokens]`; a hook of the model."""
        if torch.is_grad_enabled() and isinstance(output, dict):
            self.logps = (output["logps"].detach(), inputs[0]["loss_mask"])

    @torch.no_grad()
    def add(self, values: dict, weights: torch.Tensor, rows: list, responses=None) -> None:
        """Keeps each sample's values if this update is to be recorded; see `Means.add`."""
        interval = self.run.interval_in_updates(self.run.args.values_steps)
        if not self.source.startswith("eval") and (self.run.global_step + 1) % interval:
            return
        schema = SAMPLE
        columns = [weights.double()]
        shape = (len(weights), -1)
        for name, (numbers, counts, reduce) in values.items():
            counts = counts.double().reshape(shape)
            kept = torch.where(counts > 0, numbers.double().reshape(shape), IDENTITY[reduce])
            mean = (kept * counts).sum(1) / counts.sum(1)
            columns += [{"mean": mean, "min": kept.amin(1), "max": kept.amax(1)}[reduce]]
            columns += [counts.sum(1)]
            schema = schema.append(pyarrow.field(name, NUMBER, metadata={"reduce": reduce}))
            schema = schema.append(pyarrow.field(name + COUNT, NUMBER))
        self.pending.append((torch.stack(columns), (schema, rows, responses, self.logps)))

    def close_update(self, applied: bool) -> None:
        """Keeps the values of an applied update, and drops those of a skipped one.

        Writes them once there are many, and at the end of an evaluation or of the run.
        """
        pending, self.pending = self.pending, []
        if pending and applied:
            kept, others = zip(*pending)
            sizes = [columns.shape[1] for columns in kept]
            numbers = torch.cat(kept, 1).cpu().split(sizes, 1)  # a GPU is waited for only once
            parts = [self.table_of(part, *other) for part, other in zip(numbers, others)]
            table = pyarrow.concat_tables(parts)
            self.tables.append(table.filter(pyarrow.compute.greater(table["weight"], 0)))
            everyone = pyarrow.concat_tables(gather_object(self.tables[-1:]))
            if self.run.board:
                self.run.board.add_histograms(self.source, everyone, self.run.global_step)
        is_end = self.source.startswith("eval") or self.run.finished
        if is_end or sum(map(len, self.tables)) >= SAMPLES_PER_PART:
            self.write()

    def table_of(self, numbers, schema, rows, responses, logps) -> pyarrow.Table:
        """Returns a micro-batch that `add` has kept, with one row per sample."""
        weights, *values = numbers.numpy()
        columns = [[self.run.global_step] * len(rows), [self.source] * len(rows)]
        columns += [rows, responses or [None] * len(rows), weights]
        for means, counts in zip(values[::2], values[1::2]):
            columns += [pyarrow.array(means, mask=counts == 0), counts]
        if logps is not None:
            schema = schema.append(pyarrow.field("logps", pyarrow.list_(pyarrow.float32())))
            by_answer = [row[mask.bool()] for row, mask in zip(*(x.cpu() for x in logps))]
            # A pair's sample has the log-probs of the chosen answer, then of the rejected.
            by_sample = [torch.cat(by_answer[index :: len(rows)]) for index in range(len(rows))]
            columns.append([sample_logps.tolist() for sample_logps in by_sample])
        return pyarrow.table(columns, schema=schema)

    def write(self) -> None:
        """Writes the tables that are in no file yet as a part, which is complete or absent."""
        tables, self.tables = self.tables, []
        if any(map(len, tables)):
            folder = self.run.output_dir / VALUES
            folder.mkdir(exist_ok=True)
            source = self.source.replace("/", "-")
            process = self.run.accelerator.process_index  # each process writes its own parts
            name = f"{self.run.global_step:06d}-{source}-{process}.parquet"
            table = pyarrow.concat_tables(tables, promote_options="default")
            with folders.writing(folder / f".{name}"):
                pyarrow.parquet.write_table(table, folder / f".{name}")
                (folder / f".{name}").rename(folder / name)
