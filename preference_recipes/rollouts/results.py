"""What log lines and `samples.jsonl` say of responses: of a rollout, and of held-out prompts."""

from typing import Any

import numpy as np
import torch

from common import print_once
from preference_recipes.data import dataset
from preference_recipes.models import architecture
from preference_recipes.rollouts.answers import decode_answers, is_right
from preference_recipes.rollouts.generation import generate
from preference_recipes.rollouts.rewards import Scores
from preference_recipes.rollouts.sampler import Sampler
from preference_recipes.rollouts.samples import Samples


def log_responses(
    sampler: Sampler,
    samples: Samples,
    scores: Scores | None,
    prefix: str,
    values: dict[str, torch.Tensor],
) -> None:
    """Adds what is known of a rollout to the next log line. All processes must call it.

    Args:
        scores: None: nothing scores the responses.
        prefix: of the tags of their lengths.
        values: by tag, each of any shape and the same on every process; NaN counts nowhere.
    """
    lengths = samples.mask.sum(1)
    if scores is not None:
        values = values | {f"rewards/{name}/mean": part for name, part in scores.parts.items()}
    sampler.means.add_rollout(values | samples.statistics)
    sampler.means.add_rollout({f"{prefix}/min_length": lengths}, reduce="min")
    sampler.means.add_rollout({f"{prefix}/max_length": lengths}, reduce="max")


# ============================================================ evaluation
def held_out_results(
    sampler: Sampler, samples: Samples, scores: Scores | None, eval_set, prefix: str
) -> tuple[dict[str, float], list[dict]]:
    """Returns the line of a held-out set's evaluation, and its samples for `samples.jsonl`."""
    values: dict[str, Any] = {} if scores is None else {"scores": scores.total}
    values |= {"length": samples.mask.sum(1), "eos_rate": samples.ended, **samples.statistics}
    if "answer" in eval_set.column_names:
        prompts = sampler.tokenizer.batch_decode(samples.prompts)
        texts = samples.answers(sampler.tokenizer)
        values["exact_match"] = [
            is_right(text, answer, prompt) if answer else np.nan
            for text, answer, prompt in zip(texts, eval_set["answer"][:], prompts)
        ]
    if scores is not None:
        values |= {f"rewards/{name}/mean": part for name, part in scores.parts.items()}
    line = {}
    for name, column in values.items():
        numbers = np.asarray(column, dtype=float)
        if not np.isnan(numbers).all():  # NaN counts nowhere
            line[prefix + name] = float(np.nanmean(numbers))
    return line, samples.examples(sampler.tokenizer, scores, prefix.rstrip("/"))


def exact_match(actor, eval_set, prefix: str) -> tuple[dict[str, float], list[dict]]:
    """Answers a held-out set's prompts by greedy decoding; returns the share that is right, by tag.

    It also returns all prompts and responses for `samples.jsonl`. Answered are the first
    `--exact_match_rows` of the rows with an `answer`, None: all, but those whose prompt leaves no
    position for an answer. All processes must call it.

    Args:
        actor: the recipe's `Actor`.
    """
    args = actor.run.args
    tokenizer = actor.tokenizer
    sampler = Sampler(actor.run.accelerator, args, tokenizer, actor.model)
    most = architecture.longest_row(sampler.unwrapped.model)
    with_answer = [row for row, answer in enumerate(eval_set["answer"][:]) if answer]
    asked = with_answer[: args.exact_match_rows]
    lengths = list(map(len, eval_set["prompt_ids"][:]))  # at once: a column reads slowly by row
    answered = [row for row in asked if lengths[row] < most]
    if left_out := len(asked) - len(answered):
        print_once(f"{prefix}exact_match: left out ({most} positions are too few): {left_out} rows")
    if not answered:
        return {}, []
    names = {"row", "prompt_ids", "answer", "images"} & {*eval_set.column_names}
    rows = eval_set.select_columns(sorted(names))[answered]
    settings = dict(batch_size=8 * args.micro_train_batch_size)
    settings["images"] = [files or [] for files in rows.get("images", [])]
    responses = generate(sampler, rows["prompt_ids"], args.max_new_tokens, **settings)
    response_ids = [response.ids for response in responses]
    texts = decode_answers(tokenizer, response_ids)
    prompts = tokenizer.batch_decode(rows["prompt_ids"])
    examples = [
        {
            "source": prefix.rstrip("/"),
            "row": rows["row"][number],
            "prompt": prompts[number],
            "response": tokenizer.decode(response_ids[number]),
            "answer": " or ".join(answer.split(dataset.BETWEEN)),
            "right": is_right(texts[number], answer, prompts[number]),
        }
        for number, answer in enumerate(rows["answer"])
    ]
    share = sum(example["right"] for example in examples) / len(examples)
    return {f"{prefix}exact_match": share}, examples
