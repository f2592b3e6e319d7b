"""Episodes with tools of ours, and of TRL's GRPOTrainer with `environment_factory`: the same class, model and greedy sampling.

`tests/rollout/test_environments.py` compares both."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bare_runs import bare_sampler
from preference_recipes.data import chat
from preference_recipes.data.rendering import encode
from preference_recipes.rollouts import environments, episodes, rollout
from preference_recipes.rollouts.sampler import Response

MAX_NEW_TOKENS = 200
# What the model says in each turn of each episode: calls that succeed, fail, are several, are none.
CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"a": {}, "b": {}}}}}\n</tool_call>'
SAID = {
    "1+2": [CALL.format("add", 1, 2), "3"],
    "5*6": [CALL.format("multiply", 5, 6), CALL.format("add", 5, '"six"'), "no idea"],
    "7+8+9": ["Two sums: " + CALL.format("add", 7, 8) + "\n" + CALL.format("add", 15, 9), "24"],
    "0": ["nothing to call"],
}
FAILS = "5*6"
# What TRL's `add_response_schema` gives to Qwen3's template.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


class Calculator:
    """As a user of either program writes it."""

    def reset(self, **columns):
        return " Use the tool."

    def add(self, a: int, b: int) -> int:
        """
        Adds two numbers.

        Args:
            a: one of them.
            b: the other one.
        """
        return a + b

    def get_reward(self) -> float:
        return 1.0


def played(accelerator, tokenizer, model, respond=None):
    """Our episodes of all questions; `respond` says something in place of the model."""
    sampler = bare_sampler(
        accelerator, tokenizer, model, max_turns=4, max_length=2000, max_new_tokens=MAX_NEW_TOKENS,
        environment_timeout=0.0, strings_as_messages=False,
    )  # fmt: skip
    schemas = [environments.get_json_schema(Calculator().add)]
    sampler.stage = episodes.Stage(
        sampler, environments.UserClass("E", Calculator, False, True, schemas)
    )
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in SAID]
    prompts = {
        "prompt_ids": [chat.encode_prompt(tokenizer, row["prompt"], schemas).ids for row in rows],
        "columns": [json.dumps(row) for row in rows],
        "row": list(range(1, len(rows) + 1)),
    }
    uniforms = np.zeros((len(rows), 1, MAX_NEW_TOKENS))
    with pytest.MonkeyPatch.context() as patch:
        if respond:
            patch.setattr(sampler.stage, "generate", respond)
        return rollout.sample(sampler, prompts, uniforms, 0.0)


def scripted(tokenizer):
    """Says what `SAID` has for the question that is in the prompt, turn by turn."""
    spoken = dict.fromkeys(SAID, 0)

    def respond(prompts, uniforms, temperature):
        for place, prompt in enumerate(prompts):
            text = tokenizer.decode(prompt)
            question = next(one for one in SAID if f"{one} Use the tool." in text)
            said = SAID[question][spoken[question]] + tokenizer.eos_token
            spoken[question] += 1
            yield place, Response(encode(tokenizer, said), [])

    return respond


def new_model(tokenizer) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def learn(model, samples) -> None:
    """Lets the model say by itself, greedily, what was sampled."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([torch.tensor(p + r) for p, r in zip(samples.prompts, samples.responses)], True)
    is_said = pad(
        [torch.tensor([False] * len(p) + f) for p, f in zip(samples.prompts, samples.is_sampled)],
        True,
    )[:, 1:]
    targets = ids[:, 1:][is_said]
    for _ in range(600):
        logps = model(input_ids=ids).logits[:, :-1][is_said].log_softmax(-1)
        logps = logps.gather(-1, targets[:, None])
        if logps.min() > math.log(0.7):  # so nothing else is likelier
            break
        (-logps.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert logps.min() > math.log(0.7)
    model.eval()


def of_trl(tokenizer, model, folder) -> dict:
    """TRL's own ids and masks of the same questions: its trainer's generation, whole."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(folder), report_to="none", use_cpu=True, bf16=False, per_device_train_batch_size=len(SAID),
        num_generations=2,
        max_completion_length=300, # here TRL counts what tools return, too
        max_tool_calling_iterations=3, top_k=1, temperature=1.0,
        gradient_checkpointing=False, generation_batch_size=len(SAID), shuffle_dataset=False,
    )  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in SAID]
    trainer = GRPOTrainer(
        model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, environment_factory=Calculator,
    )  # fmt: skip
    trainer.num_generations = 1  # greedy samples of a prompt are all the same
    found = trainer._generate_and_score_completions(rows)
    result = {"responses": [], "is_sampled": [], "prompts": []}
    for ids, mask in zip(found["prompt_ids"], found["prompt_mask"]):
        result["prompts"].append(ids[mask.bool()].tolist())
    for ids, mask, of_tools in zip(
        found["completion_ids"], found["completion_mask"], found["tool_mask"]
    ):
        result["responses"].append(ids[mask.bool()].tolist())
        result["is_sampled"].append(of_tools[mask.bool()].bool().tolist())
    return result
