"""What people see of a run: TensorBoard, as its own server answers, other trackers, samples, and the blocks in the console."""

import html
import json
import re
import sqlite3
import statistics
import types
import urllib.request
from pathlib import Path
from urllib.parse import urlencode

import pytest
import torch
from tensorboard import default, program
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

from common import console, counted, trackers, transcript
from recipes import RECIPES
from runs import (
    REPOSITORY,
    evaluation_lines,
    launch,
    lines,
    recipe,
    refuses,
    samples,
    tiny_inputs,
    training_lines,
    write_jsonl,
)
from small_run import small_run

NAMES = [
    "ppo",
    *(pytest.param(name, marks=pytest.mark.slow) for name in RECIPES if name != "ppo"),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return tiny_inputs(tmp_path_factory.mktemp("board"))


@pytest.fixture(scope="module")
def finished(inputs):
    """A run of two updates of each recipe, held-out data with answers included, and its console."""
    done = {}

    def run(name):
        if name not in done:
            data = inputs / f"{name}.jsonl"
            rows = [json.loads(line) for line in data.read_text().splitlines()][:6]
            held_out = inputs / f"held-out-{name}.jsonl"
            held_out.write_text("".join(json.dumps(row | {"answer": "7"}) + "\n" for row in rows))
            output = inputs / name
            more = RECIPES[name].board_flags
            if RECIPES[name].evaluates_answers:
                more = ["--max_new_tokens", 4]
            result = launch(
                [], recipe(name), "--model_name_or_path", inputs / "model", "--dataset_name", data, "--eval_dataset_name", held_out,
                "--output_dir", output, "--train_batch_size", 4, "--micro_train_batch_size", 2, "--max_steps", 2, *more,
            )  # fmt: skip
            done[name] = output, result.stdout
        return done[name]

    return run


@pytest.fixture(scope="module")
def ask():
    """Starts TensorBoard on a folder; returns a function that asks its server."""

    def start(folder):
        server = program.TensorBoard(plugins=default.get_plugins())
        server.configure(
            argv=[None, "--logdir", str(folder), "--port", "0", "--load_fast", "false"]
        )
        url = server.launch()

        def answer(path, body=None, **query):
            request = urllib.request.Request(f"{url}data/plugin/{path}?{urlencode(query)}")
            if body is not None:
                request.data = json.dumps(body).encode()
                request.add_header("Content-Type", "application/json")
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)

        return answer

    return start


@pytest.mark.parametrize("name", NAMES)
def test_what_tensorboards_server_answers(finished, ask, name):
    output, _ = finished(name)
    answer = ask(output)
    kinds = {
        kind: set(answer(f"{kind}/tags").get("tensorboard", {}))
        for kind in ("scalars", "histograms", "text")
    }
    # Every value of every line is a curve.
    logged = {tag for line in lines(output) for tag in line} - {"global_step"}
    assert kinds["scalars"] == logged
    key_metric = RECIPES[name].key_metric
    held_out = {tag for tag in logged if tag.startswith("eval/")}
    for tag in (key_metric, *held_out):
        points = answer("scalars/scalars", tag=tag, run="tensorboard")
        expected = {line["global_step"]: line[tag] for line in lines(output) if tag in line}
        assert {step: value for _, step, value in points} == pytest.approx(expected), tag
    # No two kinds share a tag: the server would show neither.
    expected = set()
    if name != "reward":
        expected.add("samples/evaluation")
    if RECIPES[name].generates:
        expected.add("samples/rollout")
    if RECIPES[name].scores_responses:
        assert kinds["histograms"] == {"rollout/scores"}
    assert {tag.removesuffix("/text_summary") for tag in kinds["text"]} == expected
    assert not kinds["scalars"] & (kinds["histograms"] | kinds["text"])

    # The page of key charts: in each, training and evaluation.
    (group,) = answer("custom_scalars/layout")["category"]
    assert group["title"] == "key metrics"
    charts = {chart["title"]: chart["multiline"]["tag"] for chart in group["chart"]}
    for title, (pattern,) in charts.items():
        assert any(re.fullmatch(pattern, tag) for tag in logged), title
    patterns = [pattern for (pattern,) in charts.values()]
    shown = {tag for tag in logged for pattern in patterns if re.match(pattern, tag)}
    assert key_metric in shown and shown & held_out

    # The hyper-parameters.
    request = {"experimentName": "", "allowedStatuses": ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"],
               "colParams": [], "startIndex": 0, "sliceSize": 10}  # fmt: skip
    (group,) = answer("hparams/session_groups", body=request)["sessionGroups"]
    assert group["hparams"]["train_batch_size"] == 4 and "output_dir" not in group["hparams"]


@pytest.mark.parametrize("name", ["dpo", "ppo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_samples_are_those_that_the_metrics_count(finished, name):
    output, said = finished(name)
    written = samples(output)
    for line in evaluation_lines(output) if name != "dpo" else lines(output):
        if "eval/exact_match" not in line:
            continue
        asked = [
            s for s in written if s["source"] == "eval" and s["global_step"] == line["global_step"]
        ]
        assert [sample["row"] for sample in asked] == [1, 2, 3, 4, 5, 6]
        if name == "dpo":
            right = [sample["right"] for sample in asked]
            assert statistics.fmean(right) == line["eval/exact_match"]
        else:
            scores = [sample["score"] for sample in asked]
            assert statistics.fmean(scores) == pytest.approx(line["eval/scores"], rel=1e-6)
    if name != "dpo":
        for line in training_lines(output):
            made = [
                sample["score"]
                for sample in written
                if sample["source"] == "rollout"
                and sample["global_step"] == line["global_step"] - 1
            ]
            assert made, line
            score = line["objective/scores" if name == "ppo" else "reward"]
            assert statistics.fmean(made) == pytest.approx(score, rel=1e-6)
        assert written[0]["rewards"].keys() == {"ties"}
    first = written[0]
    verdict = transcript.verdict(first)
    assert f"  {verdict}: {first['prompt'][-80:]!r} -> {first['response'][-80:]!r}\n" in said


def test_what_the_console_says_before_and_after(finished):
    output, said = finished("ppo")
    begin, end = said.split("  model ")[1], said.split("done: ")[1]
    assert (
        "train_batch_size 4 = micro_train_batch_size 2 x 1 process x 2 gradient accumulation steps"
        in begin
    )
    assert (
        f"tensorboard --logdir {output};" in begin
        and "million parameters with the critic's, all trained, weights in float32" in begin
        and re.search(r"scored by +\S", begin)
    )
    assert "checkpoints" in begin and "give --save_steps" in begin
    assert re.match(r"2 updates, 0 skipped, took \d\d:\d\d; actor in ", end)
    before, after = evaluation_lines(output)
    (row,) = [row.split() for row in end.splitlines() if "eval/scores" in row]
    assert row == ["eval/scores", f"{before['eval/scores']:.4g}", f"{after['eval/scores']:.4g}"]
    assert f'pipeline("text-generation", "{output}/actor")' in end
    assert "scores_at_temperature_" in said and " 1 updates" not in said


@pytest.mark.parametrize(
    "prefix, titles", [("eval/", ["before", "after"]), ("", ["first", "line", "last", "line"])]
)
def test_lines_of_training_are_not_called_before_and_after(tmp_path, prefix, titles):
    """Without held-out rows the two lines are of other samples, so their difference is no progress."""
    lines = [{"global_step": step, f"{prefix}loss": loss} for step, loss in ((1, 3.0), (2, 2.0))]
    write_jsonl(tmp_path / "metrics.jsonl", lines)
    head, row = console.before_and_after(tmp_path, {"loss": ["loss"]})
    assert head.split() == titles and row.split() == [f"{prefix}loss", "3", "2"]


@pytest.mark.parametrize("packed", [False, True])
def test_a_base_in_4_bits_is_said(packed):
    module = torch.nn.ModuleDict({"model": torch.nn.Linear(2, 2)})
    module.model = module["model"]
    args = types.SimpleNamespace(model_name_or_path="M", load_in_4bit=packed)
    said = console.describe_model(args, module)
    assert said.endswith("weights in float32" + ", those of the base packed into 4 bits" * packed)


def trained(architecture: str, has_adapter: bool = False) -> torch.nn.Module:
    """What a run trains, as far as `how_to_load` asks it: its architecture, and adapters."""
    module = torch.nn.Module()
    module.model = type(architecture, (torch.nn.Module,), {})()
    module.model._hf_peft_config_loaded = has_adapter
    return module


def test_a_model_is_tried_as_it_was_trained():
    """Its tokenizer may have a chat template although strings were read as they are."""
    messages = '[{"role": "user", "content": "..."}]'
    for is_chat, question in ((True, messages), (False, '"text"')):
        used = console.how_to_load(trained("LlamaForCausalLM"), Path("out/actor"), is_chat)
        assert used == [
            "  from transformers import pipeline",
            '  generate = pipeline("text-generation", "out/actor")',
            f"  print(generate({question}, max_new_tokens=100, do_sample=False))",
        ]


def test_a_page_says_how_a_reward_model_scores():
    """Transformers alone loads a whole model, so an adapter is merged first."""
    kind = "LlamaForSequenceClassification"
    page = "  see docs/reward.md, The saved model"
    assert console.how_to_load(trained(kind), Path("out/actor"), is_chat=True) == [page]
    assert "\n## The saved model\n" in (REPOSITORY / "docs/reward.md").read_text()
    merge = "  python -m preference_recipes.tools.export out/actor out/actor_merged --merge"
    of_adapter = trained(kind, has_adapter=True)
    assert console.how_to_load(of_adapter, Path("out/actor"), is_chat=True) == [merge, page]


def test_numbers_in_words():
    assert counted(1, "update") == "1 update" and counted(0, "process") == "0 processes"


def test_the_first_samples_of_each_set_are_shown():
    examples = [
        {"source": source, "row": row, "prompt": "a | b\n c", "response": "d", "score": 0.25}
        for source in ("eval/x", "eval/y")
        for row in range(1, 12)
    ]
    parts = transcript.as_markdown(examples).split("\n\n")
    assert len(parts) == 4 * (8 + 8)
    assert parts[:4] == ["eval/x, row 1:", "    a | b\n     c", "score 0.25:", "    d"]
    assert len(transcript.on_console(examples)) == 8
    assert transcript.on_console(examples)[0] == "  score 0.25: 'a | b\\n c' -> 'd'"


def rows_shown(qualities: list, most: int) -> list[int]:
    """The rows that are shown of examples with these scores, or that are right or wrong."""
    kind = "right" if isinstance(qualities[0], bool) else "score"
    examples = [
        {"source": "eval", "row": row, kind: value} for row, value in enumerate(qualities, 1)
    ]
    return [example["row"] for example in transcript.first_of_each(examples, most)]


@pytest.mark.parametrize("qualities, rows", [
    ([True, True, False, True, True, False], [1, 2, 3, 4]),  # as they come
    ([True, True, True, True, True, False, False, False, False], [1, 2, 6, 7]),
    ([False, False, False, False, False, True], [1, 2, 3, 6]),
    ([True] * 6, [1, 2, 3, 4]),
    ([-3.0, -3.0, -3.0, -3.0, -1.0, -2.0], [1, 2, 5, 6]),
    ([0.5] * 3, [1, 2, 3]),
])  # fmt: skip
def test_right_answers_are_shown_beside_wrong_ones(qualities, rows):
    assert rows_shown(qualities, most=4) == rows


def test_a_wrong_response_is_shown_with_the_right_answer():
    example = {"right": False, "answer": "She has 16 eggs and sells 9 of them, so it is\n#### 18"}
    assert (
        transcript.verdict(example) == r"wrong (right: 'gs and sells 9 of them, so it is\n#### 18')"
    )
    assert transcript.verdict({**example, "right": True}) == "right"


def test_samples_are_shown_as_they_are():
    """TensorBoard reads texts as Markdown: it would fetch pictures from where a model says."""
    prompt = "<|im_start|>user\nWhat is 2*3*4 | a_b_c? &lt; \\boxed{é} <!-- x --> 漢 😀"
    response = "1. **b**\n- `c` ![i](http://x/y.png) <img src='z'> <think>h</think>\n\n# end\n[i]: http://x\n<img src='z'>"
    example = {"source": "eval", "row": 1, "prompt": prompt, "response": response, "right": True}
    page = markdown_to_safe_html(transcript.as_markdown([example]))
    assert "<img" not in page and "<a" not in page
    texts = re.findall("<p>(.*?)</p>|<pre><code>(.*?)\n</code></pre>", page, re.DOTALL)
    read = [html.unescape("".join(text)) for text in texts]
    assert read == ["eval, row 1:", prompt, "right:", response]

    # Python takes U+2028 for the end of a line, Markdown does not.
    example["response"] = "\u2028![i](http://x/y.png)\r\v<img src='z'>"
    page = markdown_to_safe_html(transcript.as_markdown([example]))
    assert "<img" not in page and "<a" not in page


def test_what_report_to_takes():
    trackers.check(["none"])
    trackers.check(["tensorboard", "trackio"])
    refuses("--report_to wandbb", "expected", "wandb", call=lambda: trackers.check(["wandbb"]))
    refuses(
        "--report_to none trackio",
        "no other name",
        call=lambda: trackers.check(["none", "trackio"]),
    )


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_run_of_a_tracker(inputs, tmp_path):
    """trackio keeps its runs in files of its own, so this needs no network."""
    output = tmp_path / "out"
    flags = ["--model_name_or_path", inputs / "model", "--dataset_name", inputs / "dpo.jsonl", "--output_dir", output,
             "--train_batch_size", 4, "--micro_train_batch_size", 2, "--save_steps", 2, "--report_to", "trackio"]  # fmt: skip
    own = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    launch([], recipe("dpo"), *flags, "--max_steps", 2, env=own, fresh=True)
    launch([], recipe("dpo"), *flags, "--max_steps", 4, "--resume", "auto", env=own, fresh=True)
    (database,) = (tmp_path / "trackio").rglob("*.db")
    with sqlite3.connect(database) as connection:
        found = connection.execute(
            "select run_name, step, metrics from metrics order by step"
        ).fetchall()
    (name,) = {run for run, _, _ in found}
    assert name.startswith("out-") and [step for _, step, _ in found] == [1, 2, 3, 4]
    assert [json.loads(values)["loss"] for _, _, values in found] == pytest.approx(
        [line["loss"] for line in training_lines(output)]
    )
    assert not (output / "tensorboard").exists()


def test_charts_match_their_tags_in_training_and_evaluation():
    pattern = trackers.pattern_of(["loss", "rewards/chosen"])
    for tag in ("loss", "eval/loss", "eval/name/loss", "rewards/chosen", "eval/rewards/chosen"):
        assert re.match(pattern, tag), tag
    for tag in ("loss/policy_avg", "policy_loss", "eval/a/b/loss"):
        assert not re.match(pattern, tag), tag
    # Of held-out values alone.
    pattern = trackers.pattern_of(["loss", "eval/scores"])
    for tag in ("loss", "eval/loss", "eval/scores", "eval/name/scores"):
        assert re.match(pattern, tag), tag
    assert not re.match(pattern, "scores")
    # A tag is meant as it is written.
    assert not re.match(trackers.pattern_of(["pass@1.5"]), "pass@1x5")


def test_a_resumed_run_goes_on_in_the_same_curves(tmp_path):
    """What a killed run wrote after the checkpoint is hidden; page and settings are written once."""
    for first, last, resumed_from in ((1, 4, 0), (3, 5, 2)):
        checkpoint = small_run(tmp_path, report_to=["tensorboard"])
        checkpoint.run.progress.global_step = resumed_from
        checkpoint.run.logger.start()
        for step in range(first, last + 1):
            checkpoint.run.progress.global_step = step
            checkpoint.run.logger.write({"loss": step + 0.5 * resumed_from})
        checkpoint.run.accelerator.trackers[0].finish()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    found = [(event.step, event.value) for event in board.Scalars("loss")]
    assert found == [(1, 1), (2, 2), (3, 4), (4, 5), (5, 6)]
    assert len([*(tmp_path / "tensorboard").iterdir()]) == 2
    assert board.PluginTagToContent("custom_scalars") and board.PluginTagToContent("hparams")
