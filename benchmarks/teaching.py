"""What a teacher is worth: the embedded model learns from it, from its answers, and from rewards.

    python benchmarks/teaching.py [--seeds 0 1 2] [--folder DIR]

Each way makes updates of 128 samples from the same prompts with the learning rate of its own demo. SFT learns from
answers that the teacher sampled, one to each prompt. Printed for each way and seed: held-out exact match at the end, and
what it took to reach 90 %: updates, responses generated, and seconds of training, evaluations not counted. docs/distill.md
has the table.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

REPOSITORY = Path(__file__).resolve().parent.parent
ASSETS = REPOSITORY / "assets"
REACHED = 0.9  # of the held-out problems
WAYS = {
    "distill": ("distill", []),
    "distill, sampled": ("distill", ["--loss_type", "sampled"]),
    "distill, forward KL": ("distill", ["--beta", 0]),
    "SFT on the teacher's answers": ("sft", ["--dataset_name", "{answers}", "--max_steps", 120]),
    "GRPO, as many updates": ("grpo", ["--max_steps", 120]),
    "GRPO, its demo": ("grpo", []),
}


@torch.no_grad()
def answers_of_teacher(folder: Path) -> Path:
    """Returns a file of the training prompts with an answer to each that the teacher sampled."""
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "teacher")
    tokenizer.padding_side = "left"
    teacher = AutoModelForCausalLM.from_pretrained(ASSETS / "teacher", dtype=torch.float32)
    torch.manual_seed(0)
    lines = (ASSETS / "prompts_train.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    answered = []
    for start in range(0, len(prompts), 500):
        some = prompts[start : start + 500]
        inputs = tokenizer.apply_chat_template(
            some, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        ids = teacher.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=8)
        texts = tokenizer.batch_decode(
            ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        answered += [
            {"messages": [*prompt, {"role": "assistant", "content": text}]}
            for prompt, text in zip(some, texts)
        ]
    file = folder / "answers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in answered), encoding="utf-8")
    return file


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def train(recipe: str, flags: list, output: Path) -> None:
    """Runs a recipe's demo under cpu.yaml with these flags."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", 0]
    command += ["--config_file", REPOSITORY / "accelerate_configs/cpu.yaml"]
    command += [REPOSITORY / f"recipes/{recipe}.py", ASSETS / f"{recipe}.yaml", *flags]
    command += ["--output_dir", output, "--eval_steps", 5, "--report_to", "none"]
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)


def describe(output: Path) -> str:
    """Returns the cells of a run's row."""
    lines = read_lines(output / "metrics.jsonl")
    name = "eval/exact_match"
    found = {line["global_step"]: line[name] for line in lines if name in line}
    last = f"{found[max(found)]:.3f} at {max(found)}"
    reached = [step for step, share in found.items() if share >= REACHED]
    if not reached:
        return f"{last} | not reached | |"
    updates = min(reached)
    seconds = 0.0
    seen = 0
    for line in lines:
        if "loss" in line and line["global_step"] <= updates:
            seconds += (line["samples"] - seen) / line["perf/samples_per_second"]
            seen = line["samples"]
    sampled = [
        row
        for row in read_lines(output / "samples.jsonl")
        if row["source"] == "rollout" and row["global_step"] < updates
    ]
    return f"{last} | {updates} | {len(sampled) or seen:,} | {seconds:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    answers = answers_of_teacher(folder)
    print("| | seed | exact match at the end | updates to 90 % | responses | seconds |")
    print("| --- | --- | --- | --- | --- | --- |")
    for way in args.ways:
        recipe, flags = WAYS[way]
        flags = [answers if flag == "{answers}" else flag for flag in flags]
        for seed in args.seeds:
            output = folder / f"{way.replace(' ', '-')}-{seed}"
            train(recipe, [*flags, "--seed", seed], output)
            print(f"| {way} | {seed} | {describe(output)} |", flush=True)


if __name__ == "__main__":
    main()
