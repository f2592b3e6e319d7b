"""The losses of SimPO, ORPO, KTO, DFT and EAFT against plain arithmetic; KTO's KL, however split."""

import contextlib
import itertools
import math
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from common import batches
from common.batches import MicroBatch, Rows
from preference_recipes.models.logprobs import ChunkedHead, LogProbJob, scatter_to_answers
from preference_recipes.models.packing import Packer
from recipes import load
from runs import LAUNCHERS, launch, recipe, short_run, tiny_llama, training_lines, write_jsonl

DPO = load("dpo")
CHOSEN = [-0.7, -2.5, -0.01, -9.0]
REJECTED = [-1.1, -0.4, -0.02, -30.0]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def loss_of_pairs(kind, beta, gamma=0.0):
    averages = [torch.tensor(values, dtype=torch.float64) for values in (CHOSEN, REJECTED)]
    return DPO.reference_free_loss(*averages, beta=beta, loss_type=kind, gamma=gamma)


@pytest.mark.parametrize("gamma", [0.0, 1.4])
def test_simpo(gamma):
    expected = [
        -math.log(sigmoid(2.5 * (chosen - rejected) - gamma))
        for chosen, rejected in zip(CHOSEN, REJECTED)
    ]
    assert loss_of_pairs("simpo", 2.5, gamma).tolist() == pytest.approx(expected, abs=1e-12)


def test_orpo():
    expected = []
    for chosen, rejected in zip(CHOSEN, REJECTED):
        p, q = math.exp(chosen), math.exp(rejected)
        odds_ratio = (p / (1 - p)) / (q / (1 - q))
        expected.append(-chosen - 0.3 * math.log(sigmoid(math.log(odds_ratio))))
    assert loss_of_pairs("orpo", 0.3).tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("averages", [(-1e-6, -3.0), (0.0, -3.0), (-3.0, 0.0), (0.0, 0.0)])
def test_orpo_keeps_its_gradient_where_an_answer_is_almost_certain(averages):
    chosen, rejected = torch.tensor(averages, requires_grad=True)[:, None]
    of_pair = DPO.reference_free_loss(chosen, rejected, 0.1, "orpo", 0.0)
    gradients = torch.autograd.grad(of_pair.sum(), [chosen, rejected])
    assert all(torch.isfinite(found).all() for found in [of_pair, *gradients])


# ============================================================ DFT and EAFT
SFT = load("sft")


@pytest.mark.parametrize("kind", ["nll", "dft", "eaft"])
def test_weights_of_tokens_are_constants(kind):
    """EAFT's as in LLaMA-Factory: the entropy of the 20 largest logits, over 3."""
    torch.manual_seed(0)
    hidden = 4 * torch.eye(7, 60)
    weight = torch.randn(60, 60, requires_grad=True)
    targets = torch.randint(60, (7,))

    def model(batch, extra_outputs):
        found = ChunkedHead.apply(
            hidden, weight, None, LogProbJob(targets, extra_outputs=extra_outputs)
        )
        return dict(zip(("logps", *extra_outputs), found))

    losses, values = SFT.token_losses(model, {"loss_mask": torch.ones(7, dtype=torch.bool)}, kind)
    assert values["loss"][0] is losses
    gradient = torch.autograd.grad(losses.sum(), weight)[0]

    logits = hidden @ weight.T
    weights = torch.ones(7)
    if kind == "dft":
        weights = logits.softmax(1).gather(1, targets[:, None])[:, 0]
    if kind == "eaft":
        top = logits.sort(descending=True).values[:, :20].softmax(1)
        weights = torch.special.entr(top).sum(1) / 3
        assert 0.03 < weights.min() < weights.max() < 1
    expected = weights.detach() * F.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    logits_of_weight, *_ = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(gradient[:, :7], 4 * logits_of_weight.T, rtol=1e-5, atol=1e-6)


# ============================================================ KTO
KTO = load("kto")
RATIOS = [0.7, -2.5, 0.01, -9.0, 4.0]
IS_GOOD = [True, False, False, True, False]
KTO_TAGS = ("loss", "kl", "grad_norm", "logps/chosen", "logps/rejected")


@pytest.mark.parametrize("kl", [0.0, 1.7])
def test_kto(kl):
    expected = []
    for ratio, is_good in zip(RATIOS, IS_GOOD):
        beyond = ratio - kl if is_good else kl - ratio
        weight = 1.5 if is_good else 0.25
        expected.append(weight * (1 - 1 / (1 + math.exp(-0.3 * beyond))))
    args = SimpleNamespace(beta=0.3, desirable_weight=1.5, undesirable_weight=0.25)
    ratios = torch.tensor(RATIOS, dtype=torch.float64)
    found = KTO.kto_loss(ratios, torch.tensor(IS_GOOD), kl, args)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


# ============================================================ the KL
# Answers of rows: good, bad, or a pair.
ROWS = [
    dict(prompt_ids=[1, 2], chosen_ids=[3, 4, 5], rejected_ids=[]),
    dict(prompt_ids=[6], chosen_ids=[7], rejected_ids=[8, 9]),
    dict(prompt_ids=[10, 11, 12], chosen_ids=[], rejected_ids=[13]),
    dict(prompt_ids=[14], chosen_ids=[15, 16], rejected_ids=[17]),
    dict(prompt_ids=[18], chosen_ids=[19], rejected_ids=[]),
]
LONGEST = 5


class Pretended(torch.nn.Module):
    """Its log-prob of a token depends on that token and on the one before."""

    def forward(self, batch):
        self.sizes.append(batch["inputs"]["input_ids"].numel())
        before = batch["inputs"]["input_ids"].flatten()[batch["predictor_index"]].double()
        logps = torch.sin(before * 31 + batch["targets"]) * self.scale
        return {"logps": scatter_to_answers(logps, batch)}


def data(given: list[dict]) -> Rows:
    """A data set of rows whose answers are learned whole."""
    rows = []
    for number, row in enumerate(given, 1):
        learned = {
            f"{kind}_loss_mask": [True] * len(row[f"{kind}_ids"]) for kind in ("chosen", "rejected")
        }
        length = sum(map(len, row.values()))
        rows.append({**row, **learned, "length": length, "row": number})
    return Rows(datasets.Dataset.from_list(rows))


def estimate(scale: float, split, rows: list[int], given=ROWS, longest=LONGEST):
    """The KL of some rows, cut by `split`, and the padded tokens of each micro-batch."""
    accelerator = SimpleNamespace(device="cpu", gather=lambda values: values)
    args = SimpleNamespace(max_length=longest)
    run = SimpleNamespace(accelerator=accelerator, split=split, args=args)
    model = Pretended()
    model.scale, model.sizes = scale, []
    reference = SimpleNamespace(
        logps=lambda batch: torch.zeros_like(batch["loss_mask"], dtype=float)
    )
    packer = Packer(torch.device("cpu"))
    kl = KTO.estimate_kl(run, model, reference, packer, data(given), np.array(rows))
    return kl, model.sizes


def by_hand(rows: list[int]) -> float:
    """The mean log-prob of each row's answers after the prompt of the row before."""
    found = []
    for row, next_row in zip(rows, [*rows[1:], rows[0]]):
        prompt = ROWS[row]["prompt_ids"]
        for name in ("chosen_ids", "rejected_ids"):
            answer = ROWS[next_row][name][: LONGEST - len(prompt)]
            ids = prompt[-1:] + answer
            if answer:
                found.append(sum(math.sin(a * 31 + b) for a, b in itertools.pairwise(ids)))
    return sum(found) / len(found)


@pytest.mark.parametrize("sizes", [[5], [2, 3], [1, 1, 2, 1]])
def test_kl_is_the_mean_over_all_answers_however_they_are_split(sizes):
    """With a padding row at the end. One answer is cut after the longer prompt that it gets."""

    def split(places, lengths):
        ends = np.cumsum(sizes)
        parts = [list(places[end - size : end]) for size, end in zip(sizes, ends)]
        padding = MicroBatch([places[0]], torch.zeros(1))
        return [MicroBatch(part, torch.ones(len(part))) for part in parts] + [padding]

    rows = [3, 1, 4, 2, 0]
    mean = by_hand(rows)
    scale = math.copysign(1.0, mean)
    assert estimate(scale, split, rows)[0] == pytest.approx(abs(mean), abs=1e-12)
    assert estimate(-scale, split, rows)[0] == 0.0  # clamped


def test_micro_batches_of_the_kl_hold_the_tokens_that_are_asked_for():
    """Short rows, each read with the long answer of the next one."""
    one_process = SimpleNamespace(num_processes=1, process_index=0)
    row = dict(prompt_ids=[1], rejected_ids=[])
    given = [{**row, "chosen_ids": [2] * length} for length in [1, 30] * 8]

    def split(places, lengths):
        return batches.split(one_process, places, lengths, 4, max_tokens=70)

    _, sizes = estimate(1.0, split, range(16), given, longest=100)
    assert sizes == [62] * 8


def test_an_evaluation_shuffles_its_rows_for_the_kl_each_time_alike(monkeypatch):
    """In a file the next row may answer the same prompt."""
    orders = []
    monkeypatch.setattr(KTO, "estimate_kl", lambda *given: orders.append(given[-1].tolist()))
    run = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", gather=lambda values: values),
        args=SimpleNamespace(seed=3),
        timed=lambda name: contextlib.nullcontext(),
        recorder=lambda source: None,
        split=lambda rows, lengths: [],
        log_evaluation=lambda line, examples: None,
    )
    for _ in range(2):
        KTO.evaluate(run, Pretended(), None, None, None, {"eval/": data(ROWS)})
    assert orders == [np.random.default_rng([3, 0]).permutation(5).tolist()] * 2


def test_a_pair_weighs_as_its_two_answers_do(tmp_path):
    """The first update, whose KL is 0, of pairs and single answers together; DDP splits them."""
    tiny_llama(tmp_path / "model")
    say = lambda number: "answer" * (number % 3 + 1) + str(number)
    single = [{"prompt": f"{n}?", "completion": say(n), "label": n % 3 == 0} for n in range(6)]
    pairs = [{"prompt": f"{n}!", "chosen": say(n), "rejected": say(n + 1)} for n in range(4)]
    alone = [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for pair in pairs
        for name in ("chosen", "rejected")
    ]
    found = []
    for launcher, rows in (
        ([], single + alone),
        ([], single + pairs),
        (LAUNCHERS["ddp"], single + pairs),
    ):
        output = tmp_path / f"run{len(found)}"
        write_jsonl(tmp_path / f"{output.name}.jsonl", rows)
        sizes = dict(train_batch_size=len(rows), micro_train_batch_size=1, max_steps=1)
        flags = short_run(tmp_path, output.name, output, **sizes, desirable_weight=1.5)
        launch(launcher, recipe("kto"), *flags)
        [line] = training_lines(output)
        found.append({tag: line[tag] for tag in KTO_TAGS})
    assert found[0]["grad_norm"] > 0
    for others in found[1:]:
        assert others == pytest.approx(found[0], rel=1e-5, abs=1e-6)
