"""Steps and log lines; accumulation changes nothing, and a skipped update leaves no trace."""

import types

import pytest
import yaml

from common import arguments, batches, optim
from common.progress import Progress
from runs import (
    launch,
    recipe,
    refuses,
    tiny_llama,
    training_lines,
    write_jsonl,
)


def steps_logged(progress: Progress, interval: float) -> list[int]:
    """Where a run without skips logs."""
    logged = []
    while not progress.finished:
        progress.update_done(True, 1, 1)
        if progress.log_due(interval):
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
    assert optim.warmup_updates(share, 100) == of_100


def test_a_rollout_without_updates_is_not_logged_as_the_first_update_again():
    """Its rewards are in the line of the next update."""
    progress = Progress(100, 10, 1, 0)
    progress.update_done(True, 10, 1)
    due = []
    for progress.idle in (False, True):
        due.append((progress.log_due(1), progress.log_due(50)))
    assert due == [(True, True), (False, False)]


def test_an_epoch_ends_with_its_data_and_max_steps_counts_applied_updates():
    by_epochs, by_steps = Progress(100, 16, 2, 0), Progress(100, 16, 1, 10)
    assert (by_epochs.updates_per_epoch, by_epochs.total_steps, by_steps.total_steps) == (7, 14, 10)
    for progress, seen in ((by_epochs, 14), (by_steps, 12)):
        for index in range(100):
            if progress.finished:
                break
            progress.update_done(applied=index not in (3, 5), samples=16, tokens=100)
        assert (progress.updates_seen, progress.skipped_steps, progress.global_step) == (
            seen,
            2,
            seen - 2,
        )
        assert (progress.samples, progress.tokens) == (
            16 * progress.global_step,
            100 * progress.global_step,
        )
    assert by_epochs.updates_seen == 2 * by_epochs.updates_per_epoch


@pytest.mark.parametrize("epochs, steps", [(1, 0), (9, 5)])
def test_a_run_resumed_beyond_a_nearer_end_is_finished(epochs, steps):
    """As with a smaller --max_epochs or --max_steps than before."""
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
            due += [progress.global_step] * progress.evaluation_due(interval)
            saves = progress.save_due(interval)
            assert saves == (interval > 0 and progress.evaluation_due(interval))
        assert due == expected, (skipped, interval)


@pytest.mark.parametrize(
    "given, on_gpu, expected, is_said",
    [  # samples and tokens of a micro-batch
        ((None, 0), False, (4, 0), False),
        ((None, 0), True, (4, 16_384), True),
        ((4, 0), True, (4, 0), False),
        ((1, 0), False, (1, 0), False),
        ((None, 500), True, (4, 500), False),
        ((2, 500), True, (2, 500), False),
    ],
)
def test_micro_batches_are_cut_by_tokens_on_a_gpu_where_no_size_is_given(
    given, on_gpu, expected, is_said
):
    args = types.SimpleNamespace(
        train_batch_size=64, micro_train_batch_size=given[0], micro_train_tokens=given[1]
    )
    said = arguments.fill_in_micro_batches(args, on_gpu, 2)
    assert (args.micro_train_batch_size, args.micro_train_tokens) == expected
    assert bool(said) == is_said
    assert not said or ("16384 tokens" in said and "--micro_train_tokens" in said)


@pytest.mark.parametrize(
    "train, processes, size",
    [(64, 1, 4), (64, 2, 4), (2, 1, 2), (2, 2, 1), (6, 1, 3), (5, 1, 5), (7, 1, 1), (6, 4, 4)],
)
def test_a_micro_size_that_is_not_given_follows_the_update(train, processes, size):
    """`--train_batch_size 2` alone was refused. Where nothing divides, the refusal stays."""
    args = types.SimpleNamespace(
        train_batch_size=train, micro_train_batch_size=None, micro_train_tokens=0
    )
    arguments.fill_in_micro_batches(args, False, processes)
    assert args.micro_train_batch_size == size
    if train % processes:
        refuses("4 x 4", call=lambda: arguments.accumulation_steps(train, size, processes))
    else:
        assert arguments.accumulation_steps(train, size, processes) == train // size // processes


def test_a_run_without_sizes_on_a_pretended_gpu(tmp_path):
    """The launcher is told of a GPU, and all else is as without one. The run records what it took."""
    rows = [{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "a"}]}]
    script = tmp_path / "pretend.py"
    script.write_text(
        "import runpy, sys\n"
        "from common import launch\n"
        "read, on_cpu = launch.read_environment, sys.argv[1] == 'cpu'\n"
        "launch.read_environment = lambda: read()._replace(on_cpu=on_cpu)\n"
        f"sys.argv = [{str(recipe('sft'))!r}, *sys.argv[2:]]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    flags = [
        "--model_name_or_path", tiny_llama(tmp_path / "model"), "--max_steps", 1, "--report_to", "none",
        "--dataset_name", write_jsonl(tmp_path / "rows.jsonl", rows * 40), "--train_batch_size", 40,
    ]  # fmt: skip
    result = launch([], script, "gpu", *flags, "--output_dir", tmp_path / "gpu")
    assert "micro-batches hold up to 16384 tokens, since this runs on a GPU" in result.stdout
    assert "train_batch_size 40 in micro-batches of up to 16384 tokens" in result.stdout
    recorded = yaml.safe_load((tmp_path / "gpu/run.yaml").read_text())
    assert recorded["micro_train_tokens"] == 16_384
    result = launch([], script, "cpu", *flags, "--output_dir", tmp_path / "cpu")
    assert "train_batch_size 40 = micro_train_batch_size 4 x 1 process x 10" in result.stdout
    (on_gpu,), (on_cpu,) = training_lines(tmp_path / "gpu"), training_lines(tmp_path / "cpu")
    assert on_gpu["loss"] == pytest.approx(on_cpu["loss"], abs=1e-6)


def test_the_smallest_limit_is_that_of_a_search_one_by_one():
    lengths = [9, 7, 7, 4, 3, 1, 1]
    for most in (9, 14, 30, 100):
        fewest = len(batches.starts_by_tokens(lengths, most))
        for wanted in range(fewest, 9):
            counts = [len(batches.starts_by_tokens(lengths, limit)) for limit in range(most + 1)]
            expected = next(limit for limit, count in enumerate(counts) if count <= wanted)
            assert batches.smallest_limit(lengths, wanted, most) == expected, (most, wanted)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("counting")
    tiny_llama(
        folder / "model",
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    pairs = [
        {"prompt": str(n), "chosen": str(n % 7), "rejected": f"{n % 7}b"} for n in range(600)
    ]  # texts: no template to write
    write_jsonl(folder / "600.jsonl", pairs)
    say = lambda role, text: [{"role": role, "content": text}]
    texts = (("x" * (i % 23 + 1), "y" * (i * 7 % 19 + 1), f"{i % 7}b") for i in range(100))
    uneven = [  # no two updates have like means
        {
            "prompt": say("user", one),
            "chosen": say("assistant", two),
            "rejected": say("assistant", three),
        }
        for one, two, three in texts
    ]
    write_jsonl(folder / "100.jsonl", uneven)
    return folder


def flags(inputs, rows, output, *more):
    return ["--model_name_or_path", inputs / "model", "--dataset_name", inputs / f"{rows}.jsonl", "--output_dir", output,
            "--max_length", 64, "--learning_rate", 1e-3, "--report_to", "none", *more]  # fmt: skip


@pytest.mark.parametrize("batch, micro, updates, last", [(192, 6, 313, 96), (200, 5, 300, 200)])
def test_sixty_thousand_pairs(batch, micro, updates, last):
    """What a run does with these numbers, without its model."""
    progress, sizes = Progress(60_000, batch, max_epochs=1, max_steps=0), []
    while not progress.finished:
        sizes.append(len(batches.rows_of_update(60_000, batch, 0, progress.updates_seen)))
        progress.update_done(True, sizes[-1], 1)
        assert progress.log_due(1)
    assert sizes == [batch] * (updates - 1) + [last]
    assert progress.updates_per_epoch == progress.total_steps == progress.global_step == updates
    assert progress.samples == 60_000
    assert arguments.accumulation_steps(batch, micro, 1) == {192: 32, 200: 40}[batch]


def test_accumulation_changes_no_number(inputs):
    runs = {}
    for micro in (16, 2):
        runs[micro] = inputs / f"accumulate-{micro}"
        launch(
            [],
            recipe("dpo"),
            *flags(inputs, 100, runs[micro]),
            "--train_batch_size",
            16,
            "--micro_train_batch_size",
            micro,
        )
    one, eight = (training_lines(run) for run in runs.values())
    assert len(one) == len(eight) == 7
    for a, b in zip(one, eight):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6) and a["grad_norm"] == pytest.approx(
            b["grad_norm"], rel=1e-5
        )
        assert (a["samples"], a["tokens"], a["learning_rate"]) == (
            b["samples"],
            b["tokens"],
            b["learning_rate"],
        )
    assert [line["learning_rate"] for line in one] == pytest.approx(
        [0, *(1e-3 * (7 - step) / 6 for step in range(1, 7))]
    )
