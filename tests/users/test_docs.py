"""What demos write: tags of the glossary and no others, the same in TensorBoard, samples, an actor that loads."""

import re
import statistics

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import recipes
import runs
from contracts.test_recipe import check_loads
from recipes import RECIPES

ROWS = 20  # held out
GPU_ONLY = {"perf/peak_memory_gib", "perf/mfu"}
# Tags of settings that no demo has; another test asserts them.
ELSEWHERE = {
    *("kl/reverse/<teacher>", "eval/kl/reverse/<teacher>"),
    # test_vllm.py
    *(f"sampling/importance_sampling_ratio/{name}" for name in ("mean", "max", "cut")),
    *("sampling/staleness", "sync/seconds", "sync/probe_difference"),
    # test_environments.py
    *(f"environment/{name}" for name in ("turns", "tool_calls", "failed_calls")),
    *("environment/model_tokens", "environment/environment_tokens"),
}


@pytest.fixture(scope="module", params=RECIPES)
def demo(request, tmp_path_factory):
    name = request.param
    output = tmp_path_factory.mktemp("docs") / name
    held_out = runs.ASSETS / RECIPES[name].held_out_file
    few = runs.first_rows(output.with_name(held_out.name), held_out, ROWS)
    more = ["--max_steps", 2, "--logging_steps", 1, "--micro_train_batch_size", 16]
    more += ["--eval_dataset_name", few, *RECIPES[name].glossary_flags]
    if RECIPES[name].data == "preferences":
        # To tokenise all pairs would be most of the run, and test_learning.py does it.
        more = [runs.ASSETS / f"{name}.yaml", "--dataset_name", held_out, *more]
    runs.launch(runs.config_launcher("ds_fp16"), runs.recipe(name), *more, "--output_dir", output)
    return name, output


def documented(name: str) -> set[str]:
    """The tags in a recipe's page, and those of docs/metrics.md that are also its own."""
    page = (runs.REPOSITORY / "docs" / f"{name}.md").read_text()
    section = page.split("## Metrics")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)
    tags = {tag for cell in cells for tag in re.findall("`([^`]+)`", cell)}
    sampling = ("ppo", "grpo", "distill")
    for tag, owners in re.findall(
        r"^\| `([^`]+)` \| ([\w, ]+) \|",
        (runs.REPOSITORY / "docs/metrics.md").read_text(),
        re.MULTILINE,
    ):
        named = owners.split(", ")
        if {"all", name} & set(named) or ("sampling" in named and name in sampling):
            assert tag not in tags, f"{tag} is on both pages"
            tags.add(tag)
    return tags


def test_the_glossary_is_the_list_of_logged_tags(demo):
    name, output = demo
    logged = {tag for line in runs.lines(output) for tag in line}
    of_functions = r"^(eval/)?rewards/[^/]+/(?=mean$)"
    assert documented(name) - GPU_ONLY - ELSEWHERE == {
        re.sub(of_functions, r"\1rewards/<function>/", tag) for tag in logged
    }
    charts = recipes.load(name).CHARTS  # the page of key metrics
    assert {tag for tags in charts.values() for tag in tags} <= documented(name)


def test_samples_are_those_that_the_metrics_count(demo):
    name, output = demo
    written = runs.samples(output)

    def expect_mean(line: dict, tag: str, source: str, step: int, value: str) -> None:
        if tag in line:
            found = [s for s in written if (s["source"], s["global_step"]) == (source, step)]
            assert source != "eval" or [s["row"] for s in found] == list(range(1, ROWS + 1))
            assert line[tag] == pytest.approx(statistics.fmean(s[value] for s in found), rel=1e-6)

    for line in runs.lines(output):
        step = line["global_step"]
        if not RECIPES[name].generates:
            expect_mean(line, "eval/exact_match", "eval", step, "right")
        expect_mean(line, "eval/scores", "eval", step, "score")
        expect_mean(line, "objective/scores", "rollout", step - 1, "score")


def test_the_actor_loads(demo):
    _, output = demo
    check_loads(output / "actor", runs.ASSETS / "model")


def test_tensorboard_holds_what_metrics_jsonl_holds(demo):
    _, output = demo
    shown = {}
    boards = {}
    for prefix, folder in (("", "tensorboard"), ("eval/", "tensorboard/eval")):
        board = EventAccumulator(str(output / folder), size_guidance={"scalars": 0})
        boards[prefix] = board.Reload()
        shown |= {
            (prefix + tag.removeprefix("progress/"), event.step): event.value
            for tag in board.Tags()["scalars"]
            for event in board.Scalars(tag)
        }
    # Straight lines come after what is learned. Both runs' tags are those of training.
    assert not {"epoch", "samples", "tokens"} & set(boards[""].Tags()["scalars"])
    # The page of key metrics, and what tells runs apart.
    assert boards[""].PluginTagToContent("custom_scalars")
    assert boards[""].PluginTagToContent("hparams")
    texts = [tag for tag in boards[""].Tags()["tensors"] if "text_summary" in tag]
    assert "arguments/text_summary" in texts
    assert ("samples/eval/text_summary" in texts) == any(runs.samples(output))
    written = {
        (tag, line["global_step"]): value
        for line in runs.lines(output)
        for tag, value in line.items()
        if tag != "global_step"
    }
    assert shown.keys() == written.keys() and len(runs.training_lines(output)) == 2
    for key, value in written.items():
        assert shown[key] == pytest.approx(value, rel=1e-6)  # TensorBoard keeps fp32
