"""What TensorBoard shows of a run: curves, a page of its key charts, samples, hyper-parameters.

Held-out values are a run of their own there, which gives them another colour than training.
"""

import functools
import re
import threading
from collections.abc import Collection
from pathlib import Path

import torch

# What the tags of held-out values begin with.
EVAL = "eval/"
# The folder of their event files, and the end of what TensorBoard calls them.
HELD_OUT = "held_out"


class Board:
    """The event files of a run. For the main process.

    No two kinds of data share a tag: TensorBoard would show neither.

    Args:
        folder: of the event files.
        global_step: where the run begins or continues. TensorBoard hides what a killed run wrote
            after it.
        charts: the tags of each chart under CUSTOM SCALARS, by its title; see `key_charts`.
        settings: the run's arguments, as numbers, texts and booleans; shown under HPARAMS.
        first: the names of the arguments that come first there. Five are in view.
        has_held_out: whether there will be held-out values.
    """

    def __init__(
        self,
        folder: Path,
        global_step: int,
        charts: dict[str, list[str]],
        settings: dict,
        first: Collection[str] = (),
        has_held_out: bool = False,
    ):
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self.charts = charts
        self.settings = settings
        self.first = first
        # Event files hold page and settings once. A resumed run continues in the same folder.
        self.is_new = not folder.is_dir()
        # A new run starts at 0, the step of the evaluation before the first update.
        purge_step = global_step + 1 if global_step else 0
        leave_errors_to_the_run()
        self.writer = SummaryWriter(folder, purge_step=purge_step)
        self.held_out = self.writer
        if has_held_out:
            self.held_out = SummaryWriter(folder / HELD_OUT, purge_step=purge_step)

    def add_scalars(self, values: dict[str, float], global_step: int) -> None:
        """Adds a line of metrics.

        With the first one TensorBoard learns the page and the hyper-parameters. It is the
        evaluation before training, if there is one.
        """
        if self.is_new:
            self.is_new = False
            held_out = [name for name in values if name.startswith(EVAL)]
            self.writer.add_custom_scalars(key_charts(self.charts, held_out, self.settings))
            self.add_settings(held_out)
        for name, value in values.items():
            writer = self.held_out if name.startswith(EVAL) else self.writer
            writer.add_scalar(name, value, global_step)
        self.writer.flush()
        self.held_out.flush()

    def add_settings(self, held_out: list[str]) -> None:
        """Writes the run's arguments for the tab HPARAMS, next to the held-out metrics.

        Args:
            held_out: the tags of held-out values.
        """
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
        from torch.utils.tensorboard.summary import hparams

        # The values of the metrics are those of the curves.
        summaries = hparams(self.settings, dict.fromkeys(held_out or ["loss"], 0.0))
        of_plugin = summaries[0].value[0].metadata.plugin_data
        content = HParamsPluginData.FromString(of_plugin.content)
        for argument in content.experiment.hparam_infos:
            # TensorBoard sorts them by this, then by name.
            argument.differs = argument.name in self.first
        for metric in content.experiment.metric_infos:
            metric.name.group = HELD_OUT if held_out else ""
        of_plugin.content = content.SerializeToString()
        for summary in summaries:
            self.writer.file_writer.add_summary(summary)

    def add_histogram(self, name: str, values: torch.Tensor, global_step: int) -> None:
        """Adds a histogram of values, of any shape, if there are any."""
        if len(values) and values.abs().max() < 1e20:  # TensorBoard's bins end there
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


def command(output_dir: Path) -> str:
    """Returns the command that shows a single run, under the name of its folder."""
    name = output_dir.resolve().name
    if set(f"{name}{output_dir}") & set(":,"):  # TensorBoard would read them as separators
        return f"tensorboard --logdir {output_dir}"
    return f"tensorboard --logdir_spec {name}:{output_dir}"


def key_charts(
    charts: dict[str, list[str]], held_out: list[str], settings: dict
) -> dict[str, dict[str, list]]:
    """Returns the page of key charts, CUSTOM SCALARS: held-out values, then training.

    It is as `SummaryWriter.add_custom_scalars` takes it: by titles, of groups and of charts.

    Args:
        charts: tags by title. Those that begin with `eval/` are held-out alone. For others a chart
            of training has the held-out values of the same tag, too.
        held_out: the tags of held-out values.
        settings: the run's arguments. Where they have temperatures the titles name them.
    """
    of_evaluation, of_rollout = how_responses_are_made(settings)
    of_held_out: dict[str, list] = {}
    of_training: dict[str, list] = {}
    both = ""
    for title, tags in charts.items():
        of_held_out |= margin_charts(title, tags, held_out)
        if trained := [tag for tag in tags if not tag.startswith(EVAL)]:
            of_training[title] = ["Multiline", [pattern_of(trained)]]
            if matching(trained, held_out):
                both = f", and held out{of_evaluation} where both are measured"
    groups = {
        # TensorBoard's page shows charts with margins in the opposite order.
        f"held out{of_evaluation}": dict(reversed(of_held_out.items())),
        f"training{of_rollout}{both}": of_training,
    }
    return {title: group for title, group in groups.items() if group}


def margin_charts(title: str, tags: list[str], held_out: list[str]) -> dict[str, list]:
    """Returns a chart of held-out values for each held-out set, if one of the tags has them.

    TensorBoard ignores outliers by default: it leaves at least the highest and the lowest value of
    a chart out of its range. Of a short run these are the first and the last evaluation. So the
    values are drawn as a curve with margins of no width. With them each value counts three times,
    and none is left out where there are up to 13.

    Where several of the tags have held-out values there is no such chart, because TensorBoard would
    warn of tags that are missing in training.
    """
    measured = [tag for tag in tags if matching([tag], held_out)]
    if len(measured) != 1:
        return {}
    tag = measured[0]
    charts = {}
    for name in matching([tag], held_out):
        name_of_set = name.removeprefix(EVAL).removesuffix(tag.removeprefix(EVAL)).rstrip("/")
        full_title = f"{title}: {name_of_set}" if name_of_set else title
        charts[full_title] = ["Margin", [name, name, name]]  # the value and its two margins
    return charts


def how_responses_are_made(settings: dict) -> tuple[str, str]:
    """Returns how held-out responses, and those of rollouts, are made, in brackets for titles.

    Both are empty where a recipe samples nothing to train on.
    """
    if "eval_temperature" not in settings:
        return "", ""
    return in_brackets(settings["eval_temperature"]), in_brackets(settings["temperature"])


def in_brackets(temperature: float) -> str:
    """Returns how responses are made at a temperature; 0 is greedy."""
    return f" (sampled at temperature {temperature:g})" if temperature else " (greedy)"


def matching(tags: list[str], names: list[str]) -> list[str]:
    """Returns the names that a chart of these tags shows, see `pattern_of`."""
    return [name for name in names if re.match(pattern_of(tags), name)]


def pattern_of(tags: list[str]) -> str:
    """Returns the regular expression of tags, in training and in evaluation.

    Tags that begin with `eval/` are meant in evaluation alone, of each held-out set.
    """
    held_out = f"{EVAL}([^/]+/)?"
    patterns = [
        held_out + tag.removeprefix(EVAL) if tag.startswith(EVAL) else f"({held_out})?{tag}"
        for tag in tags
    ]
    return f"({'|'.join(patterns)})$"
