"""Rollouts from vLLM servers: what is asked, what is refused, and that no stale weights are sampled from."""

import http.client
import itertools
import json
import shutil
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import runs
from bare_runs import bare_sampler
from fake_vllm import FakeServer
from plain_rollouts import expect_alike
from preference_recipes.models.distillation import DistillModel
from preference_recipes.rollouts import vllm
from preference_recipes.rollouts.teaching import AllTeachers
from preference_recipes.rollouts.vllm import Server
from runs import say

REWARDING = """
def some(prompts, responses, response_ids, **columns):
    return [float(sum(ids) % 7) for ids in response_ids]
"""
FLAGS = dict(reward_function="rewarding_of_test:some", rollout_batch_size=4, max_new_tokens=6)
FLAGS |= dict(train_batch_size=4, micro_train_batch_size=2, max_length=60, learning_rate=3e-3)
FLAGS |= dict(max_steps=4, eval_dataset_name="held_out.jsonl", eval_steps=2)
GRPO = dict(FLAGS, n_samples_per_prompt=2, drop_equal_groups=False, advantage_std="none")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    runs.tiny_llama(folder / "model")
    prompts = [say("user", f"{n}+{n}=" + "x" * (n % 3)) for n in range(14)]
    rows = [{"prompt": prompt, "answer": str(2 * n)} for n, prompt in enumerate(prompts)]
    runs.write_jsonl(folder / "prompts.jsonl", rows[:12])
    runs.write_jsonl(folder / "held_out.jsonl", rows[12:])
    (folder / "rewarding_of_test.py").write_text(REWARDING)
    return folder


def started(inputs):
    return FakeServer(inputs / "model")


server = pytest.fixture(started, name="server")
second = pytest.fixture(started, name="second")


def all_flags(inputs, output, settings: dict, *urls: str) -> list:
    servers = {"vllm_url": list(urls)} if urls else {}
    return runs.short_run(inputs, "prompts", output, **settings | servers)


def run(inputs, output, settings, *urls, name="grpo", launcher="plain", check=True):
    flags = all_flags(inputs, output, settings, *urls)
    return runs.launch(runs.LAUNCHERS[launcher], runs.recipe(name), *flags, cwd=inputs, check=check)


def versions_of(server) -> list[str]:
    """The versions of the weights that a server was given, in their order."""
    calls = [c for _, c in server.requests if c.get("method") == "note_version"]
    return [content["kwargs"]["version"] for content in calls]


def said_at_the_end(done) -> str:
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stdout
    return done.stdout.strip().splitlines()[-1]


# ============================================================ what is asked


def test_a_rollout_is_asked_for_after_a_proven_synchronisation(inputs, server, tmp_path):
    run(inputs, tmp_path / "out", GRPO, server.url)
    sync = ["/pause?mode=wait", "load", "/reset_prefix_cache", "note_version", "/resume"]
    probe = ["/v1/completions"] * 4
    rollout = ["/v1/completions"] * 4 + ["describe"]
    held_out = ["/v1/completions"] * 2 + ["describe"]
    start = ["describe", *sync, *probe]
    # Rollouts of 4 prompts, 8 samples, 2 updates each. Evaluations before, after 2 and after 4; the
    # one after 2 synchronises for the rollout that follows, too.
    expected = [*start, *held_out, *rollout]
    expected += [*sync, *probe, *held_out, *rollout]
    expected += [*sync, *probe, *held_out]
    assert server.paths() == expected
    versions = versions_of(server)
    assert len(set(versions)) == 3
    assert server.answered == [versions[0]] * 10 + [versions[1]] * 10 + [versions[2]] * 6

    asked = [content for path, content in server.requests if path == "/v1/completions"]
    sampled = asked[6:10]
    first = sampled[0]
    whole = dict(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, logit_bias={})
    penalties = dict(presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)
    returned = dict(return_token_ids=True, logprobs=0, skip_special_tokens=False)
    ends = dict(max_tokens=6, ignore_eos=True, stop_token_ids=[1])
    expected = {**whole, **penalties, **returned, **ends, "model": None, "n": 2}
    assert first == {**expected, "prompt": first["prompt"], "seed": first["seed"]}
    # Every response has a seed of its own: the server adds the number of the response.
    seeds = [
        request["seed"] + number
        for request in [*sampled, *asked[16:20]]
        for number in range(request["n"])
    ]
    assert len(set(seeds)) == 16
    assert all(request["temperature"] == 0 for request in asked[4:6])

    # What was answered is what was trained on.
    said = runs.samples(tmp_path / "out")
    prompts = [row["prompt"] for row in said if row["source"] == "rollout"]
    assert len(prompts) == 16 and len(set(prompts)) == 8
    line = runs.training_lines(tmp_path / "out")[0]
    assert line["sampling/sampling_logp_difference/max"] < 1e-5
    assert line["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-5)
    assert line["sampling/importance_sampling_ratio/cut"] == 0
    assert 0 < line["sync/probe_difference"] < 1e-5 and line["sync/seconds"] > 0
    assert "sampling/staleness" not in line
    # After the last update nothing is synchronised for training.
    assert set(runs.lines(tmp_path / "out")[-1]) == set(runs.evaluation_lines(tmp_path / "out")[0])


def test_tokens_that_the_tokenizer_does_not_have_are_never_drawn(tokenizer):
    model = types.SimpleNamespace(
        get_output_embeddings=lambda: types.SimpleNamespace(out_features=300),
        generation_config=types.SimpleNamespace(eos_token_id=[5, 2]),
    )
    sampler = bare_sampler(tokenizer=tokenizer, max_length=5)
    sampler.unwrapped = types.SimpleNamespace(vocab_size=298, model=model)
    uniforms = np.array([[[0.25] * 3] * 2, [[0.5] * 3] * 2])
    first, second, third = vllm.make_requests(
        sampler, [[7], [8, 9], [7] * 4], uniforms[[0, 1, 1]], 0.7
    )
    assert first["logit_bias"] == {"298": -100.0, "299": -100.0}
    assert (first["seed"], second["seed"]) == (2**38 * 2, 2**39 * 2)
    assert (second["prompt"], second["temperature"], second["max_tokens"]) == ([8, 9], 0.7, 3)
    assert first["stop_token_ids"] == [1, 2, 5]
    assert third["max_tokens"] == 1  # of an episode that has less room than others


@pytest.mark.parametrize("name", ["ppo", "distill"])
def test_ppo_and_distillation_sample_from_a_server(inputs, server, tmp_path, name):
    """With adapters, which the server loads in place. The reference for PPO's critic is untouched."""
    settings = dict(FLAGS, lora_r=2, learning_rate=0.03)
    if name == "distill":
        del settings["reward_function"]
        settings |= dict(teacher_model_name_or_path=runs.ASSETS / "teacher", loss_type="sampled")
    run(inputs, tmp_path / "out", settings, server.url, name=name)
    folders = {
        content["lora_path"] for path, content in server.requests if path == "/v1/load_lora_adapter"
    }
    assert folders == {str((tmp_path / "out/for_vllm").resolve())}
    asked = [content for path, content in server.requests if path == "/v1/completions"]
    assert {request["model"] for request in asked} == {"actor"}
    found = runs.training_lines(tmp_path / "out")
    assert [line["global_step"] for line in found] == [1, 2, 3, 4]
    for line in found:
        assert line["sampling/sampling_logp_difference/max"] < 1e-5
        assert line["sync/probe_difference"] < 1e-5
        assert line["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)


# ============================================================ the same run, however it is served


@pytest.mark.parametrize("launcher", ["ddp", runs.slow("zero3")])
def test_several_servers_and_processes_give_the_same_run(
    inputs, server, second, tmp_path, launcher
):
    run(inputs, tmp_path / "one", GRPO, server.url)
    run(inputs, tmp_path / "two", GRPO, server.url, second.url, launcher=launcher)
    # The prompts are shared, the probe is not.
    assert second.paths().count("/v1/completions") == 3 * 4 + (2 * 4 + 3 * 2) // 2
    expect_alike(tmp_path / "one", tmp_path / "two")


def test_a_killed_run_resumes_as_if_it_had_never_been_killed(inputs, server, tmp_path):
    """At a checkpoint between the two updates of a rollout, while the next one is sampled ahead."""
    settings = dict(GRPO, rollouts_ahead=1, max_steps=8, max_epochs=3)
    settings |= dict(save_steps=3, eval_steps=4)
    run(inputs, tmp_path / "whole", settings, server.url)
    flags = all_flags(inputs, tmp_path / "half", settings, server.url)
    process = runs.start(runs.LAUNCHERS["plain"], runs.recipe("grpo"), *flags, cwd=inputs)
    checkpoint = tmp_path / "half/checkpoints/global_step_000003"
    while not checkpoint.exists():
        assert process.poll() is None
    runs.kill(process)
    for later in checkpoint.parent.glob("global_step_*"):
        if later != checkpoint:  # the kill came late
            shutil.rmtree(later)
    assert torch.load(checkpoint / "sampler.pt") is not None
    server.restart()  # it lost its weights, too
    run(inputs, tmp_path / "half", dict(settings, resume="auto"), server.url)
    assert runs.timeless(tmp_path / "half") == runs.timeless(tmp_path / "whole")
    assert runs.samples(tmp_path / "half") == runs.samples(tmp_path / "whole")
    assert torch.equal(runs.weights(tmp_path / "half"), runs.weights(tmp_path / "whole"))


def test_one_rollout_ahead_is_sampled_with_the_weights_before_the_updates_of_this_one(
    inputs, server, tmp_path
):
    settings = dict(GRPO, rollouts_ahead=1, max_steps=6, max_epochs=3, eval_steps=100)
    run(inputs, tmp_path / "out", settings, server.url)
    # A rollout has two updates. The second is sampled with the weights of the first.
    staleness = [line.get("sampling/staleness") for line in runs.training_lines(tmp_path / "out")]
    assert staleness == [None, None, 2, None, 2, None]
    versions = versions_of(server)
    # Before the first update, after it for the third rollout, and for the last evaluation.
    assert len(versions) == 3
    asked = [content for path, content in server.requests if path == "/v1/completions"]
    sampled = [version for version, c in zip(server.answered, asked) if c["n"] == 2]
    assert sampled == [versions[0]] * 8 + [versions[1]] * 4
    # The correction is at work: the samples are not those of the policy.
    later = runs.training_lines(tmp_path / "out")[2]
    assert later["sampling/sampling_logp_difference/max"] > 1e-4
    assert later["sampling/importance_sampling_ratio/max"] > 1.001
    # Staleness is no fault of the server.
    assert later["sync/probe_difference"] < 1e-5


# ============================================================ weights that are not those of training


def delay(server, folder) -> None:
    """The weights that it loads are those of the synchronisation before."""
    server.loaded.append(load_file(folder / "model.safetensors"))
    save_file(server.loaded[-2:][0], folder / "model.safetensors", metadata={"format": "pt"})


def corrupt(server, folder) -> None:
    """One layer is lost on the way."""
    state = load_file(folder / "model.safetensors")
    state["model.layers.1.mlp.down_proj.weight"] *= 0
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("fault", [delay, corrupt])
def test_wrong_weights_end_the_run_within_one_rollout(inputs, server, tmp_path, fault):
    server.loaded = []

    def before_it_loads(path, content):
        if content.get("method") == "load":
            fault(server, Path(content["kwargs"]["folder"]))

    server.fault = before_it_loads
    settings = dict(GRPO, temperature=0.7, eval_steps=100)
    said = said_at_the_end(run(inputs, tmp_path / "out", settings, server.url, check=False))
    assert server.url in said
    if fault is delay:
        assert "does not have the weights that it was given" in said
    else:
        assert "log-probs differ from those of training by" in said and "docs/vllm.md" in said
    # At most the two updates of one rollout: no other is sampled.
    trained = runs.lines(tmp_path / "out") if (tmp_path / "out/metrics.jsonl").exists() else []
    assert len([line for line in trained if "loss" in line]) <= 2


def test_a_server_that_was_started_again_in_a_rollout_ends_the_run(inputs, server, tmp_path):
    asked = itertools.count()

    def restart(path, content):
        if path == "/v1/completions" and content["n"] == 2 and next(asked) == 1:
            server.restart()

    server.fault = restart
    done = run(inputs, tmp_path / "out", GRPO, server.url, check=False)
    assert "got other weights while it sampled" in said_at_the_end(done)


# ============================================================ servers that fail


def test_a_server_that_would_cut_responses_is_refused_at_once(inputs, server, tmp_path):
    server.worker.model_runner.model_config.max_model_len = 59
    said = said_at_the_end(run(inputs, tmp_path / "out", GRPO, server.url, check=False))
    assert said == "--max_length 60: a vLLM server has --max-model-len 59, less"
    assert server.paths() == ["describe"]


REQUEST = {"prompt": [5, 6], "n": 2, "max_tokens": 3, "stop_token_ids": [1], "temperature": 1.0}


def answer_of(**changes) -> dict:
    logprobs = {"token_logprobs": [-1.0, -2.0]}
    ids = {"token_ids": [7, 1], "prompt_token_ids": [5, 6]}
    choice = {"index": 0, "logprobs": logprobs, "finish_reason": "stop", **ids}
    return {"choices": [{**choice, "index": 1}, {**choice, **changes}]}


@pytest.mark.parametrize(
    "status, answer, parts",
    [
        (500, {"error": "out of memory"}, ["answered 500", "out of memory"]),
        (200, answer_of(prompt_token_ids=[2, 5, 6]), ["to another prompt", "[2, 5, 6]"]),
        (200, {"choices": answer_of()["choices"][:1]}, ["gave 1 responses, asked for 2"]),
        (200, answer_of(token_ids=[7, 8]), ["one that was cut", "[7, 8]"]),
        (200, answer_of(logprobs={"token_logprobs": [-1.0]}), ["one that was cut", "[-1.0]"]),
    ],
)
def test_answers_that_are_refused(server, status, answer, parts):
    server.fault = lambda path, content: (status, json.dumps(answer))
    client = Server(server.url)
    runs.refuses(server.url, *parts, call=lambda: client.complete(REQUEST))


def test_a_server_that_dies_while_it_answers_is_named(monkeypatch):
    def half_an_answer(request, timeout):
        raise http.client.IncompleteRead(b"{")

    monkeypatch.setattr(vllm.OPENER, "open", half_an_answer)
    runs.refuses(
        "gave no answer", "IncompleteRead", call=lambda: Server("http://u").complete(REQUEST)
    )


def test_answers_in_another_order_are_put_in_order(server):
    answer = answer_of(token_ids=[8, 9, 1], logprobs={"token_logprobs": [-1.0, -1.5, -2.0]})
    server.fault = lambda path, content: (200, json.dumps(answer))
    first, second = Server(server.url).complete(REQUEST)
    assert (first.ids, first.logps) == ([8, 9, 1], [-1.0, -1.5, -2.0])
    assert (second.ids, second.logps) == ([7, 1], [-1.0, -2.0])


# ============================================================ teachers; their numbers: test_distill.py


def told(answer: dict) -> list[dict]:
    return answer["choices"][0]["prompt_logprobs"]


def as_logits(answer: dict) -> None:
    for entry in told(answer)[-1].values():
        entry["logprob"] += 3


def with_unknown_token(answer: dict) -> None:
    entries = told(answer)[-1]
    second_best = next(token for token in entries if entries[token]["rank"] == 2)
    entries["264"] = entries.pop(second_best)


ASKED = "/v1/completions"
FAULTS = [  # what is asked for, how the answer is changed, and what is said of it
    (ASKED, lambda answer: told(answer).pop(), "does not tell 5 log-probs of each token asked"),
    (ASKED, lambda answer: answer["choices"][0]["prompt_token_ids"].append(5), "does not tell 5"),
    (ASKED, lambda answer: answer["choices"][0].pop("prompt_logprobs"), "does not tell 5"),
    (ASKED, lambda answer: told(answer)[-1].popitem(), "does not tell 5 log-probs"),
    (ASKED, with_unknown_token, "or of tokens beyond the 264 of the student"),
    (ASKED, as_logits, "tells no log-probs (its --logprobs-mode)"),
    ("/tokenize", lambda answer: answer["tokens"].insert(9, 7), "another tokenizer: the text"),
    ("/v1/models", lambda answer: answer["data"][0].update(max_model_len=99), "max-model-len 99"),
]


@pytest.mark.parametrize("path, change, said", FAULTS)
def test_a_teacher_that_is_refused(accelerator, tokenizer, server, path, change, said):
    def fault(asked, content):
        answer = json.loads(json.dumps(server.answer(asked, content)))
        if asked == path:
            change(answer)
        return 200, json.dumps(answer)

    server.fault = fault
    names = dict(teacher=None, teacher_model_name_or_path=None, teacher_url=[server.url])
    sizes = dict(teacher_prompt=None, temperature=1.0, lora_r=0, teacher_top_k=5, max_length=99)
    args = types.SimpleNamespace(**names, **sizes)
    model = DistillModel(server.worker.model)
    runs.refuses(server.url, said, call=lambda: AllTeachers(accelerator, args, tokenizer, model))


TAUGHT = dict(FLAGS, n_samples_per_prompt=2, max_epochs=3, max_steps=8, eval_steps=100)
TAUGHT |= dict(rollouts_ahead=1, teacher_top_k=9)
del TAUGHT["reward_function"]


@pytest.mark.parametrize("launcher", ["plain", runs.slow("ddp")])
def test_a_teacher_dies_and_comes_back(inputs, server, second, tmp_path, launcher):
    """Nothing is lost. And while the teacher is asked about a rollout, the next one is sampled."""
    in_time = []

    def is_asked_about(rollout: int) -> bool:
        """Once it is asked at the start, and twice in the evaluation before the first update."""
        return second.paths().count(ASKED) > 3 + 8 * rollout

    def wait_for_the_teacher(path, content):
        if content.get("n") == 2:
            rollout = (sum(asked.get("n") == 2 for _, asked in server.requests) - 1) // 4
            end = time.monotonic() + 60
            while rollout and not is_asked_about(rollout - 1) and time.monotonic() < end:
                time.sleep(0.01)
            in_time.append(not rollout or is_asked_about(rollout - 1))

    settings = dict(TAUGHT, teacher_url=second.url)
    how = dict(name="distill", launcher=launcher)
    healthy = second.fault
    server.fault = wait_for_the_teacher
    run(inputs, tmp_path / "whole", settings, server.url, **how)
    assert in_time == [True] * 16

    second.requests.clear()
    server.fault = healthy
    second.fault = lambda path, content: (503, "gone") if is_asked_about(2) else None
    done = run(inputs, tmp_path / "half", settings, server.url, **how, check=False)
    said_at_the_end(done)
    assert f"{second.url}{ASKED} answered 503 'gone'" in done.stdout
    assert (tmp_path / "half/checkpoints/global_step_000004").exists()
    second.fault = healthy
    run(inputs, tmp_path / "half", dict(settings, resume="auto"), server.url, **how)
    assert runs.timeless(tmp_path / "half") == runs.timeless(tmp_path / "whole")
    assert runs.samples(tmp_path / "half") == runs.samples(tmp_path / "whole")
    assert torch.equal(runs.weights(tmp_path / "half"), runs.weights(tmp_path / "whole"))
