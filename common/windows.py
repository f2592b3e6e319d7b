"""Windows: which samples form one, how it is cut into the micro-batches of each process, and how many were applied, skipped, seen."""

import bisect
import dataclasses
import functools
import math
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from accelerate.utils import gather_object

from .data import column


def window_rows(
    n_rows: int, train_batch_size: int, seed: int | tuple[int, ...], index: int
) -> np.ndarray:
    """The rows of window `index`, counted over the whole run.

    A seeded permutation per epoch, cut into windows; the last of an epoch may be short. It depends on the seed and the
    epoch alone: not on processes, micro-batches or a resume.
    """
    epoch, window = divmod(index, math.ceil(n_rows / train_batch_size))
    return epoch_order(n_rows, seed, epoch)[
        window * train_batch_size : (window + 1) * train_batch_size
    ]


@functools.lru_cache(
    maxsize=2
)  # PPO goes through prompts and, within a rollout, through its samples
def epoch_order(n_rows: int, seed: int | tuple[int, ...], epoch: int) -> np.ndarray:
    return np.random.default_rng(np.append(seed, epoch)).permutation(n_rows)


def arrange(
    accelerator,
    rows: Sequence[int],
    lengths: np.ndarray,
    micro_batch_size: int,
    max_tokens: int = 0,
) -> list[tuple]:
    """Cuts rows into micro-batches of like length, the same number on every process and as few as hold the rows.

    Order inside a window cannot change its update, so rows are sorted by length, longest first: little padding, processes in
    step, and a micro-batch too large for memory fails at once. A process that would have none gets a row of weight zero.

    Args:
        rows: row numbers, the same on every process.
        lengths: tokens of every row of the data set.
        max_tokens: where not 0, a micro-batch holds as many rows as fit into so many tokens, padding counted, instead of
            `micro_batch_size`, and all hold about as many; a longer row stands alone.

    Returns:
        This process's micro-batches: `list[int]` of rows and `list[float]` of their weights, 1 or 0.
    """
    rows, processes = np.asarray(rows), accelerator.num_processes
    rows = rows[np.argsort(-lengths[rows], kind="stable")]
    parts = np.array_split(rows, math.ceil(len(rows) / (micro_batch_size * processes)) * processes)
    if max_tokens:
        cut = functools.partial(cut_by_tokens, lengths[rows].tolist())
        number = math.ceil(len(cut(max_tokens)) / processes) * processes
        least = bisect.bisect_left(
            range(max_tokens), True, key=lambda tokens: len(cut(tokens)) <= number
        )
        parts = np.split(rows, cut(least)[1:])
        parts += [rows[:0]] * (number - len(parts))
    filler, mine = (rows[-1:].tolist(), [0.0]), parts[accelerator.process_index :: processes]
    return [(part.tolist(), [1.0] * len(part)) if len(part) else filler for part in mine]


def cut_by_tokens(lengths: list[int], max_tokens: int) -> list[int]:
    """Where micro-batches begin that hold at most so many tokens, padding counted; `lengths` from the longest on."""
    cuts = []
    for i in range(len(lengths)):
        if not cuts or (i + 1 - cuts[-1]) * lengths[cuts[-1]] > max_tokens:
            cuts.append(i)
    return cuts


def pad(sequences: Sequence[Sequence[int]], value: int, device, left: bool = False) -> torch.Tensor:
    """Sequences of ids as one tensor `[rows, longest]`, padded on the right (for generation on the left)."""
    rows, side = (
        [torch.tensor(sequence, dtype=torch.long) for sequence in sequences],
        "left" if left else "right",
    )
    return torch.nn.utils.rnn.pad_sequence(
        rows, batch_first=True, padding_value=value, padding_side=side
    ).to(device, non_blocking=True)


def lay_out(
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
    pack: bool,
    device,
    scored: Sequence[list] | None = None,
) -> dict:
    """Answers to prompts as a model reads them. Nothing here waits for a GPU: it computes one micro-batch while the next is laid out.

    Packed, a prompt that several have in common is computed once, and a row holds several prompts where they fit beside each other:
    an answer sees its prompt and itself only, at the positions it would have alone. Else, and where that would cost more, each is a
    row of its own.

    Args:
        scored: which tokens of each answer are targets; by default all.

    Returns:
        `inputs`, what a `transformers` model takes: `input_ids` `[rows, length]` padded on the right, and, where a row holds several
        answers, `position_ids` and `attention_mask`. `mask`, which tokens are targets, `[answers, longest]`, `targets`, their ids, and
        `before`, the place of the token that predicts each, `[targets]` in the order of the mask. `last`, the place of each answer's
        last token, `[answers]`. Places are counted through the rows one after the other.
    """
    groups, rows = {}, []
    for number, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt) if pack and prompt else number, []).append(number)
    # A tree of pieces: their ids, the position of the first, and two numbers, the piece's own and its prompt's.
    trees = [
        [(prompts[i[0]], 0, ~i[0], ~i[0]), *((answers[n], len(prompts[n]), n, ~i[0]) for n in i)]
        for i in groups.values()
    ]
    size = lambda pieces: sum(len(piece) for piece, *_ in pieces)
    longest = max(map(size, trees))
    for tree in sorted(trees, key=size, reverse=True):
        row = next((row for row in rows if pack and size(row) + size(tree) <= longest), None)
        if row is None:
            rows.append(row := [])
        row += tree
    alone = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers))
    # The cost of rows: attention grows with the square of the length, and is as much as all else at some thousand tokens; under a mask
    # nothing of the square is left out.
    if pack and len(rows) * longest * (2 * longest + 4096) > len(answers) * alone * (alone + 4096):
        return lay_out(prompts, answers, False, device, scored)
    ids, positions, owns, parents = (
        np.full(len(rows) * longest, fill) for fill in (0, 0, len(answers), len(answers))
    )
    before, last = [[]] * len(answers), [0] * len(answers)
    for number, row in enumerate(rows):
        end = number * longest
        for piece, position, own, parent in row:
            start, end = end, end + len(piece)
            ids[start:end], positions[start:end] = piece, range(position, position + len(piece))
            owns[start:end], parents[start:end] = own, parent
            if own < 0:
                end_of_prompt = max(end - 1, 0)
            else:
                before[own], last[own] = [end_of_prompt, *range(start, end - 1)], end - 1
    scored = [[True] * len(answer) for answer in answers] if scored is None else scored
    chosen = lambda parts: [
        one for part, flags in zip(parts, scored) for one, flag in zip(part, flags) if flag
    ]
    send = lambda array: torch.as_tensor(array).to(device, non_blocking=True)
    of_rows = lambda array: send(array).view(len(rows), longest)
    inputs, mask = {"input_ids": of_rows(ids)}, pad(scored, False, device).bool()
    if len(rows) < len(answers):
        own, parent = (of_rows(array)[:, None, :, None] for array in (owns, parents))
        inputs |= {
            "position_ids": of_rows(positions),
            "attention_mask": ((own.mT == own) | (own.mT == parent)).tril(),
        }
    return {
        "inputs": inputs,
        "mask": mask,
        "targets": send(chosen(answers)),
        "before": send(chosen(before)),
        "last": send(last),
    }


def evaluation_batches(
    accelerator, dataset, *sizes: int
) -> Iterator[tuple[list[int], dict, torch.Tensor]]:
    """Every row of a data set once, over all processes, in micro-batches of these sizes (see `arrange`): row numbers, their columns,
    and weights `[rows]`, 0 for a filler."""
    for rows, weights in arrange(
        accelerator, np.arange(len(dataset)), column(dataset, "length"), *sizes
    ):
        yield rows, dataset[rows], torch.tensor(weights, device=accelerator.device)


def gather_rows(mine: dict[int, object]) -> list:
    """What the processes have by row, as one list in the order of the rows, on every rank."""
    everyone = {row: value for part in gather_object([mine]) for row, value in part.items()}
    return [everyone[row] for row in range(len(everyone))]


@dataclasses.dataclass
class Progress:
    """The counters of a run. A checkpoint holds all but those of skips in a row and of late.

    Attributes:
        global_step: optimizer updates applied; the one x-axis.
        skipped_steps: updates that an fp16 overflow made the engine skip.
        windows_seen: windows consumed, applied or skipped: the position in the data.
        samples, tokens: trained on so far, in applied updates.
        recent_skips: which of the last 50 windows were skipped, the first of a run being 1.
        windows_per_epoch: windows of one pass over the rows; by default `n_rows / train_batch_size` rounded up.
    """

    n_rows: int
    train_batch_size: int
    max_epochs: int
    max_steps: int
    global_step: int = 0
    skipped_steps: int = 0
    windows_seen: int = 0
    samples: int = 0
    tokens: int = 0
    skips_in_a_row: int = 0
    windows_per_epoch: int = 0
    recent_skips: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        if self.max_steps < 0 or (self.max_steps == 0 and self.max_epochs < 1):
            sys.exit(
                f"--max_epochs {self.max_epochs} and --max_steps {self.max_steps}: give at least one epoch, or a number of updates"
            )
        self.windows_per_epoch = self.windows_per_epoch or math.ceil(
            self.n_rows / self.train_batch_size
        )

    @property
    def total_steps(self) -> int:
        """The horizon of the schedule: `max_steps`, else the windows of all epochs."""
        return self.max_steps or self.max_epochs * self.windows_per_epoch

    @property
    def finished(self) -> bool:
        """`max_steps` counts applied updates; an epoch run ends when its windows end."""
        return (
            self.global_step >= self.max_steps
            if self.max_steps
            else self.windows_seen >= self.max_epochs * self.windows_per_epoch
        )

    def window_done(self, applied: bool, samples: int, tokens: int) -> None:
        """Counts one window; what a skipped one held was not trained on."""
        self.windows_seen += 1
        self.global_step += applied
        self.skipped_steps += not applied
        self.samples += samples * applied
        self.tokens += tokens * applied
        self.skips_in_a_row = 0 if applied else self.skips_in_a_row + 1
        self.recent_skips = [
            w
            for w in self.recent_skips + [self.windows_seen] * (not applied)
            if w > self.windows_seen - 50
        ]

    def due(self, interval: float) -> bool:
        """Whether to evaluate or save now: after an update at a multiple of the interval, and at the end (once, also where its last
        window was skipped). An interval below 1 is a share of all updates; 0 is the end only."""
        every = math.ceil(interval * self.total_steps) if 0 < interval < 1 else int(interval)
        multiple = every > 0 and self.global_step % every == 0
        return (
            (multiple or self.finished)
            if self.skips_in_a_row == 0
            else (self.finished and not multiple)
        )

    def log_due(self, interval: float) -> bool:
        """Whether to log now: after the first update, too."""
        return (self.global_step == 1 and self.skips_in_a_row == 0) or self.due(interval)

    def describe(self) -> str:
        each = f"{self.windows_per_epoch} updates an epoch, the last of {(self.n_rows - 1) % self.train_batch_size + 1} samples"
        return f"{self.n_rows} samples / train_batch_size {self.train_batch_size} = {each}; {self.total_steps} updates in all"


def check_intervals(args) -> None:
    """Refuses an interval that is neither a number of updates nor a share of them, and answers of no token."""
    for name in ("logging_steps", "eval_steps", "save_steps", "save_actor_steps"):
        if (value := getattr(args, name)) < 0 or (value >= 1 and value != int(value)):
            sys.exit(
                f"--{name} {value}: expected 0 (never), a share below 1, or a whole number of updates"
            )
    if getattr(args, "max_new_tokens", 1) < 1:
        sys.exit(f"--max_new_tokens {args.max_new_tokens}: expected at least 1")
