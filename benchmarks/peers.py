"""Our recipes beside TRL's trainers on the same work: speed, memory, and whether both compute the same.

    python benchmarks/peers.py dpo --data hh_pairs.jsonl.gz        [--model head|body] [--runs 5] [--updates 12] [--tune] [--results]
    python benchmarks/peers.py sft --data gsm8k_train.jsonl        the same flags
    python benchmarks/peers.py reward --data hh_pairs.jsonl.gz
    python benchmarks/peers.py ppo --data gsm8k_train.jsonl        against TRL 1.10, the last with a PPO; a rate in samples of whole iterations
    python benchmarks/peers.py grpo --data gsm8k_train.jsonl       a rate in samples of whole iterations
    python benchmarks/peers.py distill --data gsm8k_train.jsonl    likewise
    python benchmarks/peers.py start --data hh_pairs.jsonl.gz      from the command to the first logged update of DPO

A command times our recipe against TRL in two ways, in turn:

    equal      TRL on the paths that it takes on a GPU: without Triton, as on a CPU, it would score every position, not only those that are learned.
               That is switched off (peers_trl.py), and both programs take fp32 products from oneDNN, as ours does by itself (common/cpu.py)
    fallback   TRL as it runs on a CPU by itself: every position scored, products from MKL

With `--gpu` there is one way: both programs on the GPU in bf16 autocast over fp32 weights, TRL on its own paths. Nothing but the first update's
figures and the tokens is compared then, to 2e-2: bf16 rounds each program in its own way. In grpo and distill each program draws its own tokens, so
their entropy and mean length are compared, to 5e-2. Peak memory is torch's. Take `--model 0.5B`.

`--results` writes what was found to benchmarks/results/WORK-MODEL.json, with commit, CPU and versions. `python benchmarks/tables.py` writes the
tables of benchmarks/README.md from these files. Those of a GPU go to benchmarks/results/gpu. `start` has the second way alone.

hh_pairs holds `chosen` and `rejected` transcripts (Anthropic hh-rlhf), gsm8k_train `question` and `answer`. Made once, in --folder: a virtual
environment with TRL from the package index and the versions of torch, transformers, accelerate, datasets and tokenizers that run here; a BPE
tokenizer of the data; a Llama with random weights; the rows both programs read.

Same for both: weights, token ids, windows of 64 samples, the samples of each window, fp32 on the CPU, threads, AdamW (no decay, eps 1e-8), clipping
at 1.0, constant learning rate, no dropout, a log line an update, no reference log-probs beforehand. Rows whose prompt's tokens are not those at the
start of the whole text, or that are longer than 1024 tokens, are left out: the two programs would cut them differently. TRL trains in the order of
its file, which is written in the order of our permutation. What is each program's own: how a window is cut and ordered.

PPO: an iteration is a rollout of 64 prompts, up to 128 tokens each, scored by a reward model, and four updates on it. The policy is trained on answers first,
so that responses end by themselves. TRL is given our random numbers to sample with, so both programs sample the same tokens as long as they have the same
weights, which is the first rollout: its entropy and scores are compared (of head the entropy alone, to 2e-2). TRL generates and scores all
64 at once, its default; ours 32. No clipping of gradients: TRL's has none.

GRPO: an iteration is a rollout of 8 prompts with 8 responses each, scored by a function (the share of digits), and one update on it, as TRL makes it by default:
ratio 1, no KL. The weights are random, so hardly a response ends before its 128 tokens. Both sample by the same numbers, as in PPO, all 64 responses at once.
Advantages by group, mean over tokens; ours keeps groups of equal scores, as TRL does.

Distillation: an iteration is a rollout of 64 prompts, up to 128 tokens each, and one update on it. The teacher is wider and has two layers more, its
weights are random, too; reverse KL over the whole vocabulary. Both sample by the same numbers, as in PPO.

The programs run in turn, each as its own process; who is first changes from round to round. The rate of a run is that of its updates from the third on. Printed:
the median rate of each, the median of the ratios and the least and the greatest of them, the peak resident memory, and two
checks: what the first update logs, to 1e-4, and the loss after 10 updates, to 1e-3. Exits with 1 if a check fails. Each round says how much of the CPU other
processes used meanwhile: on two busy cores the same run was seen six times slower, so figures of a machine that was not quiet are marked.
Others only ever add time: the last line takes each update, which is the same work in every run, at its fastest of all runs.

`start` takes windows of 4 pairs, so that starting is most of what is timed, and the whole file, which both programs tokenise in the first run and read from
their caches in those that count. `--window 64` times a whole update with it.

`--tune` first runs 4 updates of each program at 1, 2, 4 and 8 samples a micro-batch (and SFT at TRL's padding-free and packing settings) and takes the
fastest that trains on the same windows. Without it: --micro, --peer_micro, --peer_setting.
"""

import argparse
import datetime
import gzip
import hashlib
import importlib.util
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from common import batches
from preference_recipes.data import formats

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
RESULTS = HERE / "results"
PEERS = {"ppo": "1.10"}  # the last with a PPO
PEER = "1.16"
SHARED = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "numpy",
)  # the same versions on both sides
MODELS = {  # of make_model.py
    "head": {
        "vocab_size": 32000,
        "hidden_size": 192,
        "layers": 4,
    },  # 14 M parameters, 12.3 M of them in embeddings and head
    "body": {"vocab_size": 4096, "hidden_size": 256, "layers": 8},
    "0.5B": {"vocab_size": 32000, "hidden_size": 1024, "layers": 32},  # for a GPU
}
TEACHERS = {  # of distillation, by the model that learns from them
    "head": {"vocab_size": 32000, "hidden_size": 256, "layers": 6},
    "body": {"vocab_size": 4096, "hidden_size": 384, "layers": 10},
    "0.5B": {"vocab_size": 32000, "hidden_size": 1536, "layers": 34},
}
MAX_LENGTH = 1024
QUIET = 0.05  # of the CPU: threads that wait for a busy core cost several times the work, and hit one program and not the other
LEARNING_RATES = {
    "dpo": 2e-5,
    "sft": 1e-4,
    "reward": 1e-5,
    "ppo": 1e-5,
    "grpo": 1e-5,
    "distill": 1e-5,
}
FIRST = {  # sft's loss is a mean log-prob
    "dpo": ["logps/chosen", "logps/rejected"],
    "sft": ["loss"],
    "reward": ["mean_reward"],
    "ppo": ["objective/entropy", "objective/scores"],
    "grpo": ["reward", "entropy", "completions/mean_length", "grad_norm"],
    "distill": ["loss", "entropy", "completions/mean_length", "grad_norm"],
}
EPOCHS = {"ppo": 4}  # updates of a window: our lines for one of TRL's
MAX_NEW_TOKENS, MICRO_ROLLOUT = 128, 32
GROUP = 8  # GRPO: responses to a prompt
# Only the first two keep the window: packed, 64 rows are more than 64 samples.
PEER_SETTINGS = {
    "plain": {"max_length": MAX_LENGTH},
    "padding_free": {"padding_free": True, "max_length": None},
    "packing": {"packing": True, "max_length": MAX_LENGTH},
}
SAME_WINDOWS = "plain", "padding_free"


# ---------------------------------------------------------------------------------------------- what both read


def peer_python(folder: Path, release: str) -> str:
    """The interpreter of TRL's virtual environment: this one if it has that release, else one that is made if it is not there."""
    if importlib.util.find_spec("trl") and version("trl").startswith(f"{release}."):
        return sys.executable
    python = folder / ("trl" if release == PEER else f"trl-{release}") / "bin" / "python"
    if (
        subprocess.run([python, "-c", "import trl"], capture_output=True).returncode
        if python.exists()
        else True
    ):
        subprocess.run([sys.executable, "-m", "venv", python.parent.parent], check=True)
        pins = [f"{name}=={version(name)}" for name in SHARED]
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", f"trl=={release}.*", "pandas", *pins],
            check=True,
        )
    return str(python)


def make_model(folder: Path, data: Path, name: str, is_teacher: bool = False) -> Path:
    """A causal model with random weights and a tokenizer of the data; its share of arithmetic in the head is printed."""
    out = folder / f"{name}{'-teacher' * is_teacher}-{fingerprint(data)}"
    if not (out / "done").exists():
        of_name = (TEACHERS if is_teacher else MODELS)[name]
        sizes = [f"--{key}={value}" for key, value in of_name.items()]
        subprocess.run(
            [sys.executable, HERE / "make_model.py", out, "--data", data, *sizes],
            check=True,
            env=environment("0"),
        )
        model = AutoModelForCausalLM.from_pretrained(out)
        # As it is drawn, every token is about as likely as any other, and a log-prob of the wrong token would pass the check.
        model.lm_head.weight.data.mul_(10)
        model.save_pretrained(out)
        (out / "done").touch()
    config = AutoConfig.from_pretrained(out)
    head, body = (
        config.vocab_size * config.hidden_size,
        config.num_hidden_layers
        * (4 * config.hidden_size**2 + 3 * config.hidden_size * config.intermediate_size),
    )
    print(
        f"{'teacher of' if is_teacher else 'model'} {name}: {(2 * head + body) / 1e6:.1f} M parameters, {head / (head + body):.0%} of the arithmetic of a scored token in the head"
    )
    return out


def make_scorer(model: Path) -> Path:
    """The same model with a score head, so that both programs start from the same one."""
    out = model.with_name(f"{model.name}-scorer")
    if not (out / "done").exists():
        tokenizer = AutoTokenizer.from_pretrained(model)
        scorer = AutoModelForSequenceClassification.from_pretrained(
            model, num_labels=1, pad_token_id=tokenizer.pad_token_id
        )
        scorer.score.weight.data.normal_(0, scorer.config.hidden_size**-0.5)
        scorer.save_pretrained(out)
        tokenizer.save_pretrained(out)
        (out / "done").touch()
    return out


def make_policy(model: Path, file: Path) -> Path:
    """The model after fifty updates of our SFT on some of PPO's rows, so that its responses end."""
    out = model.with_name(f"{model.name}-policy")
    if not (out / "actor" / "model.safetensors").exists():
        shutil.rmtree(out, ignore_errors=True)  # of a run that was interrupted
        flags = [
            "--train_batch_size=64",
            "--max_steps=50",
            "--learning_rate=1e-3",
            "--report_to=none",
            "--columns",
            "completion=answer",
        ]
        command = [
            sys.executable,
            REPOSITORY / "recipes" / "sft.py",
            f"--model_name_or_path={model}",
            f"--dataset_name={file}",
            *flags,
        ]
        subprocess.run(
            [*command, f"--output_dir={out}"],
            check=True,
            env=environment(f"{out}-cache"),
            stdout=subprocess.DEVNULL,
        )
    return out / "actor"


def make_data(
    folder: Path, data: Path, model: Path, work: str, window: int, updates: int, whole_file: bool
) -> list[Path]:
    """The rows of so many windows, or of all the file holds, as our file and as TRL's, which is in the order of our windows."""
    tokenizer, rows = AutoTokenizer.from_pretrained(model), []
    with (gzip.open if data.suffix == ".gz" else open)(data, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if work in ("sft", "ppo", "grpo", "distill"):
                row = {
                    "prompt": row["question"] + "\n",
                    "completion" if work == "sft" else "answer": row["answer"],
                }
                answers = [row.get("completion") or row["answer"]]
            else:
                names = ("prompt", "chosen", "rejected")
                row = dict(zip(names, formats.split_strings(*map(row.get, names))))
                answers = [row["chosen"], row["rejected"]]
            prompt = tokenizer(row["prompt"]).input_ids
            ids = [
                tokenizer(row["prompt"] + answer + tokenizer.eos_token).input_ids
                for answer in answers
            ]
            whole = all(one[: len(prompt)] == prompt and len(one) <= MAX_LENGTH for one in ids)
            if prompt and whole and all(answers) and (len(ids) == 1 or ids[0] != ids[1]):
                rows.append(row)
            if len(rows) == window * updates and not whole_file:
                break
    if len(rows) < window * updates:
        sys.exit(
            f"{data}: {len(rows)} usable rows make {len(rows) // window} windows of {window}: --updates {updates} are too many"
        )
    order = [
        i
        for index in range(math.ceil(len(rows) / window))
        for i in batches.indices_of_update(len(rows), window, 0, index)
    ]
    files = [
        folder / f"{model.name}-{work}-{window}-{len(rows)}-{side}.jsonl"
        for side in ("ours", "trl")
    ]
    for file, some in zip(files, (rows, [rows[i] for i in order])):
        text = "".join(json.dumps(row) + "\n" for row in some)
        if (
            not file.exists() or file.read_text(encoding="utf-8") != text
        ):  # a new time of writing would be a new data set to `datasets`
            file.write_text(text, encoding="utf-8")
    return files


def fingerprint(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:8]


# ---------------------------------------------------------------------------------------------- the programs


def environment(cache: str, gpu: bool = False) -> dict[str, str]:
    """Nothing from the network, no GPU unless it is asked for, a cache of its own for each program."""
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_CACHE": cache,
    }
    if not gpu:
        offline["CUDA_VISIBLE_DEVICES"] = ""
    return {
        **os.environ,
        **offline,
        "PYTHONPATH": str(REPOSITORY),
        "TOKENIZERS_PARALLELISM": "false",
    }


def ours(args, updates: int, micro: int, setting: str, output: Path) -> tuple[list, Path, dict]:
    """Command, log file and environment of our recipe."""
    flags = {
        "model_name_or_path": args.model_folder,
        "dataset_name": args.files[0],
        "output_dir": output,
        "train_batch_size": args.window,
        "micro_train_batch_size": micro,
        "micro_train_tokens": args.micro_tokens,
        "max_steps": updates,
        "max_length": MAX_LENGTH,
        "learning_rate": LEARNING_RATES[args.recipe],
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 1.0,
        "seed": 0,
        "logging_steps": 1,
        "report_to": "none",
    }
    if args.recipe == "ppo":
        flags |= {
            "reward_model_name_or_path": args.scorer_folder,
            "rollout_batch_size": args.window,
            "num_epochs_per_rollout": EPOCHS["ppo"],
            "generate_batch_size": MICRO_ROLLOUT,
            "score_batch_size": MICRO_ROLLOUT,
            "max_new_tokens": MAX_NEW_TOKENS,
            "gae_lambda": 0.95,  # TRL's default
            "max_steps": updates * EPOCHS["ppo"],
            "critic_learning_rate": LEARNING_RATES["ppo"],
            "max_grad_norm": 0,
        }
    if args.recipe == "grpo":
        flags |= {
            "reward_function": "benchmarks.peers_reward:digits",
            "rollout_batch_size": args.window // GROUP,
            "n_samples_per_prompt": GROUP,
            "max_new_tokens": MAX_NEW_TOKENS,
            "advantage_std": "group",
            "drop_equal_groups": False,
        }
    if args.recipe == "distill":
        flags |= {
            "teacher_model_name_or_path": args.teacher_folder,
            "rollout_batch_size": args.window,
            "max_new_tokens": MAX_NEW_TOKENS,
        }
    command = [
        sys.executable,
        REPOSITORY / "recipes" / f"{args.recipe}.py",
        *(f"--{key}={value}" for key, value in flags.items()),
    ]
    env = environment(f"{args.folder}/cache-ours", args.gpu)
    if args.gpu:  # what accelerate launch sets with single_gpu.yaml
        env["ACCELERATE_MIXED_PRECISION"] = "bf16"
    if args.compile:  # what accelerate launch's --dynamo_* flags set
        env |= {"ACCELERATE_DYNAMO_BACKEND": "inductor", "ACCELERATE_DYNAMO_USE_DYNAMIC": "true"}
        env["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
    return command, output / "metrics.jsonl", env


def equal(*args) -> tuple[list, Path, dict]:
    """The same of TRL's trainer, on the paths that it takes on a GPU, and with oneDNN."""
    return peer(*args, equal=True)


def fallback(*args) -> tuple[list, Path, dict]:
    """The same of TRL's trainer as it runs on a CPU by itself."""
    return peer(*args, equal=False)


def on_gpu(*args) -> tuple[list, Path, dict]:
    """The same of TRL's trainer on a GPU."""
    return peer(*args, equal=False)


def peer(
    args, updates: int, micro: int, setting: str, output: Path, equal: bool
) -> tuple[list, Path, dict]:
    """The same of TRL's trainer. Gradient checkpointing and bf16, TRL's defaults, are off: slower on a CPU, and another dtype."""
    config = {
        "output_dir": str(output),
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": args.window // micro,
        "max_steps": updates,
        "learning_rate": LEARNING_RATES[args.recipe],
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 1.0,
        "seed": 0,
        "logging_steps": 1,
        "report_to": "none",
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "use_cpu": not args.gpu,
        "bf16": args.gpu,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": args.gpu,
        "disable_tqdm": True,
        **PEER_SETTINGS[setting],
    }
    if args.recipe == "ppo":
        for field in "max_length", "max_steps", "train_sampling_strategy":
            del config[field]
        config |= {
            "total_episodes": updates * args.window,
            "num_ppo_epochs": EPOCHS["ppo"],
            "local_rollout_forward_batch_size": args.window,
            "response_length": MAX_NEW_TOKENS,
            "stop_token": "eos",
            "temperature": 1.0,
            "num_sample_generations": 0,
        }
    if args.recipe == "grpo":
        for field in "max_length", "train_sampling_strategy":
            del config[field]
        config |= {
            "num_generations": GROUP,
            "max_completion_length": MAX_NEW_TOKENS,
            "shuffle_dataset": False,
            "temperature": 1.0,
            "loss_type": "dapo",
            "epsilon_high": 0.28,
            "beta": 0.0,
        }
    if args.recipe == "distill":
        for field in "max_length", "train_sampling_strategy":
            del config[field]
        config |= {
            "max_completion_length": MAX_NEW_TOKENS,
            "shuffle_dataset": False,
            "temperature": 1.0,
            "beta": 1.0,
        }
    log, file = output / "log.jsonl", output / "settings.json"
    output.mkdir(parents=True)
    settings = {
        "work": args.recipe,
        "model": str(args.model_folder),
        "data": str(args.files[1]),
        "log": str(log),
        "equal": equal,
        "config": config,
    }
    if args.recipe == "ppo":
        settings["scorer"] = str(args.scorer_folder)
    if args.recipe == "distill":
        settings["teacher"] = str(args.teacher_folder)
    file.write_text(json.dumps(settings), encoding="utf-8")
    env = environment(f"{args.folder}/cache-trl", args.gpu)
    del env["PYTHONPATH"]
    return [args.peer_python, HERE / "peers_trl.py", file], log, env


def busy_seconds() -> float:
    """CPU seconds that all processes of the machine have used (Linux)."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def run(program, args, updates: int, micro: int, setting: str = "plain") -> dict:
    """Runs a program once: its log lines, seconds to the first, rate from the third update on, tokens, peak memory in MiB (resident, or the GPU's), and the
    share of the machine's CPU time that other processes used meanwhile."""
    output = args.folder / "runs" / program.__name__
    shutil.rmtree(output, ignore_errors=True)
    command, log, env = program(args, updates, micro, setting, output)
    env["OMP_NUM_THREADS"] = str(args.threads)
    text, first = args.folder / f"{program.__name__}.log", None
    with open(text, "w") as out:
        begun, busy = time.perf_counter(), busy_seconds()
        process = subprocess.Popen(
            [str(word) for word in command],
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=args.folder,
        )
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if first is None and log.exists() and log.stat().st_size:
                first = time.perf_counter() - begun
            if pid:
                process.returncode = status
                break
            time.sleep(0.01)
    elapsed = time.perf_counter() - begun
    others = max(0.0, busy_seconds() - busy - usage.ru_utime - usage.ru_stime) / (
        elapsed * os.cpu_count()
    )
    if status or first is None:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{text.read_text()[-3000:]}")
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if "loss" in line or "loss/policy_avg" in line]
    for line in lines:
        line.setdefault(
            "perf/seconds", args.window / line.get("perf/samples_per_second", float("nan"))
        )
    tokens = [line.get("tokens", line.get("num_tokens", math.nan)) for line in lines]
    seconds = [
        line["perf/seconds"] for line in lines[2 * len(lines) // updates :]
    ]  # PPO of ours has several lines an iteration
    work = tokens[-1] - tokens[1] if args.recipe == "sft" else args.window * (updates - 2)
    rate = work / sum(seconds) if seconds else 0.0
    return {
        "lines": lines,
        "first": first,
        "rate": rate,
        "seconds": seconds,
        "work": work,
        "tokens": tokens[-1],
        "memory": 1024 * lines[-1].get("perf/peak_memory_gib", usage.ru_maxrss / 2**20),
        "others": others,
    }


# ---------------------------------------------------------------------------------------------- comparisons


def tune(args) -> None:
    """Sets `micro`, `peer_micro` and `peer_setting` to the fastest of 4 updates each."""
    found = {ours: {}, args.ways[0]: {}}
    for program, settings in (
        (ours, ["plain"]),
        (args.ways[0], PEER_SETTINGS if args.recipe == "sft" else ["plain"]),
    ):
        for setting in settings:
            for micro in (1, 2, 4, 8):
                result = run(program, args, 4, micro, setting)
                rate = result["rate"]
                kept = setting in SAME_WINDOWS
                print(
                    f"tune {name(program):5} {setting:12} micro-batch {micro:2}: {rate:8.2f} {args.unit}, others used {result['others']:.0%}{'' if kept else ' (other windows)'}",
                    flush=True,
                )
                if kept:
                    found[program][rate] = micro, setting
    args.micro, _ = found[ours][max(found[ours])]
    args.peer_micro, args.peer_setting = found[args.ways[0]][max(found[args.ways[0]])]


def name(program) -> str:
    names = {"ours": "ours", "equal": "TRL", "fallback": "TRL's CPU fallback", "on_gpu": "TRL"}
    return names[program.__name__]


def check(args, our: dict, their: dict) -> bool:
    """Prints how far the two runs' numbers are from each other; whether they are the same run."""
    # Between the tokens lie so many boundaries that rounding moves a draw to its neighbour: of 32,000 about two tokens in a thousand, of 4,096
    # one in ten thousand. From there on it is another response, so that of `head` a sixth of the responses may be others.
    good, bound, tags = True, 2e-2 if args.gpu else 1e-4, FIRST[args.recipe]
    # By the reward of one response all advantages of its group move.
    group = {"reward": 5e-2, "grad_norm": 5e-2} if args.recipe == "grpo" else {}
    if args.recipe in ("grpo", "distill"):
        bound = 5e-3 if args.model == "body" else 5e-2
        if args.gpu:
            tags = ["entropy", "completions/mean_length"]
    if args.recipe == "ppo":
        bound, tags = {"body": (5e-3, tags), "head": (5e-2, ["objective/entropy"])}[args.model]
    for tag in tags:
        one, other = our["lines"][0][tag], their["lines"][0][tag]
        far = abs(one - other) / abs(other)
        at_most = group.get(tag, bound)
        good &= far <= at_most
        print(
            f"check: {tag} of update 1: ours {one:.6g}, TRL {other:.6g}: {far:.1e} apart (at most {at_most:.0e})"
        )
    if args.recipe in ("grpo", "distill"):  # rounding moves a draw to its neighbour sooner or later
        return good
    if (
        args.recipe == "ppo"
    ):  # later rollouts are sampled by weights that TRL's mean of means has led elsewhere
        return good
    print(f"check: tokens: ours {our['tokens']}, TRL {their['tokens']:.0f}")
    good &= our["tokens"] == their["tokens"]
    if args.gpu:
        return good
    if len(our["lines"]) < 11:
        print("check: fewer than 11 updates: the loss after 10 was not compared")
        return good
    losses = [
        (one["loss"], other["loss"]) for one, other in zip(our["lines"][:11], their["lines"][:11])
    ]
    far = [abs(one - other) / abs(other) for one, other in losses]
    print(
        f"check: loss {losses[0][0]:.6g} before, after 10 updates ours {losses[-1][0]:.6g}, TRL {losses[-1][1]:.6g}: {far[-1]:.1e} apart "
        f"(at most 1e-3), the farthest of updates 1 to 11 {max(far):.1e}"
    )
    return good and far[-1] <= 1e-3


def compare(args) -> tuple[bool, dict]:
    """Alternates the programs, prints each round of runs and the medians.

    Returns:
        whether the checks passed; what was found, for `write`.
    """
    start = args.work == "start"
    programs = [ours, *args.ways]
    peers = dict.fromkeys(args.ways, (args.peer_micro, args.peer_setting))
    settings = {ours: (args.micro, "plain"), **peers}
    print(
        f"micro-batches: ours {f'{args.micro_tokens} tokens' if args.micro_tokens else args.micro}, TRL {args.peer_micro} ({args.peer_setting}); windows of {args.window}, {args.updates} updates{', ours compiled' * args.compile}"
    )
    if start:  # the data sets' caches: written once, then read, by both
        for side in ("ours", "trl"):
            shutil.rmtree(args.folder / f"cache-{side}", ignore_errors=True)
        cold = [
            f"{name(program)} {run(program, args, args.updates, *settings[program])['first']:.1f} s"
            for program in programs
        ]
        print(f"first run, data not in the cache: {', '.join(cold)} (not counted)", flush=True)

    results = {program: [] for program in programs}
    good = True
    for number in range(args.runs):
        turn = number % len(programs)
        for program in programs[turn:] + programs[:turn]:
            results[program].append(run(program, args, args.updates, *settings[program]))
        each = [
            f"{name(program)} {found[-1]['first' if start else 'rate']:.2f} {args.unit}, {found[-1]['memory']:.0f} MiB, others used {found[-1]['others']:.0%} of the CPU"
            for program, found in results.items()
        ]
        print(f"round {number + 1}: {'; '.join(each)}", flush=True)
        if number == 0 or not start:
            for way in args.ways:
                good &= check(args, results[ours][-1], results[way][-1])

    rows = [against(args, way, results[ours], results[way]) for way in args.ways]
    others = max(found["others"] for runs in results.values() for found in runs)
    if others > QUIET:
        print(
            f"NOT A QUIET MACHINE: other processes used up to {others:.0%} of the CPU; do not quote these figures"
        )
    return good, {"good": bool(good), "others": round(others, 3), "rows": rows}


def against(args, way, our_runs: list[dict], their_runs: list[dict]) -> dict:
    """Prints and returns the medians of our runs and TRL's, and their ratios."""
    key = "first" if args.work == "start" else "rate"
    ratios = [one[key] / other[key] for one, other in zip(our_runs, their_runs)]
    rates = [statistics.median(found[key] for found in runs) for runs in (our_runs, their_runs)]
    memory = [
        statistics.median(found["memory"] for found in runs) for runs in (our_runs, their_runs)
    ]
    fastest = [at_fastest(args, runs) for runs in (our_runs, their_runs)]
    print(
        f"{args.work}, model {args.model}: ours {rates[0]:.2f} {args.unit}, {name(way)} {rates[1]:.2f} {args.unit}; median ratio {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}) over {args.runs} rounds of runs; peak memory ours {memory[0]:.0f} MiB, {name(way)} {memory[1]:.0f} MiB"
    )
    print(
        f"each update at its fastest: ours {fastest[0]:.2f} {args.unit}, {name(way)} {fastest[1]:.2f} {args.unit}; ratio {fastest[0] / fastest[1]:.2f}"
    )
    return {
        "way": way.__name__,
        "rates": [float(f"{rate:.4g}") for rate in rates],
        "ratios": [round(ratio, 3) for ratio in ratios],
        "fastest": round(fastest[0] / fastest[1], 3),
        "memory_mib": [round(size) for size in memory],
    }


def at_fastest(args, runs: list[dict]) -> float:
    """The rate with each update at its fastest of all runs, or the least seconds to the first."""
    if args.work == "start":
        return min(found["first"] for found in runs)
    return runs[-1]["work"] / sum(map(min, zip(*(found["seconds"] for found in runs))))


def write(args, found: dict) -> None:
    """Writes what was found to a file, with all that it depends on."""
    # Empty where the repository was copied without its history.
    git = lambda *words: subprocess.run(
        ["git", *words], cwd=REPOSITORY, capture_output=True, text=True
    ).stdout.strip()
    cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in cpus if line.startswith("model name")]
    result = {
        "work": args.work,
        "model": args.model,
        "unit": args.unit,
        "commit": git("rev-parse", "--short=12", "HEAD"),
        "changed": bool(git("status", "--porcelain", "--", "common", "recipes", "benchmarks/*.py")),
        "date": f"{datetime.date.today()}",
        "cpu": models[0] if models else "unknown",
        "threads": args.threads,
        "python": sys.version.split()[0],
        "versions": args.versions,
        "window": args.window,
        "updates": args.updates,
        "micro": [args.micro_tokens or args.micro, args.peer_micro],
        "compiled": args.compile,
        **found,
    }
    folder = RESULTS
    if args.gpu:
        folder = RESULTS / "gpu"
        result["gpu"] = torch.cuda.get_device_name()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{args.work}-{args.model}.json"
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {file}")
    if not args.gpu:
        print("`python benchmarks/tables.py` puts it into benchmarks/README.md")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", choices=["dpo", "sft", "reward", "ppo", "grpo", "distill", "start"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--folder", type=Path, default=Path.home() / ".cache" / "preference-recipes-peers"
    )
    parser.add_argument("--model", choices=MODELS, default="head")
    parser.add_argument("--runs", type=int, default=5, help="rounds of runs")
    parser.add_argument(
        "--updates", type=int, default=None, help="of each run; default 12, 1 for start"
    )
    parser.add_argument(
        "--window", type=int, default=None, help="samples of an update; default 64, 4 for start"
    )
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument(
        "--micro_tokens",
        type=int,
        default=0,
        help="ours cut by tokens instead, see --micro_train_tokens",
    )
    parser.add_argument("--peer_micro", type=int, default=8)
    parser.add_argument("--peer_setting", choices=SAME_WINDOWS, default="plain")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--results", action="store_true", help="write benchmarks/results/*.json")
    parser.add_argument("--gpu", action="store_true", help="both on the GPU, in bf16 autocast")
    parser.add_argument(
        "--compile", action="store_true", help="ours by torch.compile, see docs/launching.md"
    )
    args = parser.parse_args()
    start = args.work == "start"
    args.recipe, args.folder = "dpo" if start else args.work, args.folder.resolve()
    args.updates, args.window = (
        args.updates or (1 if start else 12),
        args.window or (4 if start else 64),
    )
    args.micro, args.peer_micro = min(args.micro, args.window), min(args.peer_micro, args.window)
    units = {"start": "s", "sft": "tokens/s", "dpo": "pairs/s", "reward": "pairs/s"}
    args.unit = units.get(args.work, "samples/s")
    if args.gpu and args.recipe == "ppo":
        sys.exit("--gpu: not for ppo: the last TRL that has it needs other versions of torch")
    if start and args.tune:
        sys.exit("--tune: not for start, whose rate is not measured")
    if not start and args.updates < 3 + args.tune:
        sys.exit("--updates: at least 3, the first two are not counted; 4 with --tune")
    args.folder.mkdir(parents=True, exist_ok=True)
    args.peer_python = peer_python(args.folder, PEERS.get(args.recipe, PEER))
    # `start` is not about arithmetic.
    args.ways = [fallback] if start else [equal, fallback]
    if args.gpu:
        args.ways = [on_gpu]
    of = f"from importlib.metadata import version; import json; print(json.dumps({{name: version(name) for name in {('trl', *SHARED)}}}))"
    args.versions = json.loads(
        subprocess.run(
            [args.peer_python, "-c", of], capture_output=True, text=True, check=True
        ).stdout
    )
    print(f"TRL's side: {', '.join(' '.join(one) for one in args.versions.items())}")
    print(
        f"our side: {', '.join(f'{package} {version(package)}' for package in SHARED)}; Python {sys.version.split()[0]}, {args.threads} threads"
    )
    args.model_folder = make_model(args.folder, args.data, args.model)
    windows = args.updates + (
        args.recipe == "ppo"
    )  # TRL makes an update of each micro-batch when its data end: let them not end
    rows_of_window = args.window // GROUP if args.recipe == "grpo" else args.window
    args.files = make_data(
        args.folder, args.data, args.model_folder, args.recipe, rows_of_window, windows, start
    )
    if args.recipe == "distill":
        args.teacher_folder = make_model(args.folder, args.data, args.model, is_teacher=True)
    if args.recipe == "reward":
        args.model_folder = make_scorer(args.model_folder)
    if args.recipe == "ppo":
        args.scorer_folder = make_scorer(args.model_folder)
        args.model_folder = make_policy(
            args.model_folder,
            make_data(args.folder, args.data, args.model_folder, "ppo", 64, 4, False)[0],
        )
    if args.tune:
        tune(args)
    good, found = compare(args)
    if args.results:
        write(args, found)
    sys.exit(not good)


if __name__ == "__main__":
    main()
