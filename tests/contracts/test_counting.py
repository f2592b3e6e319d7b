"""Steps, log lines and micro-batches are counted as docs/words.md says."""

import math
import types

import numpy as np
import pytest

from common import arguments, batches, optim
from common.progress import Progress, PromptProgress
from runs import refuses


def steps_logged(progress: Progress, interval: float) -> list[int]:
    """Where a run without skips logs."""
    logged = []
    while not progress.finished:
        progress.update_done(True, 1, 1)
        if progress.due(interval, first=True):
            logged.append(progress.global_step)
    return logged


@pytest.mark.parametrize("interval, every", [(1, 1), (7, 7), (0.1, 32), (50, 50), (1000, 1000)])
def test_log_lines_stand_at_the_first_the_multiples_and_the_last(interval, every):
    progress = Progress(60_000, 192, max_epochs=1, max_steps=0)
    expected = sorted({1, 313} | set(range(every, 314, every)))
    assert steps_logged(progress, interval) == expected


@pytest.mark.parametrize("share, of_100", [(0.07, 7), (0.29, 29), (0.56, 56), (0.071, 8)])
def test_a_share_of_updates_is_rounded_up_only_if_it_is_no_whole_number(share, of_100):
    """0.07 * 100 is 7.000000000000001."""
    progress = Progress(100, 1, max_epochs=1, max_steps=0)
    assert steps_logged(progress, share)[1] == of_100
    args = types.SimpleNamespace(warmup_steps=share, lr_scheduler_type="linear")
    assert optim.warmup_updates(args, 100) == of_100


def test_a_rollout_without_updates_is_not_logged_as_the_first_update_again():
    """Its rewards are in the line of the next update."""
    progress = Progress(100, 10, 1, 0)
    progress.update_done(True, 10, 1)
    due = []
    for progress.last_was_applied in (True, False):
        due.append((progress.due(1, first=True), progress.due(50, first=True)))
    assert due == [(True, True), (False, False)]


def test_an_epoch_ends_with_its_data_and_max_steps_counts_applied_updates():
    assert Progress(60_000, 200, 1, 0).total_steps == 300  # which divides
    by_epochs, by_steps = Progress(100, 16, 2, 0), Progress(100, 16, 1, 10)
    assert (by_epochs.updates_per_epoch, by_epochs.total_steps, by_steps.total_steps) == (7, 14, 10)
    for progress, seen in ((by_epochs, 14), (by_steps, 12)):
        for index in range(100):
            if progress.finished:
                break
            progress.update_done(applied=index not in (3, 5), n_samples=16, n_tokens=100)
        step = seen - 2
        assert (progress.updates_seen, progress.skipped_steps) == (seen, 2)
        assert progress.global_step == step
        assert (progress.n_samples, progress.n_tokens) == (16 * step, 100 * step)
    assert by_epochs.updates_seen == 2 * by_epochs.updates_per_epoch
    for done in (60, 100):  # all prompts are taken: before and after the last rollout's updates
        prompts = PromptProgress(prompts_taken=100, prompts_done=done, prompts_at_last_update=100)
        assert Progress(100, 16, 1, 0, prompt_progress=prompts).finished == (done == 100)
    for epochs, steps in ((1, 0), (9, 5)):  # resumed with a nearer end than before
        assert Progress(100, 16, epochs, steps, global_step=6, skipped_steps=2).finished


def test_the_end_is_evaluated_once_whether_or_not_its_update_is_skipped():
    for skipped, interval, expected in [
        ({4}, 0, [4]),
        ({4}, 2, [2, 4]),
        ({4}, 3, [3, 4]),
        (set(), 2, [2, 4, 5]),
        ({1}, 2, [2, 4]),
    ]:
        progress, due = Progress(5, 1, 1, 0), []
        for index in range(5):
            progress.update_done(index not in skipped, 1, 1)
            due += [progress.global_step] * progress.due(interval)
        assert due == expected, (skipped, interval)


def sizes_of(train: int, size: int | None, tokens: int = 0) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        train_batch_size=train, micro_train_batch_size=size, micro_train_tokens=tokens
    )


@pytest.mark.parametrize(
    "given, on_gpu, processes, expected",
    [  # samples of an update, samples and tokens of a micro-batch; these two, and how many there are
        ((64, None, 0), False, 2, (4, 0, 8)),
        ((64, None, 0), True, 2, (4, 16_384, 32)),
        ((64, 4, 0), True, 2, (4, 0, 8)),
        ((64, 1, 0), False, 2, (1, 0, 32)),
        ((64, None, 500), True, 2, (4, 500, 32)),
        ((64, 2, 500), True, 2, (2, 500, 32)),
        # A size that is not given follows the update.
        ((64, None, 0), False, 1, (4, 0, 16)),
        ((2, None, 0), False, 1, (2, 0, 1)),
        ((2, None, 0), False, 2, (1, 0, 1)),
        ((6, None, 0), False, 1, (3, 0, 2)),
        ((5, None, 0), False, 1, (5, 0, 1)),
        ((7, None, 0), False, 1, (1, 0, 7)),
    ],
)
def test_micro_batches_are_cut_by_tokens_on_a_gpu_where_no_size_is_given(
    given, on_gpu, processes, expected
):
    args = sizes_of(*given)
    steps = arguments.accumulation_steps(args, on_gpu, processes)
    assert (args.micro_train_batch_size, args.micro_train_tokens, steps) == expected


@pytest.mark.parametrize(
    "train, micro, valid",
    [(4, None, "8"), (12, None, "8 or 16"), (100, None, "96 or 104"), (100, 3, "96 or 120")],
)
def test_a_size_that_does_not_divide_is_refused_with_the_nearest_that_do(train, micro, valid):
    call = lambda: arguments.accumulation_steps(sizes_of(train, micro), False, 8)
    refuses(f"{micro or 1} x 8 processes", f"Nearest valid sizes: {valid}.", call=call)


@pytest.mark.parametrize("most", [9, 14, 30, 100])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_micro_batches_are_as_few_and_as_even_as_can_be(most, processes):
    """The limit is that of a search one by one."""
    lengths = [9, 7, 7, 4, 3, 1, 1]
    starts = [batches.starts_by_tokens(lengths, limit) for limit in range(most + 1)]
    wanted = math.ceil(len(starts[most]) / processes) * processes
    expected = next(found for found in starts if len(found) <= wanted)
    parts = batches.split_by_tokens(np.arange(7), np.array(lengths), most, processes)
    assert len(parts) == wanted
    assert [part[0] for part in parts if len(part)] == expected
