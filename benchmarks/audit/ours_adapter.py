"""The recipes of this repository for benchmarks/audit.py: their defaults, run by their own commands."""

import os
import subprocess
import sys
from pathlib import Path

import adapting
from adapting import Description, Request, Row, Sample

REPOSITORY = Path(__file__).resolve().parents[2]
HANG_SECONDS = 1800
OF_ALL = {"loss": "loss", "grad_norm": "grad_norm", "tokens": "tokens"}
OF_ANSWERS = {
    f"{name}/{kind}": f"{name}/{kind}"
    for name in ("rewards", "logps", "logits")
    for kind in ("chosen", "rejected")
}
OF_SAMPLES = {
    "reward": "reward",
    "reward_std": "reward_std",
    "equal_groups": "frac_reward_zero_std",
    "length": "completions/mean_length",
    "shortest": "completions/min_length",
    "longest": "completions/max_length",
    "truncated": "completions/clipped_ratio",
    "entropy": "entropy",
}
DESCRIPTION = Description(
    program="preference-recipes",
    packages=["preference-recipes", "transformers", "accelerate", "torch"],
    tags={
        "sft": {**OF_ALL, "accuracy": "mean_token_accuracy"},
        "dpo": {
            **OF_ALL,
            **OF_ANSWERS,
            "rewards/margins": "rewards/margins",
            "rewards/accuracies": "rewards/accuracies",
        },
        "reward": {
            **OF_ALL,
            "accuracy": "accuracy",
            "margin": "margin",
            "min_reward": "min_reward",
            "mean_reward": "mean_reward",
            "max_reward": "max_reward",
        },
        "grpo": {**OF_ALL, **OF_SAMPLES},
        "rloo": {**OF_ALL, **OF_SAMPLES},
    },
    cannot={
        "sft packed": "it has no packing: its rows are padded, and sorted by length",
        "grpo packed": "its prompts are shared, not packed: it has no such flag",
        "rloo packed": "its prompts are shared, not packed: it has no such flag",
        "padding": "it never pads to a multiple; split, whose rows are padded, shows that padding "
        "counts nowhere",
    },
    definitions={
        "sft": {"tokens": "all"},
        "dpo": {"tokens": "all"},
        "reward": {"tokens": "all"},
        "grpo": {"advantages": "batch", "average": "tokens", "std": "groups"},
        "rloo": {"advantages": "leave one out", "average": "tokens", "std": "groups"},
    },
    rounded={},
    notes=[
        "DPO and reward share the prompt of a pair, their default; `packed` runs them without that.",
        "RLOO is recipes/grpo.py with --baseline rloo --advantage_std none.",
        "GRPO and RLOO sample by themselves: which numbers a prompt is sampled with does not depend "
        "on the split. They run at a tenth of the learning rate. At the whole one rounding grows so "
        "fast that within four updates another token is drawn.",
    ],
)


def train(request: Request) -> None:
    output = Path(request.output)
    run = output / "run"
    recipe = {"rloo": "grpo"}.get(request.work, request.work)
    flags = {
        "model_name_or_path": request.model,
        "dataset_name": request.data,
        "output_dir": run,
        "train_batch_size": request.samples,
        "micro_train_batch_size": request.micro,
        "max_epochs": request.epochs,
        "learning_rate": request.learning_rate,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        "adam_epsilon": request.adam_epsilon,
        "max_grad_norm": request.max_grad_norm,
        "logging_steps": request.logging_steps,
        "save_steps": request.save_steps,
        "save_total_limit": 0,
        "save_actor_steps": request.save_steps,
        "seed": request.seed,
        "report_to": "none",
    }
    if request.resume:  # an actor; the checkpoint of the same update is beside it
        actor = Path(request.resume)
        flags["resume"] = actor.parents[1] / "checkpoints" / actor.name
    if request.work in ("dpo", "reward"):
        flags["share_prompts"] = not request.packing
    if recipe == "grpo":
        flags |= {
            "learning_rate": request.learning_rate / 10,
            "rollout_batch_size": request.samples // adapting.GROUP,
            "n_samples_per_prompt": adapting.GROUP,
            "max_new_tokens": adapting.LONGEST_RESPONSE,
            "reward_function": "recording:recorded_reward",
            "drop_equal_groups": False,
        }
        (output / "recording.py").write_text(
            f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            "from ours_adapter import recorded_reward\n"
        )
    if request.work == "rloo":
        flags |= {"baseline": "rloo", "advantage_std": "none"}
    words = [f"--{name}={value}" for name, value in flags.items()]
    config = REPOSITORY / "accelerate_configs/cpu.yaml"
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(config)]
    launcher += ["--num_processes", str(request.processes), "--main_process_port", "0"]
    ended = subprocess.run(
        [sys.executable, *launcher, str(REPOSITORY / f"recipes/{recipe}.py"), *words],
        cwd=output,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "AUDIT_REQUEST": str(output / "request.json"),
        },
        timeout=HANG_SECONDS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if ended.returncode:
        raise RuntimeError(ended.stdout[-2000:])
    for line in adapting.read_lines(run / "metrics.jsonl"):
        if "loss" in line:
            adapting.append(output / "log.jsonl", {"step": line["global_step"], **line})
    folders = {int(path.name.rpartition("_")[2]): path for path in (run / "actors").iterdir()}
    adapting.write_weights(request, folders)
    if recipe != "grpo":
        adapting.write_lines(output / "rows.jsonl", tokens_of(request))


def tokens_of(request: Request) -> list[list[Row]]:
    """The token ids of each row as the recipe's own function makes them."""
    sys.path.insert(0, str(REPOSITORY / "recipes"))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(request.model)
    found = []
    for row in request.rows():
        if request.work == "sft":
            from sft import sft_row

            values = sft_row(row, tokenizer, 1024, "assistant")
            targets = [int(target) for target in values["learned"]]
            found.append([Row(values["input_ids"], targets)])
        else:
            from preference_recipes.data.formats import preference_row

            values = preference_row(row, tokenizer, 1024)
            prompt = values["prompt_ids"]
            found.append(
                [
                    Row(prompt + answer, [0] * len(prompt) + [1] * len(answer))
                    for answer in (values["chosen_ids"], values["rejected_ids"])
                ]
            )
    return found


def recorded_reward(prompts, responses, response_ids, step, **_) -> list[float]:
    """The reward function, which writes down what it is asked about."""
    from transformers import AutoTokenizer

    request = adapting.read(Path(os.environ["AUDIT_REQUEST"]))
    tokenizer = AutoTokenizer.from_pretrained(request.model)
    scores = [adapting.reward(response) for response in responses]
    for prompt, ids, score in zip(prompts, response_ids, scores, strict=True):
        prompt_ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
        adapting.write_sample(request, Sample(step, prompt_ids, list(ids), score))
    return scores


if __name__ == "__main__":
    adapting.main(DESCRIPTION, train)
