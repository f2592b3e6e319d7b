"""What is to be run on a GPU, in this order.

    python benchmarks/gpu.py [--only NAME ...] [--folder DIR] [--jobs N] [--limit SECONDS] [--tiny]
        [--hh hh_pairs.jsonl.gz] [--gsm8k gsm8k_train.jsonl]

    configs     DPO's demo under every YAML that one GPU can run: two updates, an evaluation, a
                checkpoint, and a third update after a resume
    recipes     the same of the other recipes, under single_gpu.yaml and ds_fp16.yaml
    exact       every recipe's demo in fp32, three updates: how far the logged numbers of the GPU
                are from the CPU's, those of small micro-batches from large ones, and those of a
                resumed run from one that never stopped
    waits       how often an update waits for the GPU, by torch.cuda.set_sync_debug_mode: no more
                often with four times the micro-batches
    generation  tokens a second of GRPO's rollouts: a random model of 0.5 B parameters, 128
                responses of 256 tokens; recording.py on it, in fp32 and in bf16, with prompts of 64
                tokens, and with such of 1,024, whose keys are kept once for eight responses
    attention   tokens a second of DPO and SFT with cuDNN's attention and without, and of DPO
                without shared prompts, alternately
    anchor      SFT of Qwen3-0.6B's shape on rows of 8,192 tokens: tokens a second, MFU, memory; and
                a profile of an update of short rows: for how much of it the GPU works, on what
    gemma       SFT and DPO of gemma-3-1b's shape on rows of 8,192 tokens, and DPO on such of 59,392
                with gradient checkpointing: tokens a second and memory
    precision   precision.py, 0.5 B
    rl          rl_precision.py
    dpo, sft, grpo  peers.py against TRL, with --hh and --gsm8k

It needs one GPU and no network. The last three need TRL 1.16: `pip install -e '.[peers]'` from
carried wheels. Only ds_zero3_offload.yaml needs a compiler, g++ and ninja.

Each step ends within --limit and writes benchmarks/results/gpu/NAME.json: seconds, exit status, the
end of what a failed command printed, and what was measured. A step that was passed is not run
again. With --folder, one that ran out of time goes on where it was. Steps that measure no time run
--jobs commands at once.

Without a GPU, or with `--tiny`, the first eight run on the CPU with a tiny model, to see that this
script works. Nothing is written to benchmarks/results then.
"""

import argparse
import importlib.util
import itertools
import json
import os
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

REPOSITORY = Path(__file__).resolve().parent.parent
ASSETS = REPOSITORY / "assets"
CONFIGS = REPOSITORY / "accelerate_configs"
RESULTS = REPOSITORY / "benchmarks" / "results" / "gpu"
SAMPLING = ("ppo", "grpo", "distill")
RECIPES = ("sft", "reward", "dpo", *SAMPLING)
# Which of the rows in assets/ a recipe's demo reads.
ROWS = {"sft": "sft", "reward": "preferences", "dpo": "preferences"}
ROWS |= dict.fromkeys(SAMPLING, "prompts")
SEVERAL_NODES = "multi_node"


# ============================================================ one command
class Step:
    """A step while it runs: its commands, its time, what it found."""

    def __init__(self, args, name: str):
        self.args = args
        self.folder = args.folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.begun = time.monotonic()
        self.runs: list[dict] = []
        self.jobs = 1  # commands that run now; timed ones run alone

    def at_once(self, function, items) -> list:
        """Returns function(item) for each item, --jobs of them at a time."""
        self.jobs = self.args.jobs
        with ThreadPoolExecutor(self.jobs) as pool:
            return list(pool.map(function, items))

    def run(self, name: str, *command, on_cpu: bool = False) -> bool:
        """Runs `python *command`; whether it ended well within the time that is left."""
        left = self.args.limit - (time.monotonic() - self.begun)
        words = [sys.executable, *map(str, command)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
        if self.jobs > 1:
            environment["OMP_NUM_THREADS"] = str(max(1, os.cpu_count() // self.jobs))
        if self.args.tiny or on_cpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        started = time.monotonic()
        process = subprocess.Popen(
            words,
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=max(left, 1))
            status = process.returncode
        except subprocess.TimeoutExpired:
            # Also what a launcher started: it would keep the GPU's memory from all that follow.
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            status = "out of time"
        seconds = round(time.monotonic() - started, 1)
        run = {"name": name, "seconds": seconds, "status": status}
        if status != 0:
            run["output"] = output[-20000:]
        self.runs.append(run)
        print(f"{name}: {'passed' if status == 0 else status} in {seconds} s", flush=True)
        if status != 0:
            print(output[-3000:], flush=True)
        return status == 0

    def recipe(
        self,
        name: str,
        recipe: str,
        config: str,
        *flags,
        precision: str = "",
        on_cpu: bool = False,
        within: tuple = (),
    ) -> bool:
        """Runs a recipe under a YAML, on one process, in another precision than the YAML's.

        Args:
            within: see `run_within`.
        """
        launcher = ["-m", "accelerate.commands.launch", "--config_file", CONFIGS / f"{config}.yaml"]
        launcher += ["--num_processes", 1, "--main_process_port", 0]
        if precision:
            launcher += ["--mixed_precision", precision]
        script = REPOSITORY / "recipes" / f"{recipe}.py"
        if within:
            launcher += [__file__, "--within", *within]
        return self.run(name, *launcher, script, *flags, on_cpu=on_cpu)


# ============================================================ the steps
def demo(recipe: str, folder: Path) -> list:
    """Returns the flags of a demo with few held-out rows, most of which take long to answer."""
    held_out = folder / f"{ROWS[recipe]}.jsonl"
    if not held_out.exists():
        rows = (ASSETS / f"{ROWS[recipe]}_eval.jsonl").read_text(encoding="utf-8").splitlines()
        # Other threads may look for it, and must not find half of it.
        own = folder / f"{ROWS[recipe]}-{threading.get_ident()}"
        own.write_text("\n".join(rows[:16]) + "\n", encoding="utf-8")
        os.replace(own, held_out)
    return ["--report_to", "none", "--eval_dataset_name", held_out]


def small_run(step: Step, recipe: str, name: str, micro: int) -> tuple[Path, list]:
    """Returns a folder of its own, and the flags of a demo's run of 16 samples an update."""
    output = step.folder / f"{recipe}-{name}-{int(time.time())}"
    flags = [*demo(recipe, step.folder), "--output_dir", output, "--save_steps", 1]
    flags += ["--train_batch_size", 16, "--micro_train_batch_size", micro]
    if recipe in SAMPLING:
        flags += ["--rollout_batch_size", 16]
    return output, flags


def runs_and_resumes(step: Step, recipe: str, config: str) -> bool:
    """Two updates, a checkpoint after each, an evaluation at the end; then a third update."""
    passed_before = step.folder / f"{recipe}-{config}.passed"
    if passed_before.exists():
        return True
    _, flags = small_run(step, recipe, config, micro=8)
    name = f"{recipe}, {config}"
    passed = step.recipe(name, recipe, config, *flags, "--max_steps", 2) and step.recipe(
        f"{name}, resumed", recipe, config, *flags, "--max_steps", 3, "--resume", "auto"
    )
    if passed:
        passed_before.touch()
    return passed


def configs(step: Step) -> dict:
    names = sorted(file.stem for file in CONFIGS.glob("*.yaml") if file.stem != SEVERAL_NODES)
    if step.args.tiny:
        names = ["single_gpu", "ds_fp16"]
    return {"passed": all(step.at_once(lambda name: runs_and_resumes(step, "dpo", name), names))}


def recipes(step: Step) -> dict:
    others = [recipe for recipe in RECIPES if recipe != "dpo"]
    pairs = list(itertools.product(others, ["single_gpu", "ds_fp16"]))
    if step.args.tiny:
        pairs = [("grpo", "single_gpu")]
    return {"passed": all(step.at_once(lambda pair: runs_and_resumes(step, *pair), pairs))}


def exact(step: Step) -> dict:
    """Compares what runs log that must log the same, by the greatest relative difference."""

    def three_updates(recipe: str, name: str, micro: int, on_cpu: bool = False) -> list[dict]:
        output, flags = small_run(step, recipe, name, micro)
        config = "cpu" if on_cpu or step.args.tiny else "single_gpu"
        flags = [f"{recipe}, {name}", recipe, config, *flags, "--logging_steps", 1]
        precision = {"precision": "no", "on_cpu": on_cpu}
        if name == "resumed":
            step.recipe(*flags, "--max_steps", 2, **precision)
            flags += ["--resume", "auto"]
        step.recipe(*flags, "--max_steps", 3, **precision)
        file = output / "metrics.jsonl"
        return list(map(json.loads, file.read_text().splitlines())) if file.exists() else []

    def compare(recipe: str) -> dict:
        first = three_updates(recipe, "whole", 16)
        others = {
            "again": three_updates(recipe, "again", 16),
            "resumed": three_updates(recipe, "resumed", 16),
            "small micro-batches": three_updates(recipe, "micro", 4),
            "CPU": three_updates(recipe, "cpu", 16, on_cpu=True),
        }
        return {name: differences(first, lines) for name, lines in others.items()}

    found = dict(zip(RECIPES, step.at_once(compare, RECIPES)))
    return {"passed": all(run["status"] == 0 for run in step.runs), "differences": found}


def differences(lines: list[dict], others: list[dict]) -> dict:
    """Returns, by update, the metric that differs most and by how much of its size.

    Left out are speeds, what measures rounding itself, and what only one of the two runs logged at
    that update, such as the evaluation at the end of a run that was resumed later.
    """
    left_out = ("perf/", "val/max_rounding", "sampling/sampling_logp_difference/")
    worst = {}
    for step in sorted({line["global_step"] for line in lines}):
        first = logged_at(step, lines)
        second = logged_at(step, others)
        apart = {
            key: abs(value - second[key]) / max(abs(value), 1e-3)
            for key, value in first.items()
            if key in second and not key.startswith(left_out) and value != second[key]
        }
        worst[step] = max(apart.items(), key=lambda item: item[1], default=("all equal", 0.0))
    return worst


def logged_at(step: int, lines: list[dict]) -> dict:
    """Returns all that was logged at an update."""
    found = {}
    for line in lines:
        if line["global_step"] == step:
            found |= line
    return found


def waits(step: Step) -> dict:
    """Counts the waits of each recipe's second update, of 4 and of 16 micro-batches."""

    def counted(recipe: str) -> list:
        found = []
        for micro in (16, 4):
            file = step.folder / f"{recipe}-{micro}.json"
            file.unlink(missing_ok=True)
            # A process of its own, since each makes an Accelerator.
            step.run(f"waits of {recipe}, {micro}", __file__, "--count_waits", recipe, micro, file)
            found.append(json.loads(file.read_text()) if file.exists() else None)
        return found

    found = dict(zip(RECIPES, step.at_once(counted, RECIPES)))
    passed = all(None not in both and len(both[0]) == len(both[1]) for both in found.values())
    return {"passed": passed, "waits": found}


class Ended(Exception):
    """The updates of a recipe are over."""


def count_waits(recipe: str, micro: str, file: str) -> None:
    """Runs two updates and writes where the host waited for the GPU in the second, as a list."""
    from common import engine, saving

    found = []
    begin_update = engine.begin_update

    def note(message, *_, **__) -> None:
        own = [
            frame
            for frame in traceback.extract_stack()
            if frame.filename.startswith(str(REPOSITORY))
        ]
        frames = [frame for frame in own if frame.filename != __file__]
        if "synchronizing" in str(message) and frames:
            found.append(f"{Path(frames[-1].filename).name}:{frames[-1].lineno}")

    def begin(*args):
        found.clear()
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        return begin_update(*args)

    def end(*args, **kwargs):
        raise Ended

    engine.begin_update, saving.save = begin, end
    warnings.showwarning = note
    warnings.simplefilter("always")
    script = REPOSITORY / "recipes" / f"{recipe}.py"
    flags = ["--train_batch_size", 64, "--micro_train_batch_size", micro, "--max_steps", 2]
    flags += [*demo(recipe, Path(file).parent), "--output_dir", f"{file}-{int(time.time())}"]
    if recipe in SAMPLING:
        flags += ["--rollout_batch_size", 64]
    sys.argv = [str(script), *map(str, flags)]
    spec = importlib.util.spec_from_file_location("recipe", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules["recipe"] = module
    spec.loader.exec_module(module)
    try:
        module.main()
    except Ended:
        Path(file).write_text(json.dumps(found), encoding="utf-8")


def generation(step: Step) -> dict:
    model = step.folder / "model"
    layers, hidden, new_tokens = (2, 64, 16) if step.args.tiny else (24, 896, 256)
    prompts = ASSETS / "prompts_train.jsonl"
    make = [REPOSITORY / "benchmarks" / "make_model.py", model, "--data", prompts]
    if not step.run("model", *make, "--layers", layers, "--hidden_size", hidden):
        return {"passed": False}
    found = {}
    for half, prompt_tokens in itertools.product(("no", "bf16"), (64, 1024)):
        script = REPOSITORY / "benchmarks" / "recording.py"
        rows = 16 if step.args.tiny else 128
        sizes = ["--rows", rows, "--prompt_tokens", prompt_tokens, "--new_tokens", new_tokens]
        name = f"{half}, prompts of {prompt_tokens}"
        report = step.folder / f"recording-{half}-{prompt_tokens}.json"
        flags = [*sizes, "--precision", half, "--report", report]
        if not step.run(f"recording, {name}", script, model, *flags):
            return {"passed": False}
        found[name] = json.loads(report.read_text())
    output = step.folder / f"grpo-{int(time.time())}"
    flags = [
        "--model_name_or_path", model, "--dataset_name", prompts, "--report_to", "none", "--output_dir", output, "--max_steps", 3,
        "--reward_function", "preference_recipes.rollouts.rewards:answer_reward", "--drop_equal_groups", "false",
        "--rollout_batch_size", 16, "--n_samples_per_prompt", 8, "--train_batch_size", 128, "--max_new_tokens", new_tokens,
    ]  # fmt: skip
    if not step.recipe("grpo", "grpo", "single_gpu", *flags):
        return {"passed": False}
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    rates = [
        128 * line["completions/mean_length"] / line["perf/generate_seconds"]
        for line in lines
        if line.get("perf/generate_seconds")
    ]
    return {"passed": bool(rates), "tokens a second, by rollout": rates, "recording": found}


# ============================================================ what a recipe runs in
def run_within(how: str, file: str, script: str, *flags: str) -> None:
    """Runs a recipe in this process, without cuDNN's attention or with a profile."""
    if how == "no_cudnn":
        torch.backends.cuda.enable_cudnn_sdp(False)
    if how == "profile":
        profile_third_update(Path(file))
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")


def profile_third_update(file: Path) -> None:
    """Writes its seconds, those in which the device worked, and the kernels that took most."""
    from common import engine

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities)
    clock = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    begin_update = engine.begin_update
    numbers = itertools.count(1)
    begun = 0.0

    def begin(*args):
        nonlocal begun
        number = next(numbers)
        if number in (3, 4) and torch.cuda.is_available():
            torch.cuda.synchronize()
        if number == 3:
            profiler.start()
            begun = time.perf_counter()
        if number == 4:
            seconds = time.perf_counter() - begun
            profiler.stop()
            rows = sorted(profiler.key_averages(), key=lambda row: -getattr(row, clock))
            found = {
                "seconds": seconds,
                "busy": sum(getattr(row, clock) for row in rows) / 1e6,
                "most": {row.key[:80]: [getattr(row, clock) / 1e6, row.count] for row in rows[:25]},
            }
            file.write_text(json.dumps(found), encoding="utf-8")
        return begin_update(*args)

    engine.begin_update = begin


def made_model(step: Step, architecture: str = "qwen3", **config) -> Path | None:
    """Makes a random model; None if that failed."""
    folder = step.folder / "model"
    if step.args.tiny:
        config = {"num_hidden_layers": 2, "hidden_size": 64}
    flags = ["--data", ASSETS / "prompts_train.jsonl", "--config", json.dumps(config)]
    script = REPOSITORY / "benchmarks" / "make_model.py"
    made = step.run("model", script, folder, "--architecture", architecture, *flags)
    return folder if made else None


def timed_run(step: Step, recipe: str, name: str, *flags, within: tuple = ()) -> dict | None:
    """Runs six updates; returns the medians of `perf/*` of the last four, None if it failed."""
    output = step.folder / f"{recipe}-{name}-{int(time.time())}"
    flags = ["--max_steps", 6, "--logging_steps", 1, "--report_to", "none", *flags]
    flags += ["--output_dir", output]
    if not step.recipe(f"{recipe}, {name}", recipe, "single_gpu", *flags, within=within):
        return None
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "loss" in line][-4:]
    names = [name for name in last[0] if name.startswith("perf/")]
    return {name: statistics.median(line[name] for line in last) for name in names}


def attention(step: Step) -> dict:
    model = made_model(step, num_hidden_layers=24, hidden_size=896, intermediate_size=4864)
    if model is None:
        return {"passed": False}
    runs = {"dpo": "preferences_train.jsonl.gz", "sft": "sft_train.jsonl"}
    found: dict[str, list] = {}
    for number, (recipe, data) in itertools.product(range(2), runs.items()):
        flags = ["--model_name_or_path", model, "--dataset_name", ASSETS / data]
        flags += ["--train_batch_size", 64, "--micro_train_batch_size", 16]
        for how in ("cudnn", "no_cudnn", "unshared"):
            if how == "unshared" and recipe == "sft":  # it has no prompts to share
                continue
            more = ["--no_share_prompts"] if how == "unshared" else []
            name = f"{how}-{number}"
            found.setdefault(f"{recipe}, {how}", []).append(
                timed_run(step, recipe, name, *flags, *more, within=(how, "-"))
            )
    passed = all(None not in runs_of for runs_of in found.values())
    return {"passed": passed, "perf": found}


# Qwen3-0.6B's.
ANCHOR = dict(
    num_hidden_layers=28,
    hidden_size=1024,
    intermediate_size=3072,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151_936,
    max_position_embeddings=40_960,
    tie_word_embeddings=True,
)


def long_rows(step: Step, rows: int, tokens: int, *columns: str) -> list:
    """Makes rows of so many tokens, with these columns of answers, and returns the flags for them."""
    data = step.folder / f"long-{tokens}-{columns[0]}.jsonl"
    random = np.random.default_rng(0)
    with data.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            row = {"prompt": "Numbers:"}
            for column in columns:  # more tokens than are read
                row[column] = " ".join(map(str, random.integers(0, 10**6, tokens)))
            file.write(json.dumps(row) + "\n")
    return ["--dataset_name", data, "--max_length", tokens, "--micro_train_batch_size", 1]


def anchor(step: Step) -> dict:
    model = made_model(step, **ANCHOR)
    if model is None:
        return {"passed": False}
    flags = ["--model_name_or_path", model, "--train_batch_size", 8]
    long = long_rows(step, 64, 256 if step.args.tiny else 8192, "completion")
    found = timed_run(step, "sft", "long rows", *flags, *long)
    profiled = step.folder / "profile.json"
    short = ["--dataset_name", ASSETS / "sft_train.jsonl", "--micro_train_batch_size", 8]
    within = ("profile", profiled)
    if found is None or timed_run(step, "sft", "profile", *flags, *short, within=within) is None:
        return {"passed": False}
    return {"passed": True, "perf": found, "profile": json.loads(profiled.read_text())}


# gemma-3-1b's.
GEMMA = dict(
    num_hidden_layers=26,
    hidden_size=1152,
    intermediate_size=6912,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
    vocab_size=262_144,
    sliding_window=512,
    max_position_embeddings=65_536,
    tie_word_embeddings=True,
)


def gemma(step: Step) -> dict:
    model = made_model(step, "gemma3_text", **GEMMA)
    if model is None:
        return {"passed": False}
    found = {}
    short, long = (128, 256) if step.args.tiny else (8192, 59_392)
    for recipe, tokens in (("sft", short), ("dpo", short), ("dpo", long)):
        columns = ("completion",) if recipe == "sft" else ("chosen", "rejected")
        flags = ["--model_name_or_path", model, "--train_batch_size", 1]
        flags += ["--gradient_checkpointing", "true", *long_rows(step, 8, tokens, *columns)]
        found[f"{recipe}, {tokens}"] = timed_run(step, recipe, f"{tokens} tokens", *flags)
    return {"passed": None not in found.values(), "perf": found}


def precision(step: Step) -> dict:
    flags = ["--models", "0.5B", "--budget", 420, "--folder", step.folder]
    if step.args.tiny:
        flags = ["--tiny"]
    return {"passed": step.run("precision.py", REPOSITORY / "benchmarks" / "precision.py", *flags)}


def rl(step: Step) -> dict:
    command = [REPOSITORY / "benchmarks" / "rl_precision.py", "--folder", step.folder]
    return {"passed": step.run("rl_precision.py", *command)}


def peers(step: Step, work: str, data: Path | None) -> dict:
    if data is None:
        return {"passed": False, "reason": "no data given"}
    # The fastest for TRL of what was tried: 16 and 64 rows; of pairs 64 do not fit, 32 took long.
    peer_micro = {"dpo": 16, "sft": 64, "grpo": 64}[work]
    flags = ["--data", data.resolve(), "--gpu", "--model", "0.5B", "--runs", 2, "--results"]
    flags += ["--micro_tokens", 65536, "--peer_micro", peer_micro]
    if work == "grpo":
        flags += ["--window", 256, "--updates", 5]
    command = [REPOSITORY / "benchmarks" / "peers.py", work, *flags, "--folder", step.folder]
    return {"passed": step.run(f"peers.py {work}", *command)}


STEPS = {
    "configs": configs,
    "recipes": recipes,
    "exact": exact,
    "waits": waits,
    "generation": generation,
    "attention": attention,
    "anchor": anchor,
    "gemma": gemma,
    "precision": precision,
    "rl": rl,
    "dpo": lambda step: peers(step, "dpo", step.args.hh),
    "sft": lambda step: peers(step, "sft", step.args.gsm8k),
    "grpo": lambda step: peers(step, "grpo", step.args.gsm8k),
}


# Those that --tiny tries.
TINY = ("configs", "recipes", "exact", "waits", "generation", "attention", "anchor", "gemma")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=STEPS, help="these steps alone")
    parser.add_argument("--folder", type=Path, help="for runs and models; default: a temporary one")
    parser.add_argument("--hh", type=Path, help="pairs for the step dpo, see peers.py")
    parser.add_argument("--gsm8k", type=Path, help="rows for sft and grpo, see peers.py")
    parser.add_argument("--jobs", type=int, default=4, help="commands at once, where none is timed")
    parser.add_argument("--limit", type=int, default=600, help="seconds of a step")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, to see that this works")
    parser.add_argument("--count_waits", nargs=3, help=argparse.SUPPRESS)
    if "--within" in sys.argv[:2]:
        run_within(*sys.argv[2:])
        return
    args = parser.parse_args()
    if args.count_waits:
        count_waits(*args.count_waits)
        return
    args.tiny |= not torch.cuda.is_available()
    results = RESULTS
    with tempfile.TemporaryDirectory() as temporary:
        args.folder = (args.folder or Path(temporary)).resolve()
        if args.tiny:
            results = args.folder / "results"
        results.mkdir(parents=True, exist_ok=True)
        names = args.only or (TINY if args.tiny else STEPS)
        outcome = {name: do(args, name, results / f"{name}.json") for name in names}
    print(
        ", ".join(f"{name}: {'passed' if passed else 'FAILED'}" for name, passed in outcome.items())
    )
    sys.exit(not all(outcome.values()))


def do(args, name: str, file: Path) -> bool:
    """Does a step, unless it was passed before, and writes its file; whether it was passed."""
    if file.exists() and json.loads(file.read_text())["passed"]:
        return True
    print(f"== {name}", flush=True)
    step = Step(args, name)
    found = STEPS[name](step)
    device = "CPU" if args.tiny else torch.cuda.get_device_name()
    found = {"step": name, "device": device, "torch": torch.__version__, **found, "runs": step.runs}
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found["passed"]


if __name__ == "__main__":
    main()
