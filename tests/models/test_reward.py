"""The reward model by value: a whole run against a plain loop, and the folder that it saves.

Scores of all architectures, alone and packed, are in test_architectures.py.
"""

import json
import math
import sys

import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

import runs
from common.shared_args import SharedArgs
from plain_loop import Row, expect_lines, expect_weights, means, train
from preference_recipes.models import scores
from recipes import load as load_recipe

# ---------------------------------------------------------------------------------------------- loading


def pads_with_eos(*special: str, **changes):
    """Returns a tokenizer whose pad token is its EOS `<e>`, with further special tokens."""
    backend = Tokenizer(WordLevel({"<e>": 0, "<u>": 1, "word": 2}, unk_token="<u>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<e>", pad_token="<e>", name_or_path="tiny", **changes
    )
    tokenizer.add_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.chat_template = "{{ '<role>' }}"
    return tokenizer


@pytest.mark.parametrize(
    ("special", "changes", "given", "expected"),
    [
        (["<role>", "<spare>", "<right_pad>"], {}, None, "<right_pad>"),
        (["<role>", "<spare>", "<other>"], {}, None, "<spare>"),
        (["<role>"], {"unk_token": "<u>"}, None, "<u>"),
        (["<spare>"], {}, "word", "word"),
    ],
    ids=["named so", "unused", "for unknown text", "given"],
)
def test_a_pad_token_that_is_not_the_eos(special, changes, given, expected):
    tokenizer = pads_with_eos(*special, **changes)
    size = len(tokenizer)
    scores.separate_pad(tokenizer, given)
    assert (tokenizer.pad_token, tokenizer.eos_token, len(tokenizer)) == (expected, "<e>", size)


def test_models_that_cannot_score(tmp_path, tokenizer):
    score_model = lambda path, **settings: scores.score_model(
        str(path), tokenizer, SharedArgs(), **settings
    )
    tiny = runs.tiny_llama(tmp_path / "tiny")
    runs.refuses(
        tiny, "score.weight", "recipes/reward.py", call=lambda: score_model(tiny, frozen=True)
    )
    other = runs.tiny_llama(tmp_path / "other", vocab_size=300)
    changed = AutoTokenizer.from_pretrained(other)
    changed.add_tokens(["more"])
    changed.save_pretrained(other)
    runs.refuses(other, "another tokenizer", call=lambda: score_model(other))


# ---------------------------------------------------------------------------------------------- whole runs

SETTINGS = dict(
    seed=3,
    train_batch_size=8,
    micro_train_batch_size=2,
    max_epochs=2,
    max_length=40,
    learning_rate=2e-3,
    lr_scheduler_type="linear",
    warmup_steps=0,
    weight_decay=0.1,
    adam_epsilon=1e-5,
    max_grad_norm=0.5,
    center_coef=0.01,
    logging_steps=2,
)
# Rows. Training has updates of 8, 8 and 5; of the second held-out set one process has a padding row.
SETS = {"train": 21, "first": 7, "second": 1}


def pair(n: int) -> dict:
    """Some with a margin, which may be null."""
    margin = {"margin": [0.5, 1, None, -0.25][n // 2 % 4]} if n % 2 else {}
    return runs.pair_of(*(runs.some_letters(n, salt, longest=24) for salt in (1, 2, 3))) | margin


PAIRS = {
    name: [pair(50 * place + n) for n in range(count)]
    for place, (name, count) in enumerate(SETS.items())
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    runs.tiny_llama(folder / "model", attention_dropout=0.2)  # it must be off
    for name, rows in PAIRS.items():
        runs.write_jsonl(folder / f"{name}.jsonl", rows)
    return folder


def flags(inputs, output, data="train", held_out=("first", "second"), **more) -> list:
    evaluated = [inputs / f"{name}.jsonl" for name in held_out]
    given = SETTINGS | ({"eval_dataset_name": evaluated} if held_out else {})
    return runs.short_run(inputs, data, output, **given | more)


def initial_model(folder) -> torch.nn.Module:
    """With the head that the recipe draws from the seed."""
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float64
    ).eval()
    normal = torch.randn(1, 32, generator=torch.Generator().manual_seed(SETTINGS["seed"]))
    model.score.weight.data.copy_(0.1 * normal / math.sqrt(33))
    return model


def reader(model, tokenizer):
    """Returns the function from a pair to a `Row`, each answer read alone."""

    def read(row: dict) -> Row:
        scores, n_tokens = [], 0
        for answer in ("chosen", "rejected"):
            messages = row["prompt"] + row[answer]
            ids = tokenizer.apply_chat_template(messages, return_dict=False)
            ids = ids[: SETTINGS["max_length"]]
            scores.append(model(torch.tensor([ids])).logits[0, 0])
            n_tokens += len(ids)
        chosen, rejected = scores
        difference = chosen - rejected
        loss = torch.log1p(torch.exp((row.get("margin") or 0.0) - difference))
        both = [chosen.item(), rejected.item()]
        metrics = {
            "accuracy": [difference.item() > 0],
            "margin": [difference.item()],
            "mean_reward": both,
            "min_reward": both,
            "max_reward": both,
        }
        return Row(loss + SETTINGS["center_coef"] * (chosen + rejected) ** 2, 1, metrics, n_tokens)

    return read


@torch.no_grad()
def evaluation(read, step: int) -> dict:
    rows = {name: [read(row) for row in PAIRS[name]] for name in ("first", "second")}
    line = {"global_step": step}
    for name, of_set in rows.items():
        line |= {f"eval/{name}/{tag}": value for tag, value in means(of_set).items()}
    scores = [x for of_set in rows.values() for row in of_set for x in row.metrics["mean_reward"]]
    return line | {"eval/std_reward": torch.tensor(scores).std(correction=0).item()}


@pytest.fixture(scope="module")
def whole(inputs, tokenizer):
    """A run of two processes; its console, the reference model, and the lines that it should write."""
    result = runs.launch(
        runs.LAUNCHERS["ddp"], runs.recipe("reward"), *flags(inputs, inputs / "ddp")
    )
    model = initial_model(inputs / "model")
    read = reader(model, tokenizer)
    before = evaluation(read, 0)
    lines = train(model, PAIRS["train"], SETTINGS, read)
    return inputs / "ddp", result.stdout, model, lines, [before, evaluation(read, 6)]


def test_every_logged_number_and_the_weights_of_a_run(whole):
    output, console, model, expected, evaluations = whole
    assert "prompts are computed once" in console and " truncated" in console
    expect_lines(runs.training_lines(output), expected, rel=2e-5, abs=2e-6)
    expect_lines(runs.evaluation_lines(output), evaluations, rel=2e-5, abs=2e-6)
    expect_weights(runs.weights(output), model, bound=1e-5)
    # The run is one in which everything happens.
    assert max(line["grad_norm"] for line in expected) > 2 * SETTINGS["max_grad_norm"]
    assert len({line["accuracy"] for line in expected}) > 2


@torch.no_grad()
def test_plain_transformers_reads_the_saved_folder_alike(whole):
    """Also in padded batches; its config has the moments of the held-out scores."""
    output, _, reference, *_ = whole
    tokenizer = AutoTokenizer.from_pretrained(output / "actor")
    model = AutoModelForSequenceClassification.from_pretrained(output / "actor").eval()
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    answers = [
        tokenizer.apply_chat_template(row["prompt"] + row[answer], return_dict=False)
        for name in ("first", "second")
        for row in PAIRS[name]
        for answer in ("chosen", "rejected")
    ]
    answers = [ids[: SETTINGS["max_length"]] for ids in answers]
    batch = tokenizer.pad({"input_ids": answers}, padding_side="right", return_tensors="pt")
    scores = model(**batch).logits[:, 0].double()
    alone = torch.stack([reference(torch.tensor([ids])).logits[0, 0] for ids in answers])
    assert (scores - alone).abs().max() <= 1e-4 * alone.abs().max()
    config = json.loads((output / "actor/config.json").read_text())
    assert config["reward_mean"] == pytest.approx(scores.mean().item(), rel=1e-5, abs=1e-6)
    assert config["reward_std"] == pytest.approx(scores.std(correction=0).item(), rel=1e-5)


@torch.no_grad()
def test_the_lines_of_the_page_score_an_answer(inputs, tokenizer, tmp_path):
    """With a model that has no moments, as the page's first command saves it."""
    model = initial_model(inputs / "model")
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    names = {}
    exec(runs.code_of_page("docs/reward.md").replace("runs/reward/.../actor", str(tmp_path)), names)
    ids = tokenizer.apply_chat_template(names["conversation"], return_dict=False)
    expected = model(torch.tensor([ids])).logits[:, 0]
    torch.testing.assert_close(names["scores"].double(), expected, rtol=1e-4, atol=1e-5)


def train_here(*flags) -> None:
    """A run of one process, in this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["reward.py", *map(str, flags)])
        load_recipe("reward").main()


def test_moments_are_of_the_weights_they_are_saved_with(whole, inputs, accelerator):
    """Without an evaluation a reward model has none, not even those of the one that it started from."""
    few = dict(max_steps=3, max_epochs=1, save_actor_steps=1)
    start = dict(model_name_or_path=whole[0] / "actor", held_out=(), **few | {"max_steps": 1})
    train_here(*flags(inputs, inputs / "moments", **start))
    train_here(*flags(inputs, inputs / "evaluated", eval_steps=2, **few))
    folders = [inputs / "moments/actor"]
    folders += [inputs / f"evaluated/actors/global_step_{step:06d}" for step in (1, 2, 3)]
    found = [json.loads((folder / "config.json").read_text()) for folder in folders]
    assert [bool(config.get("reward_std")) for config in found] == [False, False, True, True]
    assert found[3]["reward_mean"] != found[2]["reward_mean"]


def test_a_checkpoint_before_the_first_update_holds_no_moments():
    """A signal asks for one while updates are skipped."""
    first, second = [load_recipe("reward").Moments(PreTrainedConfig()) for _ in range(2)]
    assert first.state() == [None, None]
    second.set(0.5, 2.0)
    assert second.state() == [0.5, 2.0]
    second.load_state(first.state())
    assert second.state() == [None, None]


@pytest.mark.parametrize("margin", [float("nan"), True])
def test_margins_that_python_takes_for_numbers_are_refused_too(inputs, accelerator, margin):
    runs.write_jsonl(inputs / f"{margin}.jsonl", [{**pair(n), "margin": margin} for n in (0, 2)])
    call = lambda: train_here(*flags(inputs, inputs / f"margin {margin}", data=f"{margin}"))
    runs.refuses(f"{margin}.jsonl", "row 1", "column 'margin'", "expected a", call=call)
