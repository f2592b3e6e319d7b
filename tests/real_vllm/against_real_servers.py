"""Runs against real vLLM servers, on a CPU: `make test-vllm`, which installs vLLM in an environment of its own.

A server takes about a minute to start, so there are four: of a model whose head is tied to its
embeddings, of one whose head is not, both in fp32, of the first in bf16, with adapters, and of a
teacher in fp32.
"""

import math
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from preference_recipes.rollouts.vllm import Server
from runs import (
    ASSETS,
    REPOSITORY,
    evaluation_lines,
    flags_of,
    launch,
    recipe,
    tiny_llama,
    training_lines,
)

VLLM = Path(os.environ.get("VLLM", REPOSITORY / ".venv-vllm/bin/vllm")).absolute()
SEEDS = (0, 1, 2)
FLAGS = dict(reward_function="tests.real_vllm.even_rewards:even", rollout_batch_size=16)
FLAGS |= dict(max_new_tokens=8, max_length=64, n_samples_per_prompt=8, train_batch_size=64)
FLAGS |= dict(micro_train_batch_size=64, learning_rate=3e-4, max_steps=20, eval_steps=100)
FLAGS |= dict(
    dataset_name=ASSETS / "prompts_train.jsonl", eval_dataset_name=ASSETS / "prompts_eval.jsonl"
)


# ============================================================ models and servers


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """Two Llamas, `tied` and `untied`, that have learned to add a little. vLLM needs heads of at least 32."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("tied", "untied"):
        sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=4)
        heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
        settings = dict(**sizes, **heads, initializer_range=0.02)
        new = tiny_llama(folder / "new" / name, tie_word_embeddings=name == "tied", **settings)
        launch(
            [],
            recipe("sft"),
            ASSETS / "sft.yaml",
            *("--model_name_or_path", new, "--output_dir", folder / "sft" / name),
            *("--max_steps", 200, "--learning_rate", 2e-3, "--exact_match_rows", 0),
            *("--micro_train_batch_size", 64),
        )
        shutil.move(folder / "sft" / name / "actor", folder / name)
    return folder


class RealServer:
    """A process of `vllm serve` on a free port; the constructor waits until it answers."""

    def __init__(self, model: Path, log: Path, *flags: str, dtype: str = "float32"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        settings = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{REPOSITORY}:{Path(__file__).parent}",
        }
        command = [
            *(VLLM, "serve", model, "--host", "127.0.0.1", "--port", port, "--dtype", dtype),
            *("--max-model-len", 256, "--enforce-eager", "--generation-config", "vllm"),
            *("--logprobs-mode", "processed_logprobs"),
            *("--worker-extension-cls", "faulty_worker.Faulty", *flags),
        ]
        self.folder = model
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                env=os.environ | settings,
                cwd=log.parent,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        while not self.answers():
            assert self.process.poll() is None, log.read_text()[-4000:]
            time.sleep(0.5)
        self.client = Server(self.url)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=60):
                return True
        except OSError:
            return False

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def started(models, tmp_path_factory, name: str, *flags: str, dtype: str = "float32"):
    log = tmp_path_factory.mktemp("server") / "log"
    server = RealServer(models / name, log, *flags, dtype=dtype)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def tied(models, tmp_path_factory):
    yield from started(models, tmp_path_factory, "tied")


@pytest.fixture(scope="module")
def untied(models, tmp_path_factory):
    yield from started(models, tmp_path_factory, "untied")


@pytest.fixture(scope="module")
def bf16(models, tmp_path_factory):
    flags = ["--enable-lora", "--max-lora-rank", "8"]
    yield from started(models, tmp_path_factory, "tied", *flags, dtype="bfloat16")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    widen_heads(ASSETS / "teacher", folder / "teacher")
    yield from started(folder, tmp_path_factory, "teacher", "--max-logprobs", "264")


def widen_heads(folder: Path, wide: Path, size: int = 32) -> None:
    """Writes the same function as a model whose heads have `size` numbers: the new ones are zeros."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    old = config.head_dim
    weights = model.state_dict()
    for name, weight in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # Rotary embeddings pair number i of the first half with number i of the second.
            halves = weight.unflatten(0, (-1, 2, old // 2))
            new = torch.nn.functional.pad(halves, (0, 0, 0, (size - old) // 2)).flatten(0, 2)
            # Scores are divided by the root of a head's size.
            weights[name] = new * (math.sqrt(size / old) if "q_proj" in name else 1)
        elif name.endswith("v_proj.weight"):
            heads = weight.unflatten(0, (-1, old))
            weights[name] = torch.nn.functional.pad(heads, (0, 0, 0, size - old)).flatten(0, 1)
        elif name.endswith("o_proj.weight"):
            heads = weight.unflatten(1, (-1, old))
            weights[name] = torch.nn.functional.pad(heads, (0, size - old)).flatten(1)
    config.head_dim = size
    # Angle i turns by theta ** (-2 i / size) a position: as fast as before.
    config.rope_parameters["rope_theta"] **= size / old
    config.dtype = "float32"
    shutil.copytree(folder, wide)
    LlamaForCausalLM._from_config(config).save_pretrained(wide, state_dict=weights)


def run(model, output, *urls, check=True, **settings):
    flags = flags_of({"model_name_or_path": model, "output_dir": output, **FLAGS, **settings})
    flags += ["--vllm_url", *urls] if urls else []
    return launch([], recipe("grpo"), *flags, check=check, timeout=1200)


def report(capsys, words: str) -> None:
    """Shows a figure in the terminal: those of the closing notes and of docs/vllm.md."""
    with capsys.disabled():
        print(f"\n    {words}", flush=True)


# ============================================================ weights


REQUEST = dict(max_tokens=24, stop_token_ids=[1], ignore_eos=True)
REQUEST |= dict(logprobs=0, return_token_ids=True)


def greedy(server: RealServer, prompts: list[list[int]]) -> list:
    request = dict(REQUEST, n=1, temperature=0.0)
    return [server.client.complete({**request, "prompt": prompt})[0].ids for prompt in prompts]


def greedy_of_transformers(folder: Path, prompts: list[list[int]]) -> list:
    model = AutoModelForCausalLM.from_pretrained(folder)
    responses = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=24,
            do_sample=False,
        )
        responses.append(ids[0, len(prompt) :].tolist())
    return responses


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_weights_there_and_back(models, request, name):
    """A, then B, then A: greedy responses are those of transformers each time."""
    server = request.getfixturevalue(name)
    prompts = [[2, 50 + n, 51, 52 + n, 3] for n in range(8)]
    seen = []
    for folder in (models / name, models / "new" / name, models / name):
        server.client.call("load", folder=str(folder))
        server.client.send("/reset_prefix_cache")
        seen.append(greedy(server, prompts))
        assert seen[-1] == greedy_of_transformers(folder, prompts)
    assert seen[0] != seen[1]


def test_a_seed_gives_the_same_responses_alone_and_in_a_batch(tied):
    request = dict(REQUEST, prompt=[2, 60, 3], temperature=1.0)
    ask = lambda n, seed: tied.client.complete(dict(request, n=n, seed=seed))
    together = ask(8, 100)
    alone = [ask(1, 100 + number)[0] for number in range(8)]
    assert [response.ids for response in together] == [response.ids for response in alone]
    assert len({tuple(response.ids) for response in together}) > 4


def test_lost_weights_end_the_run_within_one_rollout(models, tied, tmp_path):
    """The server loses weights from the second synchronisation on. Other faults are in test_vllm.py."""
    run(models / "tied", tmp_path / "before", tied.url, max_steps=1)
    tied.client.call("lose", is_on=True)
    try:
        done = run(models / "tied", tmp_path / "out", tied.url, check=False)
    finally:
        tied.client.call("lose", is_on=False)
    assert done.returncode == 1
    said = done.stdout.strip().splitlines()[-1]
    assert tied.url in said and ("log-probs differ" in said or "does not have the weights" in said)
    file = tmp_path / "out/metrics.jsonl"
    trained = training_lines(tmp_path / "out") if file.exists() else []
    assert len(trained) <= 2  # the updates of one rollout


# ============================================================ whole runs


def test_grpo_learns_as_with_transformers(models, tied, tmp_path, capsys):
    """Twenty updates, three seeds: mean scores differ by no more than those of the seeds do."""
    means = {"vllm": [], "transformers": []}
    for seed in SEEDS:
        for name, urls in (("vllm", [tied.url]), ("transformers", [])):
            output = tmp_path / f"{name}{seed}"
            run(models / "tied", output, *urls, seed=seed, train_batch_size=128)
            found = training_lines(output)
            scores = [line["reward"] for line in found]
            means[name].append(sum(scores) / len(scores))
            shown = " ".join(f"{score:.2f}" for score in scores[::3])
            report(capsys, f"{name}, seed {seed}, every third score: {shown}")
            before, *_, after = [line["eval/scores"] for line in evaluation_lines(output)]
            assert after > before + 0.3
            if urls:
                largest = max(line["sampling/sampling_logp_difference/max"] for line in found)
                probe = max(line["sync/probe_difference"] for line in found)
                seconds = sum(line["sync/seconds"] for line in found) / len(found)
                apart = f"log-probs differ by {largest:.2g}, probes by {probe:.2g}"
                report(capsys, f"{apart}; a synchronisation took {seconds:.2f} s")
                assert largest < 1e-4
    spread = max(max(of_seeds) - min(of_seeds) for of_seeds in means.values())
    difference = abs(sum(means["vllm"]) - sum(means["transformers"])) / len(SEEDS)
    report(capsys, f"difference of the means {difference:.3f}, spread of the seeds {spread:.3f}")
    assert difference < max(spread, 0.05)


def test_bf16_and_adapters_in_place(models, bf16, tmp_path, capsys):
    for name, settings in (("all weights", {}), ("adapters", dict(lora_r=8, learning_rate=5e-3))):
        output = tmp_path / name
        if name == "adapters":
            # The base is what the server was started with: the run before left other weights there.
            bf16.client.call("load", folder=str(models / "tied"))
            bf16.client.send("/reset_prefix_cache")
        run(models / "tied", output, bf16.url, max_steps=10, **settings)
        found = training_lines(output)
        synchronised = [line for line in found if "sync/seconds" in line]
        probes = [line["sync/probe_difference"] for line in synchronised]
        cut = [line["sampling/importance_sampling_ratio/cut"] for line in found]
        seconds = [round(line["sync/seconds"], 2) for line in synchronised]
        shown = f"probes {min(probes):.3g} to {max(probes):.3g}, cut {max(cut):.3f}"
        report(capsys, f"bf16, {name}: {shown}, sync {seconds} s")
        assert 1e-4 < max(probes) < 0.2
        before, after = (evaluation_lines(output)[n]["eval/scores"] for n in (0, -1))
        assert after > before


# ============================================================ teachers


def distill(output, *teacher, student=ASSETS / "model", held_out=True, **settings):
    """Runs the demo of distill.py with another teacher."""
    own = dict(model_name_or_path=student, output_dir=output, rollout_batch_size=128)
    own |= dict(train_batch_size=128, micro_train_batch_size=128, max_length=64, max_new_tokens=8)
    own |= dict(learning_rate=5e-4, lr_scheduler_type="linear", eval_steps=1000)
    own |= {"dataset_name": FLAGS["dataset_name"]}
    own |= {"eval_dataset_name": FLAGS["eval_dataset_name"]} if held_out else {}
    launch([], recipe("distill"), *flags_of(own | settings), *teacher, timeout=1200)
    return training_lines(output), evaluation_lines(output)


def test_a_student_is_no_further_from_itself_than_the_server_rounds(teacher, tmp_path, capsys):
    folder = teacher.folder
    served = ("--teacher_url", teacher.url, "--teacher_top_k", 264)
    settings = dict(student=folder, max_steps=1, held_out=False)
    [line], _ = distill(tmp_path / "served", *served, **settings)
    report(capsys, f"KL to the same model behind a server: {line['kl/reverse']:.2g}")
    assert abs(line["kl/reverse"]) < 1e-6 and abs(line["kl/forward"]) < 1e-6
    assert line["teacher/agreement"] == pytest.approx(1, abs=1e-3)


def test_a_served_teacher_teaches_as_a_local_one(teacher, tmp_path, capsys):
    """The first loss where it tells of all tokens, and the demo where it tells of 16."""
    local = ("--teacher_model_name_or_path", teacher.folder)
    all_told = ("--teacher_url", teacher.url, "--teacher_top_k", 264)
    some_told = ("--teacher_url", teacher.url, "--teacher_top_k", 16)
    [line], _ = distill(tmp_path / "all", *all_told, max_steps=1, held_out=False)
    learned = {}
    for name, flags in (("top 16", some_told), ("local", local)):
        lines, evaluations = distill(tmp_path / name, *flags, max_steps=60)
        right = learned[name] = [found["eval/exact_match"] for found in evaluations]
        report(capsys, f"{name}: {right[0]:.3f} are right before, {right[-1]:.3f} after 60 updates")
    report(capsys, f"first loss {line['loss']:.7f} and {lines[0]['loss']:.7f}")
    assert line["loss"] == pytest.approx(lines[0]["loss"], abs=1e-4)
    assert min(right[-1] for right in learned.values()) >= 0.9
