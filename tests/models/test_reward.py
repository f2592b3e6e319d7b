"""The reward model by value, against closed forms and plain transformers.

Its score at each answer's last token is compared with one unpadded row at a time; a whole run, its
lines, weights and saved folder, with a plain loop in torch and what plain transformers reads.
"""

import json
import math
import runpy
import sys
import types

import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from common import batches
from common.shared_args import SharedArgs
from preference_recipes.models import load
from preference_recipes.models.logprobs import ScoreModel
from preference_recipes.models.packing import Packer
from runs import (
    LAUNCHERS,
    evaluation_lines,
    launch,
    recipe,
    refuses,
    tiny_llama,
    training_lines,
    weights,
    without_timings,
    write_jsonl,
)
from test_logprobs import can_pack

reward = types.SimpleNamespace(**runpy.run_path(str(recipe("reward"))))


# ---------------------------------------------------------------------------------------------- the functions

CHOSEN, REJECTED, MARGINS = (
    [2.0, -1.0, 0.5, 3.0, 9.0],
    [1.0, 0.5, 0.5, -2.0, -9.0],
    [0.0, 0.3, -1.2, 2.0, 0.0],
)


@pytest.mark.parametrize("center_coef", [0.0, 0.07])
def test_the_loss_of_a_pair(center_coef):
    losses = reward.pairwise_loss(*map(torch.tensor, (CHOSEN, REJECTED, MARGINS)), center_coef)
    closed = [
        math.log1p(math.exp(-(c - r - m))) + center_coef * (c + r) ** 2
        for c, r, m in zip(CHOSEN, REJECTED, MARGINS)
    ]
    assert losses.tolist() == pytest.approx(closed, rel=1e-5) and losses.dtype == torch.float32


# ---------------------------------------------------------------------------------------------- the head


def head(folder, tokenizer, seed: int, **settings) -> torch.Tensor:
    torch.manual_seed(seed)
    torch.randn(seed)  # whatever came before
    model = load.score_model(str(folder), tokenizer, SharedArgs(), **settings)
    return model.score.weight.detach()


def test_a_new_head_is_drawn_from_the_seed_and_an_old_one_kept(tmp_path, tokenizer):
    wide = tiny_llama(
        tmp_path / "wide",
        hidden_size=2048,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        head_dim=4,
    )
    found = head(wide, tokenizer, 5, new_head=True)
    normal = torch.randn(1, 2048, generator=torch.Generator().manual_seed(5))
    expected = 0.1 * normal / math.sqrt(2049)
    assert torch.equal(found, expected) and found.dtype == torch.float32
    assert (
        found.std().item() == pytest.approx(0.1 / math.sqrt(2049), rel=0.05)
        and abs(found.mean().item()) < 0.3 / 2049
    )
    assert torch.equal(found, head(wide, tokenizer, 5, new_head=True)) and not torch.equal(
        found, head(wide, tokenizer, 6, new_head=True)
    )
    model = AutoModelForSequenceClassification.from_pretrained(
        tiny_llama(tmp_path / "old"), num_labels=1
    )
    model.save_pretrained(tmp_path / "old")
    for new_head in (True, False):
        assert torch.equal(
            model.score.weight, head(tmp_path / "old", tokenizer, 5, new_head=new_head)
        )


# ---------------------------------------------------------------------------------------------- the pad token


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
        (["<role>", "<image_pad>", "<spare>", "<other>"], {}, None, "<spare>"),
        (["<role>"], {"unk_token": "<u>"}, None, "<u>"),
        (["<spare>"], {}, "word", "word"),
    ],
    ids=["named so", "unused", "for unknown text", "given"],
)
def test_a_pad_token_that_is_not_the_eos(special, changes, given, expected):
    tokenizer = pads_with_eos(*special, **changes)
    size = len(tokenizer)
    load.separate_pad(tokenizer, given)
    assert (tokenizer.pad_token, tokenizer.eos_token, len(tokenizer)) == (expected, "<e>", size)


def test_models_that_cannot_score(tmp_path, tokenizer):
    tiny = tiny_llama(tmp_path / "tiny")
    refuses(tiny, "score.weight", "recipes/reward.py", call=lambda: head(tiny, tokenizer, 0))
    other = tiny_llama(tmp_path / "other", vocab_size=300)
    changed = AutoTokenizer.from_pretrained(other)
    changed.add_tokens(["more"])
    changed.save_pretrained(other)
    refuses(other, "another tokenizer", call=lambda: head(other, tokenizer, 0, new_head=True))


# ---------------------------------------------------------------------------------------------- scores

SMALL = dict(vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=128,
             initializer_range=0.3, pad_token_id=0, bos_token_id=None, eos_token_id=1, num_labels=1)  # fmt: skip
GROUPED = dict(SMALL, num_key_value_heads=1, head_dim=16)
ARCHITECTURES = {  # and whether prompts can be shared
    "llama": (AutoConfig.for_model("llama", **GROUPED), True),
    "qwen3": (AutoConfig.for_model("qwen3", **GROUPED), True),
    "gpt_neox": (AutoConfig.for_model("gpt_neox", **SMALL), True),
    "gemma2": (
        AutoConfig.for_model("gemma2", **GROUPED, sliding_window=6, query_pre_attn_scalar=16),
        False,
    ),
    "eager": (AutoConfig.for_model("llama", **GROUPED, attn_implementation="eager"), False),
}
ids = lambda length, salt: [10 + (7 * salt + place * place) % 200 for place in range(length)]
COLUMNS = {
    "prompt_ids": [ids(n, n) for n in (5, 1, 9, 3)],
    "chosen_ids": [[*ids(n, n + 20), 1] for n in (2, 12, 0, 6)],  # they end with EOS
    "rejected_ids": [[*ids(n, n + 40), 1] for n in (7, 3, 4, 1)],
    "margin": [0.0] * 4,
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_the_score_is_that_of_each_answer_alone_at_its_eos(architecture):
    config, shares = ARCHITECTURES[architecture]
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.score.weight.normal_(0, 0.3)
    rows = [
        prompt + answer
        for name in ("chosen_ids", "rejected_ids")
        for prompt, answer in zip(COLUMNS["prompt_ids"], COLUMNS[name])
    ]
    alone = torch.stack([model(torch.tensor([row])).logits[0, 0] for row in rows])
    assert alone.std() > 0.1
    scorer = ScoreModel(model)
    for share in (False, True)[: 1 + shares]:
        batch = reward.collate(COLUMNS, Packer(torch.device("cpu"), share=share))
        ids = batch["inputs"]["input_ids"]
        assert (
            (ids.flatten()[batch["last"]] == 1).all()
            and len(batch["last"]) == 8
            and len(ids) == (4 if share else 8)
        )
        for padding in (0, 77):  # whatever comes after the ends
            ends = torch.zeros(ids.numel()).index_fill(0, batch["last"], 1).view(ids.shape)
            batch["inputs"]["input_ids"] = ids.masked_fill(
                ends.flip(1).cumsum(1).flip(1) == 0, padding
            )
            torch.testing.assert_close(scorer(batch), alone, rtol=1e-5, atol=1e-5)
    assert can_pack(scorer) == shares


# ---------------------------------------------------------------------------------------------- whole runs

SETTINGS = dict(seed=3, train_batch_size=8, micro_train_batch_size=2, max_epochs=2, max_length=40, learning_rate=2e-3, warmup_steps=0,
                weight_decay=0.1, adam_epsilon=1e-5, max_grad_norm=0.5, center_coef=0.01, logging_steps=2, report_to="none")  # fmt: skip
TRAIN, SETS = (
    21,
    {"first": 7, "second": 1},
)  # windows of 8, 8 and 5; of the second set one process has a padding row


say = lambda role, content: [{"role": role, "content": content}]


def pair(n: int) -> dict:
    text = lambda salt: "".join(
        chr(97 + (n * 5 + salt * 7 + i * i) % 26) for i in range(1 + (n * 13 + salt * 5) % 24)
    )
    margin = {"margin": [0.5, 1, None, -0.25][n // 2 % 4]} if n % 2 else {}
    return {
        "prompt": say("user", text(1)),
        "chosen": say("assistant", text(2)),
        "rejected": say("assistant", text(3)),
        **margin,
    }


PAIRS = {"train": [pair(n) for n in range(TRAIN)]}
for name, count in SETS.items():
    PAIRS[name] = [pair(100 * (name == "second") + 50 + n) for n in range(count)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    tiny_llama(folder / "model", attention_dropout=0.2)  # it must be off
    for name, rows in PAIRS.items():
        write_jsonl(folder / f"{name}.jsonl", rows)
    return folder


def flags(inputs, output, model="model", data="train.jsonl", **more) -> list:
    sets = [inputs / f"{name}.jsonl" for name in SETS]
    settings = [
        part for name, value in {**SETTINGS, **more}.items() for part in (f"--{name}", value)
    ]
    return ["--model_name_or_path", inputs / model, "--dataset_name", inputs / data, "--eval_dataset_name", *sets, "--output_dir", output, *settings]  # fmt: skip


class Reference:
    """The same run in plain torch: one unpadded row at a time through transformers' own classifier, the loss of a window at once."""

    def __init__(self, inputs, tokenizer):
        self.model = AutoModelForSequenceClassification.from_pretrained(
            inputs / "model", num_labels=1
        )
        generator = torch.Generator().manual_seed(SETTINGS["seed"])
        self.model.score.weight.data.copy_(
            0.1 * torch.randn(1, 32, generator=generator) / math.sqrt(33)
        )
        text = lambda row, answer: tokenizer.apply_chat_template(
            row["prompt"] + row[answer], tokenize=False
        )
        cut = lambda row, answer: tokenizer(text(row, answer)).input_ids[: SETTINGS["max_length"]]
        self.ids = {
            name: [(cut(row, "chosen"), cut(row, "rejected")) for row in rows]
            for name, rows in PAIRS.items()
        }
        self.lines, self.evaluations = [], []

    def read(self, name, rows) -> list[dict]:
        found = []
        for row in rows:
            chosen, rejected = (
                self.model(torch.tensor([answer])).logits[0, 0] for answer in self.ids[name][row]
            )
            difference = chosen - rejected
            loss = (
                torch.log1p(torch.exp(-(difference - (PAIRS[name][row].get("margin") or 0.0))))
                + 0.01 * (chosen + rejected) ** 2
            )
            found.append(
                {
                    "loss": loss,
                    "margin": difference.item(),
                    "rewards": [chosen.item(), rejected.item()],
                }
            )
        return found

    def line(self, pairs: list[dict], prefix: str = "") -> dict:
        rewards, mean = (
            [score for p in pairs for score in p["rewards"]],
            lambda values: sum(values) / len(values),
        )
        values = {"loss": mean([p["loss"].item() for p in pairs]), "accuracy": mean([p["margin"] > 0 for p in pairs]), "margin": mean([p["margin"] for p in pairs]),
                  "mean_reward": mean(rewards), "min_reward": min(rewards), "max_reward": max(rewards)}  # fmt: skip
        return {prefix + name: value for name, value in values.items()}

    @torch.no_grad()
    def evaluate(self, step):
        found = {name: self.read(name, range(count)) for name, count in SETS.items()}
        rewards = torch.tensor(
            [score for pairs in found.values() for p in pairs for score in p["rewards"]],
            dtype=torch.float64,
        )
        line = {
            name: value
            for of, pairs in found.items()
            for name, value in self.line(pairs, f"eval/{of}/").items()
        }
        self.evaluations.append(
            {"global_step": step, **line, "eval/std_reward": rewards.std(correction=0).item()}
        )

    def go(self):
        parts = [
            [p for p in self.model.parameters() if (p.ndim > 1) == matrix]
            for matrix in (True, False)
        ]
        groups = [
            {"params": part, "weight_decay": decay}
            for part, decay in zip(parts, (SETTINGS["weight_decay"], 0.0))
        ]
        optimizer, seen, samples, tokens = (
            torch.optim.AdamW(groups, eps=SETTINGS["adam_epsilon"]),
            [],
            0,
            0,
        )
        self.evaluate(0)
        for step in range(6):
            rows = batches.rows_of_update(TRAIN, 8, SETTINGS["seed"], step).tolist()
            pairs = self.read("train", rows)
            optimizer.zero_grad()
            torch.stack([p["loss"] for p in pairs]).mean().backward()
            norm = torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), SETTINGS["max_grad_norm"]
            ).item()
            rate = SETTINGS["learning_rate"] * (6 - step) / 6
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            seen, samples = seen + pairs, samples + len(rows)
            tokens += sum(len(answer) for row in rows for answer in self.ids["train"][row])
            if step + 1 in (1, 2, 4, 6):
                counts = {
                    "samples": samples,
                    "tokens": tokens,
                    "epoch": (step + 1) / 3,
                    "skipped_steps": 0,
                }
                self.lines.append(
                    {
                        "global_step": step + 1,
                        **self.line(seen),
                        "grad_norm": norm,
                        "learning_rate": rate,
                        **counts,
                    }
                )
                seen = []
        self.evaluate(6)
        return self


@pytest.fixture(scope="module")
def whole(inputs, tokenizer):
    result = launch(LAUNCHERS["ddp"], recipe("reward"), *flags(inputs, inputs / "ddp"))
    return inputs / "ddp", result.stdout, Reference(inputs, tokenizer).go()


def expect_lines(found: list[dict], expected: list[dict]) -> None:
    assert [line["global_step"] for line in found] == [line["global_step"] for line in expected]
    for line, other in zip(map(without_timings, found), map(without_timings, expected)):
        assert line.keys() == other.keys()
        for name in line:
            assert line[name] == pytest.approx(other[name], rel=2e-5, abs=2e-6), (
                line["global_step"],
                name,
            )


def test_every_logged_number_and_the_weights_of_a_run(whole):
    output, console, reference = whole
    assert "prompts are computed once for both answers" in console and " truncated" in console
    assert (
        "21 samples / train_batch_size 8 = 3 updates per epoch, the last of 5 samples; 6 updates in all"
        in console
    )
    expect_lines(training_lines(output), reference.lines)
    expect_lines(evaluation_lines(output), reference.evaluations)
    parts = dict(reference.model.named_parameters())
    expected = torch.cat([parts[name].detach().double().flatten() for name in sorted(parts)])
    assert (weights(output) - expected).norm() <= 1e-5 * expected.norm()
    # The run is one in which everything happens.
    norms, accuracies = (
        [line[name] for line in reference.lines] for name in ("grad_norm", "accuracy")
    )
    assert (
        max(norms) > 2 * SETTINGS["max_grad_norm"]
        and min(accuracies) > 0
        and len(set(accuracies)) > 2
    )


@torch.no_grad()
def test_plain_transformers_reads_the_saved_folder_alike(whole):
    output, _, reference = whole
    tokenizer = AutoTokenizer.from_pretrained(output / "actor")
    model = AutoModelForSequenceClassification.from_pretrained(output / "actor").eval()
    config = json.loads((output / "actor/config.json").read_text())
    assert (
        model.config.num_labels == 1
        and config["pad_token_id"] == tokenizer.pad_token_id != tokenizer.eos_token_id
    )
    answers = [answer for name in SETS for both in reference.ids[name] for answer in both]
    scores = []
    for start in range(0, len(answers), 5):
        batch = tokenizer.pad(
            {"input_ids": answers[start : start + 5]}, padding_side="right", return_tensors="pt"
        )
        scores.append(model(**batch).logits[:, 0])
    scores = torch.cat(scores).double()
    expected = torch.stack(
        [reference.model(torch.tensor([answer])).logits[0, 0] for answer in answers]
    )
    assert (scores - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert config["reward_mean"] == pytest.approx(scores.mean().item(), rel=1e-5, abs=1e-6)
    assert config["reward_std"] == pytest.approx(scores.std(correction=0).item(), rel=1e-5)


def train(*flags) -> None:
    """A run of one process, in this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["reward.py", *map(str, flags)])
        reward.main()


def test_moments_are_of_the_weights_they_are_saved_with(whole, inputs, accelerator):
    """Saved between evaluations, or without any, a reward model has none, not even those of the model that it started from."""
    output = inputs / "moments"
    sets = flags(inputs, output, model=whole[0] / "actor", max_steps=1, save_actor_steps=1)
    train(
        *(
            flag
            for flag in sets
            if flag != "--eval_dataset_name"
            and flag not in [inputs / f"{name}.jsonl" for name in SETS]
        )
    )
    again = inputs / "evaluated"
    train(*flags(inputs, again, max_steps=3, max_epochs=1, save_actor_steps=1, eval_steps=2))
    folders = [
        output / "actor",
        *(again / f"actors/global_step_{step:06d}" for step in (1, 2, 3)),
        again / "actor",
    ]
    found = [json.loads((folder / "config.json").read_text()) for folder in folders]
    assert [config.get("reward_std") is not None for config in found] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert found[3]["reward_mean"] == found[4]["reward_mean"] != found[2]["reward_mean"]


EACH = "prompts are computed for each answer"


@pytest.mark.parametrize("more, said", [
    ({"share_prompts": "false"}, EACH), ({"attn_implementation": "eager"}, EACH),
])  # fmt: skip
def test_sharing_changes_no_number_and_is_left_where_it_would(
    whole, inputs, accelerator, capsys, more, said
):
    output = inputs / "-".join(["one", *more])
    train(*flags(inputs, output, **more))
    assert said in capsys.readouterr().out
    for read in (training_lines, evaluation_lines):
        expect_lines(read(output), read(whole[0]))
    expected = weights(whole[0])
    assert (weights(output) - expected).norm() <= 1e-5 * expected.norm()


def windowed(inputs, tokenizer, window: int) -> str:
    """The name of a model that attends to the last `window` tokens only."""
    settings = {name: value for name, value in GROUPED.items() if name != "num_labels"}
    torch.manual_seed(0)
    config = AutoConfig.for_model("mistral", **settings, sliding_window=window)
    AutoModelForCausalLM.from_config(config).save_pretrained(inputs / f"window-{window}")
    tokenizer.save_pretrained(inputs / f"window-{window}")
    return f"window-{window}"


def test_held_out_rows_longer_than_the_window_are_scored_as_alone(inputs, accelerator, tokenizer):
    """Training rows that are all shorter than the window say nothing of the held-out ones."""
    short = [
        {
            "prompt": say("user", a),
            "chosen": say("assistant", a + b),
            "rejected": say("assistant", b),
        }
        for a in "abcd"
        for b in "ef"
    ]
    write_jsonl(inputs / "short.jsonl", short)
    model, found = windowed(inputs, tokenizer, 20), {}
    for share in ("true", "false"):
        train(
            *flags(
                inputs,
                inputs / f"short-{share}",
                model=model,
                data="short.jsonl",
                share_prompts=share,
                max_steps=1,
            )
        )
        found[share] = evaluation_lines(inputs / f"short-{share}")
    expect_lines(found["true"], found["false"])


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("margin", [float("nan"), True])
def test_margins_that_python_takes_for_numbers_are_refused_too(inputs, accelerator, margin):
    write_jsonl(inputs / f"{margin}.jsonl", [{**pair(n), "margin": margin} for n in (0, 2)])
    call = lambda: train(*flags(inputs, inputs / f"margin {margin}", data=f"{margin}.jsonl"))
    refuses(f"{margin}.jsonl", "row 1", "column 'margin'", "expected a", call=call)
