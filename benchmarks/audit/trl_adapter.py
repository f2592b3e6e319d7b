"""TRL's trainers for benchmarks/audit.py: their defaults, but for what a tiny run in fp32 on a CPU needs."""

from pathlib import Path

import adapting
from adapting import Description, Request, Row, Sample

LIBRARIES = [
    "datasets",
    *(f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "reward", "kto", "grpo", "rloo")),
]
OF_ALL = {"loss": "loss", "grad_norm": "grad_norm", "tokens": "num_tokens"}
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
    "terminated_length": "completions/mean_terminated_length",
    "entropy": "entropy",
}
DESCRIPTION = Description(
    program="TRL",
    packages=["trl", "transformers", "accelerate", "torch"],
    tags={
        "sft": {**OF_ALL, "accuracy": "mean_token_accuracy", "entropy": "entropy"},
        "dpo": {
            **OF_ALL,
            **OF_ANSWERS,
            "rewards/margins": "rewards/margins",
            "rewards/accuracies": "rewards/accuracies",
            "chosen_accuracy": "mean_token_accuracy",
            "entropy": "entropy",
        },
        "reward": {
            **OF_ALL,
            "accuracy": "accuracy",
            "margin": "margin",
            "mean_reward": "mean_reward",
        },
        "kto": {
            **OF_ALL,
            **OF_ANSWERS,
            "rewards/margins": "rewards/margins",
            "entropy": "entropy",
        },
        "grpo": {**OF_ALL, **OF_SAMPLES},
        "rloo": {**OF_ALL, **OF_SAMPLES, "kl": "kl"},
    },
    cannot={
        **{
            f"{work} packed": "the trainer has no packing"
            for work in ("dpo", "reward", "kto", "grpo", "rloo")
        },
        "grpo last-update": "a generation batch that is not whole is left out, see RepeatSampler",
        "rloo last-update": "a generation batch that is not whole is left out, see RepeatSampler",
    },
    definitions={
        "sft": {"tokens": "all"},
        "dpo": {"tokens": "all"},
        "reward": {"tokens": "all"},
        "kto": {"tokens": "all"},
        "grpo": {"tokens": "all", "advantages": "group", "average": "tokens"},
        "rloo": {
            "tokens": "all",
            "advantages": "leave one out",
            "average": "sequences",
            "kl": "0.05",
        },
    },
    rounded={},
    notes=[
        "bf16 and gradient checkpointing, which are on by default, are off: the runs are in fp32.",
        "KTO has loss_type apo_zero_unpaired. The default estimates a KL on the rows of a "
        "micro-batch, by its definition, so that it cannot be the same for another split.",
        "min_reward and max_reward of the reward trainer are not looked at: by its documentation they "
        "are averaged over the logging interval, which is its choice.",
        "GRPO and RLOO train a model whose `generate` gives scripted responses, the same for each "
        "split: which numbers a sampler draws is no matter of counting.",
    ],
)


def train(request: Request) -> None:
    import datasets
    import trl
    from transformers import TrainerCallback

    output = Path(request.output)

    class Log(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            if state.is_world_process_zero and "loss" in logs:
                adapting.append(output / "log.jsonl", {"step": state.global_step, **logs})

    trainer_class, config_class, settings = {
        "sft": (trl.SFTTrainer, trl.SFTConfig, of_packing(request)),
        "dpo": (trl.DPOTrainer, trl.DPOConfig, {}),
        "reward": (trl.RewardTrainer, trl.RewardConfig, {}),
        "kto": (trl.KTOTrainer, trl.KTOConfig, {"loss_type": "apo_zero_unpaired"}),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig, of_rollouts()),
        "rloo": (trl.RLOOTrainer, trl.RLOOConfig, of_rollouts()),
    }[request.work]
    if request.pad_to:
        settings["pad_to_multiple_of"] = request.pad_to
    config = config_class(
        output_dir=str(output),
        per_device_train_batch_size=request.micro,
        gradient_accumulation_steps=request.accumulation,
        num_train_epochs=request.epochs,
        learning_rate=request.learning_rate,
        lr_scheduler_type="linear",
        adam_epsilon=request.adam_epsilon,
        max_grad_norm=request.max_grad_norm,
        logging_steps=request.logging_steps,
        save_steps=request.save_steps,
        seed=request.seed,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **settings,
    )
    rows = request.rows()
    arguments = {}
    model = request.model
    if request.work in ("grpo", "rloo"):
        model = scripted_model(request)
        arguments["reward_funcs"] = recording_reward(request)
    trainer = trainer_class(
        model=model,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        callbacks=[Log()],
        **arguments,
    )
    if adapting.is_main() and not request.packing:
        adapting.write_lines(output / "rows.jsonl", tokens_of(trainer, request.work))
    trainer.train(resume_from_checkpoint=request.resume or None)
    if adapting.is_main():
        checkpoints = output.glob("checkpoint-*")
        adapting.write_weights(
            request, {int(path.name.partition("-")[2]): path for path in checkpoints}
        )


def of_packing(request: Request) -> dict:
    return {"packing": True, "max_length": adapting.PACKED_LENGTH} if request.packing else {}


def of_rollouts() -> dict:
    return {
        "num_generations": adapting.GROUP,
        "max_completion_length": adapting.LONGEST_RESPONSE,
    }


def tokens_of(trainer, work: str) -> list[list[Row]]:
    """The token ids of each row as the trainer's own data set holds them."""

    def row(ids: list[int], answer: list[int]) -> Row:
        return Row(ids + answer, [0] * len(ids) + [1] * len(answer))

    data = trainer.train_dataset
    if work == "sft":
        return [
            [Row(one["input_ids"], [int(label != -100) for label in one["labels"]])] for one in data
        ]
    if work == "dpo":
        return [
            [row(one["prompt_ids"], one["chosen_ids"]), row(one["prompt_ids"], one["rejected_ids"])]
            for one in data
        ]
    if work == "reward":
        return [[row([], one["chosen_ids"]), row([], one["rejected_ids"])] for one in data]
    if work == "kto":
        return [[row(one["prompt_ids"], one["completion_ids"])] for one in data]
    return []


def scripted_model(request: Request):
    """A model that answers by script; all else is the model's own."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(request.model)
    tokenizer = AutoTokenizer.from_pretrained(request.model)

    def generate(input_ids, **_):
        prompts = tokenizer.batch_decode(input_ids, skip_special_tokens=True)
        responses = []
        for number, prompt in enumerate(prompts):
            text = adapting.scripted_response(prompt, number % adapting.GROUP)
            ids = tokenizer(text, add_special_tokens=False).input_ids
            ids = [*ids, tokenizer.eos_token_id]
            ids = ids[: adapting.LONGEST_RESPONSE]
            ids += [tokenizer.pad_token_id] * (adapting.LONGEST_RESPONSE - len(ids))
            responses.append(ids)
        return torch.cat([input_ids, torch.tensor(responses, device=input_ids.device)], 1)

    model.generate = generate
    return model


def recording_reward(request: Request):
    """The reward function, which writes down what it is asked about."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(request.model)

    def reward(prompts, completions, completion_ids, trainer_state, **_) -> list[float]:
        scores = [adapting.reward(completion[0]["content"]) for completion in completions]
        for prompt, ids, score in zip(prompts, completion_ids, scores, strict=True):
            prompt_ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
            step = trainer_state.global_step
            adapting.write_sample(request, Sample(step, prompt_ids["input_ids"], ids, score))
        return scores

    return reward


if __name__ == "__main__":
    adapting.main(DESCRIPTION, train, LIBRARIES)
