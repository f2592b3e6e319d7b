"""What a person sees while a run goes on: numbers, the progress bar, evaluations."""

import math
import os
import re
import sys
import textwrap
import time

from tqdm import tqdm

# What the bar calls a metric; others have their own names there.
SHORT = {
    "rewards/accuracies": "acc",
    "mean_token_accuracy": "acc",
    "accuracy": "acc",
    "objective/scores": "score",
    "perf/tokens_per_second": "tok/s",
}
LOWER_IS_BETTER = re.compile(r"(loss|kl)$|/kl/(reverse|forward)(/|$)")
HIGHER_IS_BETTER = re.compile(r"(exact_match|accurac(y|ies)|margins?|scores|rewards/.+/mean)$")


def number(value: float) -> str:
    """Returns a number in three digits, such as 0.861, 12.3 or 3.67k."""
    if math.isfinite(value) and abs(value) >= 999.5:
        return tqdm.format_sizeof(value)
    return f"{value:#.3g}".rstrip(".")


def write(*lines: str) -> None:
    """Prints lines above the bar, on the main process; on a terminal they break between words."""
    if os.environ.get("RANK", "0") != "0":
        return
    if sys.stdout.isatty():
        width = max(os.get_terminal_size(sys.stdout.fileno()).columns, 40)
        wrapper = textwrap.TextWrapper(width, subsequent_indent=" " * 12)
        wrapper.break_long_words = wrapper.break_on_hyphens = False  # paths, names
        lines = tuple(map(wrapper.fill, lines))
    tqdm.write("\n".join(lines))
    sys.stdout.flush()


class Bar(tqdm):
    """How far a run is, and its latest values. What does not fit is left out, never cut.

    On a terminal it is one line that changes; elsewhere a line of its own every ten seconds.
    """

    def __init__(self, run):
        self.run = run
        self.values: dict[str, float] = {}  # the latest ones, by tag
        self.before = self.printed = run.global_step
        self.began = self.printed_at = time.monotonic()
        is_main = run.accelerator.is_main_process
        self.is_plain = is_main and not sys.stderr.isatty()
        # tqdm only decides when the line is drawn.
        super().__init__(mininterval=0.5, disable=not is_main or self.is_plain)
        self._instances.add(self)  # also if disabled: `errors.run` closes it before its message

    def show(self, values: dict[str, float]) -> None:
        """Shows values of a log line; those that a line lacks stay as they were."""
        self.values |= values
        if time.monotonic() - self.printed_at >= 10:
            self.print()

    def print(self) -> None:
        """Prints the line where there is no terminal, unless it is there already."""
        if self.is_plain and self.run.global_step > self.printed:
            self.printed = self.run.global_step
            self.printed_at = time.monotonic()
            print(self.line(), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the bar; it stays as it is."""
        self.print()
        super().close()

    def line(self, width: float = math.inf) -> str:
        """Returns the whole items that fit into so many columns."""
        run = self.run
        total = run.total_steps
        items = [f"update {run.global_step}/{total}"]
        if run.global_step > self.before:
            elapsed = time.monotonic() - self.began
            left = elapsed / (run.global_step - self.before) * (total - run.global_step)
            items.append(f"{tqdm.format_interval(elapsed)}<{tqdm.format_interval(left)}")
        for name, value in self.values.items():
            label = SHORT.get(name, name)
            words = [number(value), label] if label == "tok/s" else [label, number(value)]
            items.append(" ".join(words))
        while len(items) > 1 and len("  ".join(items)) >= width:
            items.pop()
        return "  ".join(items)

    def __str__(self) -> str:  # what tqdm draws
        return self.line(os.get_terminal_size(sys.stderr.fileno()).columns or 80)


# ============================================================ evaluations
def direction(metric: str) -> int:
    """Returns 1 if more of a held-out metric is better, -1 if less is, 0 if neither is known."""
    return int(bool(HIGHER_IS_BETTER.search(metric))) - int(bool(LOWER_IS_BETTER.search(metric)))


def progress_of(metric: str, evaluations: list[dict[str, float]]) -> str:
    """Returns a held-out metric in words: its last value, that of the start, and the best one."""
    seen = [(line[metric], line["global_step"]) for line in evaluations if metric in line]
    text = f"{seen[-1][0]:<8.4g}"
    if len(seen) == 1:
        return text.rstrip()
    first, began = seen[0]
    earlier = f"{first:.4g} at {began or 'the start'}"
    if sign := direction(metric):
        finite = [(value, step) for value, step in seen if math.isfinite(value)]
        best, step = max(finite or seen, key=lambda each: (sign * each[0], -each[1]))
        if step == evaluations[-1]["global_step"]:
            return f"{text} the best ({earlier})"
        earlier += ", the best" if step == began else f", best {best:.4g} at {step}"
    return f"{text} ({earlier})"


def describe_evaluation(evaluations: list[dict[str, float]], samples: list[dict]) -> list[str]:
    """Returns lines: each metric of the last evaluation, and its first answers."""
    names = [name for name in evaluations[-1] if name != "global_step"]
    width = max(map(len, names))
    lines = [f"evaluation at global_step {evaluations[-1]['global_step']}:"]
    lines += [f"  {name:{width}} {progress_of(name, evaluations)}" for name in names]
    return lines + [f"  {describe_sample(sample)}" for sample in samples[:3]]


def describe_sample(sample: dict) -> str:
    """Returns a line: the end of a prompt, the beginning of its response, and its worth."""
    prompt = " ".join(sample["prompt"].split())
    if len(prompt) > 60:
        prompt = f"... {prompt[-60:]}"
    response = textwrap.shorten(sample["response"], 60, placeholder=" ...")
    worth = [f"score {sample['score']:.4g}"] if "score" in sample else []
    if "right" in sample:
        worth.append("right" if sample["right"] else f"wrong: {sample['answer']}")
    return f"{prompt} -> {response}  {', '.join(worth)}"
