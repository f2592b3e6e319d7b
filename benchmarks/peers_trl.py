"""TRL's side of benchmarks/peers.py, run by TRL's own virtual environment: one trainer, settings from a JSON file.

    python benchmarks/peers_trl.py SETTINGS.json

SETTINGS: `work` (dpo, sft, reward, ppo, grpo, distill), `model`, for ppo `scorer`, for distill `teacher`, `data` (a .jsonl file in the order to train in), `log`, `equal`, see `make_equal`, and
`config`, the fields of the trainer's own config that differ from its defaults. Writes to `log` a JSON line an update, what TRL logs and `perf/seconds`, the time since the line before.
"""

import contextlib
import importlib.util
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from datasets import load_dataset
from transformers import TrainerCallback


class Log(TrainerCallback):
    """Times updates from log to log, which leaves nothing of an update out."""

    def __init__(self, path: str):
        self.path = path

    def on_train_begin(self, *_, **__):
        self.since = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **_):
        if not {"loss", "loss/policy_avg"} & set(logs):  # the summary at the end
            return
        now = time.perf_counter()
        line = {"global_step": state.global_step, **logs, "perf/seconds": now - self.since}
        if not args.use_cpu:
            line["perf/peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.since = now


class Draws:
    """In the place of `torch.multinomial`: draws by the numbers that our recipe draws with, see `SampleByUniform` in preference_recipes/rollouts/generation.py."""

    def __init__(self, generate, seed: int, prompts: int, steps: int, stream: tuple = (1,)):
        self.generate, self.seed, self.size, self.rollouts = generate, seed, (prompts, steps), 0
        self.stream = stream

    def start(self, *args, **kwargs):
        """In the place of the policy's `generate`: one call is a rollout."""
        self.uniforms = torch.from_numpy(
            np.random.default_rng([self.seed, self.rollouts, *self.stream]).random(self.size)
        )
        self.rollouts, self.step = self.rollouts + 1, 0
        return self.generate(*args, **kwargs)

    def __call__(self, probs, num_samples):
        cumulative, self.step = probs.double().cumsum(-1), self.step + 1
        return torch.searchsorted(
            cumulative, self.uniforms[:, self.step - 1, None] * cumulative[:, -1:], right=True
        ).clamp(max=probs.shape[1] - 1)


def ppo(settings: dict):
    """TRL's PPO trainer, in the order of the file, sampling with our numbers."""
    import trl.experimental.ppo.ppo_trainer as module
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    args, dtype = PPOConfig(**settings["config"]), torch.float32
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype) for _ in range(2)
    )
    critic, reward = (
        AutoModelForSequenceClassification.from_pretrained(
            settings["scorer"], dtype=dtype, num_labels=1
        )
        for _ in range(2)
    )
    data = load_dataset("json", data_files=settings["data"], split="train")
    data = data.map(
        lambda row: {"input_ids": tokenizer(row["prompt"]).input_ids},
        remove_columns=data.column_names,
    )
    draws = Draws(
        policy.generate,
        args.seed,
        settings["config"]["local_rollout_forward_batch_size"],
        args.response_length,
    )
    policy.generate, torch.multinomial = draws.start, draws
    loader = module.DataLoader
    module.DataLoader = lambda dataset, shuffle=False, **kwargs: loader(
        dataset or [], **kwargs
    )  # no evaluation: an empty set
    return PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=critic,
        train_dataset=data,
        callbacks=[Log(settings["log"])],
    )


def grpo(settings: dict):
    """TRL's GRPO trainer, in the order of the file, sampling with our numbers on a CPU."""
    from peers_reward import digits
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(**settings["config"])
    trainer = GRPOTrainer(
        model=settings["model"],
        reward_funcs=digits,
        args=args,
        train_dataset=load_dataset("json", data_files=settings["data"], split="train"),
        callbacks=[Log(settings["log"])],
    )
    if not args.use_cpu:  # our numbers are drawn on the CPU: its own sampling is faster
        return trainer
    samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
    draws = Draws(
        trainer.model.generate, args.seed, samples, args.max_completion_length, stream=(1, 0)
    )
    trainer.model.generate, torch.multinomial = draws.start, draws
    return trainer


def distill(settings: dict):
    """TRL's distillation trainer, in the order of the file, sampling with our numbers on a CPU."""
    from trl import DistillationConfig, DistillationTrainer

    args = DistillationConfig(**settings["config"])
    trainer = DistillationTrainer(
        model=settings["model"],
        teacher_model=settings["teacher"],
        args=args,
        train_dataset=load_dataset("json", data_files=settings["data"], split="train"),
        callbacks=[Log(settings["log"])],
    )
    if not args.use_cpu:  # our numbers are drawn on the CPU: its own sampling is faster
        return trainer
    samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
    draws = Draws(trainer.model.generate, args.seed, samples, args.max_completion_length)
    trainer.model.generate, torch.multinomial = draws.start, draws
    return trainer


def make_equal() -> None:
    """Lets TRL score only what is learned, as on a GPU, and take fp32 products from oneDNN as our recipes do."""
    import trl.trainer.utils

    # The trainers' question; the kernels ask for themselves.
    if hasattr(trl.trainer.utils, "_use_triton"):
        trl.trainer.utils._use_triton = lambda device: True
    with contextlib.suppress(ImportError):  # of TRL 1.10
        import trl.trainer.distillation_trainer

        trl.trainer.distillation_trainer._use_triton = lambda device: True
    path = Path(__file__).resolve().parent.parent / "preference_recipes/models/onednn.py"
    spec = importlib.util.spec_from_file_location("onednn", path)
    onednn = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(onednn)
    onednn.use_onednn()


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        settings = json.load(file)
    if settings["equal"]:
        make_equal()
    if settings["work"] == "ppo":
        ppo(settings).train()
        return
    if settings["work"] in ("grpo", "distill"):
        (grpo if settings["work"] == "grpo" else distill)(settings).train()
        return
    # Imported one by one as a user's script does: TRL's own package imports lazily.
    if settings["work"] == "dpo":
        from trl import DPOConfig as Config
        from trl import DPOTrainer as Trainer
    elif settings["work"] == "sft":
        from trl import SFTConfig as Config
        from trl import SFTTrainer as Trainer
    else:
        from trl import RewardConfig as Config
        from trl import RewardTrainer as Trainer
    data = load_dataset("json", data_files=settings["data"], split="train")
    trainer = Trainer(
        model=settings["model"],
        args=Config(**settings["config"]),
        train_dataset=data,
        callbacks=[Log(settings["log"])],
    )
    trainer.train()


if __name__ == "__main__":
    main()
