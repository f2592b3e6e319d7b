"""Every logged number is the exact mean over all samples or tokens of all processes.

It is compared with one pair at a time in plain transformers.
"""

import json
import math
import runpy
import shutil
import time
import types

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import batches
from common.metrics import Means
from common.mixture import mixture_of
from common.run import Run, Update
from common.speed import PEAK_FLOPS
from runs import (
    LAUNCHERS,
    REPOSITORY,
    evaluation_lines,
    launch,
    lines,
    recipe,
    tiny_llama,
    training_lines,
    write_jsonl,
)

BETA, EVERY, BATCH = 0.3, 3, 8
EIGHT = [
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("metrics")
    tiny_llama(folder / "model")
    tiny_llama(folder / "reference", initializer_range=0.2)
    text = lambda n, salt: "".join(
        chr(97 + (n * 5 + salt * 7 + i * i) % 26) for i in range(1 + (n * 13 + salt * 5) % 30)
    )
    say = lambda role, content: [{"role": role, "content": content}]
    rows = [
        {
            "prompt": say("user", text(n, 1)),
            "chosen": say("assistant", text(n, 2)),
            "rejected": say("assistant", text(n, 3)),
        }
        for n in range(34)
    ]
    shutil.copytree(folder / "model", folder / "dropping")
    config = json.loads((folder / "model/config.json").read_text())
    (folder / "dropping/config.json").write_text(
        json.dumps({**config, "attention_dropout": 0.2})
    )  # DPO must switch it off
    write_jsonl(
        folder / "train.jsonl", rows[:33]
    )  # updates of 8, 8, 8, 8, 1: in the last one of two processes has no row
    write_jsonl(folder / "eval.jsonl", rows[33:])  # 1 row for 2 processes
    return folder


def run(inputs, name, launcher, *more):
    output = inputs / "-".join([name, launcher, *map(str, more)]).replace("/", "_")
    model = inputs / ("dropping" if name == "dpo" else "model")
    flags = ["--model_name_or_path", model, "--dataset_name", inputs / "train.jsonl", "--eval_dataset_name", inputs / "eval.jsonl",
             "--output_dir", output, "--learning_rate", 0, "--train_batch_size", BATCH, "--micro_train_batch_size", 2, "--logging_steps", EVERY,
             "--report_to", "none", "--max_length", 128]  # fmt: skip
    if name == "dpo":
        flags += ["--beta", BETA, "--ref_model_name_or_path", inputs / "reference"]
    else:
        flags += ["--columns", "completion=chosen"]
    (output.parent / f"{output.name}.console").write_text(
        launch(LAUNCHERS[launcher], recipe(name), *flags, *more).stdout
    )
    return output


def score(model, tokenizer, row, answer):
    """log-probs, logits' means and hits of an answer's tokens, one row, no padding: `[tokens]` each; and all its tokens' number."""
    prompt = tokenizer.apply_chat_template(
        row["prompt"], add_generation_prompt=True, tokenize=False
    )
    full = tokenizer.apply_chat_template(row["prompt"] + row[answer], tokenize=False)
    ids, start = tokenizer(full, return_tensors="pt").input_ids, len(tokenizer(prompt).input_ids)
    with torch.no_grad():
        logits = model(ids).logits[0, start - 1 : -1].double()
    target = ids[0, start:]
    return (
        logits.log_softmax(-1).gather(1, target[:, None])[:, 0],
        logits.mean(-1),
        (logits.argmax(-1) == target).double(),
        ids.shape[1],
    )


@pytest.fixture(scope="module")
def brute_force(inputs):
    """Per-pair values of both files, and the tokens' logits."""
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    model, reference = (
        AutoModelForCausalLM.from_pretrained(inputs / name).eval()
        for name in ("model", "reference")
    )
    result = {}
    for name in ("train", "eval"):
        pairs = []
        for row in map(json.loads, (inputs / f"{name}.jsonl").read_text().splitlines()):
            pair = {}
            for answer in ("chosen", "rejected"):
                logps, means, hits, tokens = score(model, tokenizer, row, answer)
                pair[f"logps/{answer}"] = logps.sum().item()
                pair[f"rewards/{answer}"] = (
                    BETA * (logps.sum() - score(reference, tokenizer, row, answer)[0].sum()).item()
                )
                pair[f"tokens/{answer}"], pair[f"logits/{answer}"] = tokens, means.tolist()
                pair[f"nll/{answer}"], pair[f"hits/{answer}"] = (-logps).tolist(), hits.tolist()
            pair["rewards/margins"] = pair["rewards/chosen"] - pair["rewards/rejected"]
            pair["rewards/accuracies"] = float(pair["rewards/margins"] > 0)
            pair["loss"] = math.log1p(math.exp(-pair["rewards/margins"]))
            pairs.append(pair)
        result[name] = pairs
    return result


def mean(values):
    return sum(values) / len(values)


def expect_dpo(pairs):
    tokens = {
        f"logits/{answer}": mean([v for p in pairs for v in p[f"logits/{answer}"]])
        for answer in ("chosen", "rejected")
    }
    return {key: mean([p[key] for p in pairs]) for key in [*EIGHT, "loss"]} | tokens


def log_intervals():
    """The rows of the updates of each training line: 1; 2, 3; 4, 5."""
    rows = [batches.rows_of_update(33, BATCH, 0, index).tolist() for index in range(5)]
    return [rows[0], rows[1] + rows[2], rows[3] + rows[4]]


def assert_line(line, expected, prefix=""):
    for key, value in expected.items():
        assert line[prefix + key] == pytest.approx(value, rel=2e-5, abs=2e-5), key


@pytest.mark.parametrize("launcher, more", [("plain", []), ("ddp", ["--precompute_ref_log_probs"])])
def test_the_eight_metrics_of_dpo(inputs, brute_force, launcher, more):
    output = run(inputs, "dpo", launcher, *more)
    lines = training_lines(output)
    assert [line["global_step"] for line in lines] == [1, 3, 5]
    seen = 0
    for line, rows in zip(lines, log_intervals(), strict=True):
        pairs = [brute_force["train"][row] for row in rows]
        assert_line(line, expect_dpo(pairs))
        seen += sum(pair["tokens/chosen"] + pair["tokens/rejected"] for pair in pairs)
        assert line["tokens"] == seen
    for line in evaluation_lines(output):
        assert_line(line, expect_dpo(brute_force["eval"]), "eval/")
    assert [line["global_step"] for line in evaluation_lines(output)] == [0, 5]


@pytest.mark.parametrize("launcher", ["plain", "ddp"])
def test_the_token_means_of_sft(inputs, brute_force, launcher):
    output = run(inputs, "sft", launcher)
    expect = lambda pairs: {
        "loss": mean([v for p in pairs for v in p["nll/chosen"]]),
        "mean_token_accuracy": mean([v for p in pairs for v in p["hits/chosen"]]),
    }
    seen = 0
    for line, rows in zip(training_lines(output), log_intervals(), strict=True):
        pairs = [brute_force["train"][row] for row in rows]
        assert_line(line, expect(pairs))
        seen += sum(pair["tokens/chosen"] for pair in pairs)
        assert line["tokens"] == seen
    for line in evaluation_lines(output):
        assert_line(line, expect(brute_force["eval"]), "eval/")


def test_equal_rewards_are_no_success():
    """The policy as it starts ranks no pair right: an accuracy counts what is strictly above."""
    module = runpy.run_path(str(recipe("dpo")))
    logps = -torch.rand(4, 5)  # two pairs of answers of 5 tokens
    output = {"logps": logps, "mean_logits": logps}
    # The second pair's chosen answer is above its reference's.
    ref_logps = logps.sum(1) - torch.tensor([0.0, 0.5, 0.0, 0.0])
    batch = {"mask": torch.ones(4, 5, dtype=torch.bool), "ref_logps": ref_logps}
    args = module["Args"](beta=BETA)
    _, values = module["pair_losses"](lambda batch, extras: output, object(), batch, args)
    assert values["rewards/accuracies"].tolist() == [0.0, 1.0]


def run_without_bar(folder, report_to=("none",), **given) -> tuple[Run, Means]:
    """A run of 8 samples an update on one process, with means for its lines."""
    accelerator = types.SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        is_main_process=True,
        optimizer_step_was_skipped=False,
        gather=lambda table: table,
        reduce=lambda number, reduction: number,
        log=lambda values, step: None,
        state=types.SimpleNamespace(deepspeed_plugin=None),
    )
    settings = dict(train_batch_size=8, max_epochs=1, max_steps=0)
    args = types.SimpleNamespace(output_dir=folder, report_to=report_to, **settings, **given)
    mixture = mixture_of(64)
    run = Run(accelerator, args, mixture, flop=(6e9, 2e9), bar_metric="loss", charts={})
    run.logger.bar = types.SimpleNamespace(
        update=lambda: None, set_postfix=lambda *args, **kwargs: None
    )
    return run, Means(accelerator)


def update_of(n_tokens: int) -> Update:
    return Update(range(8), [], divisor=1, n_sequences=0, n_tokens=n_tokens, loss_scale=None)


def add_losses(means: Means, loss: float = 1.0) -> None:
    means.add({"loss": torch.full((8,), loss)}, torch.ones(8))


@pytest.mark.parametrize(
    "kind, smoothing, expected",
    [
        ("sigmoid", 0.0, lambda right, wrong: right),
        ("sigmoid", 0.2, lambda right, wrong: 0.8 * right + 0.2 * wrong),
        ("robust", 0.2, lambda right, wrong: (0.8 * right - 0.2 * wrong) / 0.6),
        ("hinge", 0.0, lambda right, wrong: 1 - 0.3 * 2),
        ("ipo", 0.0, lambda right, wrong: (3 / 5 - 1 / 4 - 1 / 0.6) ** 2),
    ],
)
def test_the_preference_losses_of_a_pair(kind, smoothing, expected):
    """Of log-ratios 3 (5 tokens) and 1 (4 tokens) at beta 0.3."""
    preference_loss = runpy.run_path(str(recipe("dpo")))["preference_loss"]
    pair = [torch.tensor([number]) for number in (3.0, 1.0, 5.0, 4.0)]
    loss = preference_loss(*pair, 0.3, kind, smoothing).item()
    right = math.log1p(math.exp(-0.6))
    assert loss == pytest.approx(expected(right, right + 0.6), rel=1e-6)


@pytest.mark.parametrize(
    "gpu, share",
    [
        ("NVIDIA H200", 0.4),
        ("NVIDIA H100 NVL", 0.4 * 989 / 835),
        ("NVIDIA T400", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_the_share_of_the_gpu_that_is_used(tmp_path, monkeypatch, gpu, share):
    """6e9 operations a token and 2e9 a target, in a second; no number where the GPU's peak is not known."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**29)
    run, means = run_without_bar(tmp_path)
    # There is no GPU to hold the counts of one.
    run.accelerator.device = torch.device("cuda")
    run.speed.peak = PEAK_FLOPS.get(gpu)
    of_one = 989e12 * 0.4
    tokens = 50_000
    targets = [0] * int((of_one - 6e9 * tokens) / 2e9)
    padding = {"tokens": 10**9, "targets": targets}
    for applied in (False, True):  # what a skipped update computed does not count, like its tokens
        run.accelerator.optimizer_step_was_skipped = not applied
        add_losses(means)
        run.count_flop({"tokens": tokens, "targets": targets}, torch.ones(8))
        run.count_flop(padding, torch.zeros(1))
        assert run.count(update_of(10**6), 1.0) == applied
        means.close_update(applied, grad_norm=1.0, loss_scale=1.0)
    monkeypatch.setattr(time, "perf_counter", lambda: run.speed.since + 1.0)
    run.log(means.reduce())
    (line,) = training_lines(tmp_path)
    assert (
        line.get("perf/mfu") == (share and pytest.approx(share, rel=1e-4))
        and line["perf/peak_memory_gib"] == 1.5
    )


def test_the_operations_of_updates_on_two_processes(inputs, brute_force):
    """A shared prompt counts once, the padding row of the last update and the reference not at all."""
    output = inputs / "operations"
    launch(
        LAUNCHERS["ddp"], REPOSITORY / "tests/working.py", recipe("dpo"),
        "--model_name_or_path", inputs / "model", "--dataset_name", inputs / "train.jsonl", "--output_dir", output,
        "--train_batch_size", BATCH, "--micro_train_batch_size", 2, "--logging_steps", EVERY, "--max_length", 128,
        "--report_to", "none",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(inputs / "model")
    of_target = 6 * model.lm_head.weight.numel()
    of_token = 6 * sum(
        p.numel() for p in [*model.model.layers.parameters(), model.model.norm.weight]
    )
    for line, rows in zip(training_lines(output), log_intervals(), strict=True):
        pairs = [brute_force["train"][row] for row in rows]
        targets = sum(len(p[f"nll/{answer}"]) for p in pairs for answer in ("chosen", "rejected"))
        tokens = sum(p["tokens/chosen"] + p["tokens/rejected"] for p in pairs)
        prompts = sum(p["tokens/chosen"] - len(p["nll/chosen"]) for p in pairs)
        computed = tokens - prompts
        assert line["perf/flop"] == of_token * computed + of_target * targets


def test_the_seconds_and_the_rates_of_each_line(tmp_path, monkeypatch):
    """Two lines: 10 seconds of which 4 are paused, twice 1 second of data; then 5 seconds with none of either."""
    now = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    run, means = run_without_bar(tmp_path)

    def spend(seconds, name=None):
        if name is None:
            now[0] += seconds
            return
        with run.timed(name):
            now[0] += seconds

    def update():
        add_losses(means)
        means.close_update(run.count(update_of(120), 1.0), grad_norm=1.0)

    for seconds, name in ((1, "data"), (4, "paused"), (1, "data"), (4, None)):
        spend(seconds, name)
    update()
    run.log(means.reduce())
    spend(5)
    update()
    update()
    run.log(means.reduce())
    first, second = training_lines(tmp_path)
    assert first["perf/data_seconds"] == 2.0 and second["perf/data_seconds"] == 0.0
    assert first["perf/samples_per_second"] == 8 / 6 and first["perf/tokens_per_second"] == 20.0
    assert second["perf/samples_per_second"] == 16 / 5 and second["perf/tokens_per_second"] == 48.0
    assert not any("paused" in name for line in (first, second) for name in line)
    assert (first["epoch"], second["epoch"]) == (1 / 8, 3 / 8)


def test_what_rollouts_added_after_the_last_update_is_a_line_of_its_own(tmp_path):
    """They led to none, or the engine skipped all of theirs. Else no line would hold their rewards."""
    run, means = run_without_bar(tmp_path)
    means.add_rollout({"reward": torch.tensor([2.0, 0.0])})
    add_losses(means, 3.0)
    means.close_update(run.count(update_of(9), 1.0), grad_norm=1.0)
    run.log(means.reduce())
    means.add_rollout({"reward": torch.tensor([4.0, 0.0])})
    run.log(means.reduce())  # no update since the last line
    run.log(means.reduce())  # nothing is left
    first, last = lines(tmp_path)
    assert (first["loss"], first["reward"]) == (3.0, 1.0)
    assert last == {"global_step": 1, "epoch": 1 / 8, "reward": 2.0}


def test_sums_that_another_process_takes_over_leave_only_their_names(tmp_path):
    """Not a minimum, a maximum or a count: those of the values to come stay."""
    _, means = run_without_bar(tmp_path)
    before = {"mean": 9.0, "min": 2.0, "max": 4.0}
    sums = {name: [name, number, 3.0] for name, number in before.items()}
    means.open.load_state(sums, mine=False)
    values = torch.tensor([-3.0, -1.0, -7.0])
    means.add(
        {name: (values, torch.ones(3), name) for name in before}, torch.tensor([1.0, 1.0, 0.0])
    )
    assert means.reduce() == {"mean": -2.0, "min": -3.0, "max": -1.0}
