"""SFT and DPO by value: whole runs against the plain loop of plain_loop.py, or against TRL.

What is compared: every number of every log line but `perf/*`, evaluations included, and the weights at the end. The
reward model's loop is in test_reward.py. TRL's values are stored, see tests/peers/trl_values.py.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import runs
from peers import trl_values
from plain_loop import Row, expect_lines, expect_weights, means, train

# What all runs against the loop have in common. Clipping binds; decay and warm-up count.
SETTINGS = dict(
    seed=5,
    train_batch_size=8,
    learning_rate=3e-3,
    weight_decay=0.1,
    adam_epsilon=1e-5,
    max_grad_norm=0.5,
    warmup_steps=0.3,
    report_to="none",
)
# Rows: the updates of an epoch hold 8, 8 and 1, in which one process of two has none.
USABLE = 17
HELD_OUT = 3  # rows: one process of two has one


def run(name: str, output: Path, launcher: str = "plain", inputs=None, **settings) -> str:
    """Launches a recipe, on the model and the rows of `inputs`, and returns what it printed."""
    if inputs:
        held_out = {"eval_dataset_name": inputs / f"{name}_eval.jsonl"}
        flags = runs.short_run(inputs, name, output, **held_out, **settings)
    else:
        flags = runs.flags_of({"output_dir": output, **settings})
    return runs.launch(runs.LAUNCHERS[launcher], runs.recipe(name), *flags).stdout


def expect_evaluations(output: Path, expected: list[dict[str, float]], rel: float, abs: float = 0):
    """The means over the held-out rows, before the first update and after the last."""
    for line, values in zip(runs.evaluation_lines(output), expected, strict=True):
        found = {tag: line[f"eval/{tag}"] for tag in values}
        assert found == pytest.approx(values, rel=rel, abs=abs)


# ------------------------------------------------------------------------------- data


def conversation(n: int) -> list[dict]:
    """One or two questions with their answers, some after a system message."""
    text = lambda salt: runs.some_letters(n, salt, longest=20)
    messages = runs.say("system", text(1)) if n % 4 == 0 else []
    for turn in range(1 + n % 2):
        messages = (
            messages + runs.say("user", text(2 + turn)) + runs.say("assistant", text(4 + turn))
        )
    return messages


def pair(n: int) -> dict:
    return runs.pair_of(*(runs.some_letters(n, salt, longest=20) for salt in (1, 2, 3)))


CONVERSATIONS = [conversation(n) for n in range(USABLE + HELD_OUT)]
PAIRS = [pair(n) for n in range(USABLE + HELD_OUT)]
# Each file also has a row without anything to learn. It must be left out before the order is drawn.
UNUSABLE = 7
EMPTY = runs.say("user", "ab") + runs.say("assistant", "")
EQUAL = {**pair(3), "rejected": pair(3)["chosen"]}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("references")
    runs.tiny_llama(folder / "model")
    runs.tiny_llama(folder / "reference", initializer_range=0.2)
    runs.tiny_llama(folder / "dropping", attention_dropout=0.2)  # DPO must switch it off
    conversations = [{"messages": messages} for messages in CONVERSATIONS]
    rows = {"sft": (conversations, {"messages": EMPTY}), "dpo": (PAIRS, EQUAL)}
    for name, (usable, unusable) in rows.items():
        train = [*usable[:UNUSABLE], unusable, *usable[UNUSABLE:USABLE]]
        runs.write_jsonl(folder / f"{name}.jsonl", train)
        runs.write_jsonl(folder / f"{name}_eval.jsonl", usable[USABLE:])
    return folder


def load(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def logits_before(model: torch.nn.Module, ids: list[int], places: list[int]) -> torch.Tensor:
    """The logits that predict the tokens at these places, `[places, vocabulary]`."""
    return model(torch.tensor([ids])).logits[0, [place - 1 for place in places]]


# ------------------------------------------------------------------------------- SFT

COSINE = dict(lr_scheduler_type="cosine")
SFT = {
    "assistant": dict(lr_scheduler_type="linear", max_epochs=2, micro_train_batch_size=2),
    "completion": dict(
        COSINE, launcher="ddp", max_steps=6, micro_train_batch_size=4, logging_steps=4
    ),
    "all": dict(COSINE, max_steps=5, micro_train_tokens=150),
}


def targets_of(tokenizer, messages: list[dict], loss_on: str) -> tuple[list[int], list[int]]:
    """Ids of a conversation as its template writes it, and the places of the target tokens."""
    template = tokenizer.apply_chat_template
    ids = template(messages, return_dict=False)
    if loss_on == "all":
        return ids, list(range(1, len(ids)))  # nothing predicts the first token
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    targets = []
    for place in answers[-1:] if loss_on == "completion" else answers:
        start = len(template(messages[:place], add_generation_prompt=True, return_dict=False))
        end = len(template(messages[: place + 1], return_dict=False))
        targets += range(start, end)
    return ids, targets


@pytest.mark.parametrize("loss_on", SFT)
def test_sft_is_the_plain_loop(inputs, loss_on):
    max_length = 45
    settings = SETTINGS | SFT[loss_on]
    given = settings | dict(loss_on=loss_on, max_length=max_length)
    console = run("sft", inputs / loss_on, inputs=inputs, **given)

    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    whole = [targets_of(tokenizer, messages, loss_on) for messages in CONVERSATIONS]
    cut = [(ids[:max_length], [t for t in targets if t < max_length]) for ids, targets in whole]
    rows = [(ids, targets) for ids, targets in cut[:USABLE] if targets]
    held_out = [(ids, targets) for ids, targets in cut[USABLE:] if targets]
    model = load(inputs / "model")

    def read(row: tuple[list[int], list[int]]) -> Row:
        ids, targets = row
        logits = logits_before(model, ids, targets)
        truth = torch.tensor(ids)[targets]
        loss = -logits.log_softmax(1)[range(len(truth)), truth].sum()
        hits = (logits.argmax(1) == truth).tolist()
        return Row(loss, len(truth), {"mean_token_accuracy": hits}, len(ids))

    before = means(map(read, held_out))
    lines = train(model, rows, settings, read)
    assert f"{len(rows)} usable rows" in console
    expect_lines(runs.training_lines(inputs / loss_on), lines, rel=1e-6)
    expect_evaluations(inputs / loss_on, [before, means(map(read, held_out))], rel=1e-6)
    expect_weights(runs.weights(inputs / loss_on), model)
    # The run is one in which everything happens.
    assert sum(len(ids) > max_length for ids, _ in whole) > 1
    assert max(line["grad_norm"] for line in lines) > 2 * settings["max_grad_norm"]


def test_dropout_is_on_in_sft_and_off_in_its_evaluations(inputs, tmp_path):
    """Two models of the same weights. The first update comes after an evaluation, and so does the last."""
    lines, evaluations = [], []
    for name in ("model", "dropping"):
        sizes = dict(micro_train_batch_size=4, learning_rate=0, eval_steps=1, max_steps=2)
        given = SETTINGS | sizes | {"model_name_or_path": inputs / name}
        run("sft", tmp_path / name, inputs=inputs, **given)
        lines.append([line["loss"] for line in runs.training_lines(tmp_path / name)])
        evaluations.append([line["eval/loss"] for line in runs.evaluation_lines(tmp_path / name)])
    assert evaluations[0] == evaluations[1] and len(set(evaluations[0])) == 1
    assert all(abs(plain - dropping) > 1e-3 for plain, dropping in zip(*lines, strict=True))


@pytest.mark.parametrize("launcher", ["plain", runs.slow("zero2")])
def test_the_norm_of_a_large_gradient(tmp_path, launcher):
    """Added up in fp32 one after the other, as torch does it on a CPU, 3 million squares are off by 4e-5."""
    folder = runs.tiny_llama(tmp_path / "model", intermediate_size=100_000, num_hidden_layers=1)
    messages = CONVERSATIONS[1]
    runs.write_jsonl(tmp_path / "sft.jsonl", [{"messages": messages}])
    settings = dict(train_batch_size=2, micro_train_batch_size=1, max_steps=1, max_grad_norm=0.5)
    paths = dict(model_name_or_path=folder, dataset_name=tmp_path / "sft.jsonl")
    run("sft", tmp_path / "run", launcher, report_to="none", **paths, **settings)

    model = load(folder)
    ids, targets = targets_of(AutoTokenizer.from_pretrained(folder), messages, "assistant")
    logits = logits_before(model, ids, targets)
    torch.nn.functional.cross_entropy(logits, torch.tensor(ids)[targets]).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    (line,) = runs.training_lines(tmp_path / "run")
    assert line["grad_norm"] == pytest.approx(gradient.norm().item(), rel=1e-6)


# ------------------------------------------------------------------------------- DPO

BETA = 0.3


def test_dpo_is_the_plain_loop(inputs):
    """With the sigmoid loss; the others are TRL's, below."""
    max_length = 30
    settings = SETTINGS | {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}
    settings |= {"max_epochs": 2, "micro_train_batch_size": 2, "logging_steps": 4}
    output = inputs / "dpo"
    models = dict(
        model_name_or_path=inputs / "dropping", ref_model_name_or_path=inputs / "reference"
    )
    given = settings | models | dict(beta=BETA, max_length=max_length)
    console = run("dpo", output, launcher="ddp", inputs=inputs, **given)

    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    model, reference = load(inputs / "model"), load(inputs / "reference")

    def ids_of(messages: list[dict], add_generation_prompt: bool = False) -> list[int]:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, return_dict=False
        )

    def score(scorer, ids: list[int], start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The answer's log-prob, and the mean logit at each of its tokens."""
        places = list(range(start, len(ids)))
        logits = logits_before(scorer, ids, places)
        return logits.log_softmax(1)[range(len(places)), ids[start:]].sum(), logits.mean(1)

    def read(row: dict) -> Row:
        start = len(ids_of(row["prompt"], add_generation_prompt=True))
        ratios, metrics, tokens = {}, {}, 0
        for answer in ("chosen", "rejected"):
            ids = ids_of(row["prompt"] + row[answer])[:max_length]
            logp, mean_logits = score(model, ids, start)
            with torch.no_grad():
                ref_logp, _ = score(reference, ids, start)
            ratios[answer] = logp - ref_logp
            metrics[f"rewards/{answer}"] = [BETA * ratios[answer].item()]
            metrics[f"logps/{answer}"] = [logp.item()]
            metrics[f"logits/{answer}"] = mean_logits.tolist()
            tokens += len(ids)
        margin = BETA * (ratios["chosen"] - ratios["rejected"])
        metrics["rewards/margins"] = [margin.item()]
        metrics["rewards/accuracies"] = [float(margin > 0)]
        return Row(torch.log(1 + torch.exp(-margin)), 1, metrics, tokens)

    before = means(map(read, PAIRS[USABLE:]))
    lines = train(model, PAIRS[:USABLE], settings, read)
    assert f"{USABLE} usable rows" in console
    # Log-probs are of about -100, whose seventh digit fp32 rounds. Rewards are differences of them.
    expect_lines(runs.training_lines(output), lines, rel=1e-5, abs=5e-6)
    expect_evaluations(output, [before, means(map(read, PAIRS[USABLE:]))], rel=1e-5, abs=5e-6)
    expect_weights(runs.weights(output), model)
    # The run is one in which everything happens.
    whole = [ids_of(row["prompt"] + row["rejected"]) for row in PAIRS]
    assert sum(len(ids) > max_length for ids in whole) > 1
    assert max(line["grad_norm"] for line in lines) > 2 * settings["max_grad_norm"]
    assert 0 < lines[0]["rewards/accuracies"] < 1


# ------------------------------------------------------------------------------- TRL

# Tags of TRL that the recipes do not have.
ONLY_TRL = {"sft": {"entropy"}, "reward": set(), "dpo": {"entropy", "mean_token_accuracy"}}
CHANGE = "change of the weights"


def expect_values(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    """The same but for sums in another order, which move values by up to 4e-6 of their size."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-5, abs=5e-6), name


@pytest.mark.parametrize("case", trl_values.CASES)
def test_values_of_trl(case, tmp_path):
    """The same rows, model and settings give TRL's numbers, in micro-batches of two rows."""
    name, settings = trl_values.CASES[case]
    stored = json.loads(trl_values.STORED.read_text())[case]
    model = trl_values.save_model(name, tmp_path / "model")
    run(
        name,
        tmp_path / "run",
        model_name_or_path=model,
        dataset_name=runs.write_jsonl(tmp_path / "rows.jsonl", trl_values.rows(name)),
        micro_train_batch_size=2,
        report_to="none",
        **trl_values.SETTINGS | settings,
    )

    expected = {tag: values for tag, values in stored.items() if tag not in ONLY_TRL[name]}
    lines = runs.training_lines(tmp_path / "run")
    found = {tag: [line[tag] for line in lines] for tag in expected if tag != CHANGE}
    start = trl_values.vector(trl_values.load_model(name, model))
    found[CHANGE] = trl_values.projections(runs.weights(tmp_path / "run") - start)
    expect_values(found, expected)


@pytest.mark.slow
def test_what_is_stored_is_what_trl_computes():
    found, stored = trl_values.values(), json.loads(trl_values.STORED.read_text())
    assert found.keys() == stored.keys()
    for case in stored:
        expect_values(found[case], stored[case])
