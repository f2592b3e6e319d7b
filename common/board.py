"""What TensorBoard shows of a run: curves, a page of its key charts, samples, hyper-parameters."""

import functools
import threading
from pathlib import Path

import torch


class Board:
    """The event files of a run. For the main process.

    No two kinds of data share a tag: TensorBoard would show neither.

    Args:
        folder: of the event files.
        global_step: where the run begins or continues. TensorBoard hides what a killed run wrote
            after it.
        charts: the tags of each chart under CUSTOM SCALARS, by its title. A chart also draws the
            held-out values of its tags.
        settings: the run's arguments, as numbers, texts and booleans; shown under HPARAMS.
    """

    def __init__(
        self, folder: Path, global_step: int, charts: dict[str, list[str]], settings: dict
    ):
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self.settings = settings
        # Event files hold it once. A resumed run continues in the same folder.
        self.is_new = not folder.is_dir()
        # A new run starts at 0, the step of the evaluation before the first update.
        purge_step = global_step + 1 if global_step else 0
        leave_errors_to_the_run()
        self.writer = SummaryWriter(folder, purge_step=purge_step)
        if self.is_new and charts:
            page = {title: ["Multiline", [pattern_of(tags)]] for title, tags in charts.items()}
            self.writer.add_custom_scalars({"key metrics": page})

    def add_scalars(self, values: dict[str, float], global_step: int) -> None:
        """Adds a line of metrics. With the first one TensorBoard learns the hyper-parameters."""
        if self.is_new:
            self.is_new = False
            self.add_settings(values)
        for name, value in values.items():
            self.writer.add_scalar(name, value, global_step)
        self.writer.flush()

    def add_settings(self, values: dict[str, float]) -> None:
        """Writes the run's arguments for the tab HPARAMS, next to the held-out metrics.

        Args:
            values: of the first line. It is the evaluation before training, if there is one.
        """
        from torch.utils.tensorboard.summary import hparams

        held_out = [name for name in values if name.startswith("eval/")]
        # The values of the metrics are those of the curves in the same folder.
        for summary in hparams(self.settings, dict.fromkeys(held_out or ["loss"], 0.0)):
            self.writer.file_writer.add_summary(summary)

    def add_histogram(self, name: str, values: torch.Tensor, global_step: int) -> None:
        """Adds a histogram of values, of any shape."""
        if values.abs().max() < 1e20:  # TensorBoard's bins end there
            self.writer.add_histogram(name, values, global_step)

    def add_text(self, name: str, text: str, global_step: int) -> None:
        """Adds a text in Markdown."""
        self.writer.add_text(name, text, global_step)
        self.writer.flush()


@functools.cache
def leave_errors_to_the_run() -> None:
    """Shows no traceback of TensorBoard's thread if it cannot write, because the disk is full.

    The next call of its writer raises the same error, in the run.
    """
    show = threading.excepthook

    def show_others(error) -> None:
        if type(error.thread).__name__ != "_AsyncWriterThread":
            show(error)

    threading.excepthook = show_others


def pattern_of(tags: list[str]) -> str:
    """Returns the regular expression of tags, in training and in evaluation."""
    return f"(eval/([^/]+/)?)?({'|'.join(tags)})$"
