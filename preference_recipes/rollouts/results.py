"""What log lines and `samples.jsonl` say of responses: of a rollout, and of held-out prompts."""

from typing import Any

import numpy as np
import torch

from common import print_once
from preference_recipes.data import dataset
from preference_recipes.models import architecture
from preference_recipes.rollouts.answers import decode_answers, is_right
from preference_recipes.rollouts.context import SamplingContext
from preference_recipes.rollouts.generation import generate
from preference_recipes.rollouts.rewards import Scores
from preference_recipes.rollouts.samples import Samples


def log_responses(
    context: SamplingContext,
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
    context.means.add_rollout(values | parts_of(scores) | samples.statistics)
    context.means.add_rollout({f"{prefix}/min_length": lengths}, reduce="min")
    context.means.add_rollout({f"{prefix}/max_length": lengths}, reduce="max")


def parts_of(scores: Scores | None) -> dict[str, torch.Tensor]:
    parts = {} if scores is None else scores.parts
    return {f"rewards/{name}/mean": part for name, part in parts.items()}


# ============================================================ evaluation
def held_out_results(
    context: SamplingContext, samples: Samples, scores: Scores | None, eval_set, prefix: str
) -> tuple[dict[str, float], list[dict]]:
    """Returns the line of a held-out set's evaluation, and its samples for `samples.jsonl`."""
    values: dict[str, Any] = {} if scores is None else {"scores": scores.total}
    values |= {"length": samples.mask.sum(1), "eos_rate": samples.ended, **samples.statistics}
    if "answer" in eval_set.column_names:
        prompts = context.tokenizer.batch_decode(samples.prompts)
        texts = samples.answers(context.tokenizer)
        values["exact_match"] = [
            is_right(text, answer, prompt) if answer else np.nan
            for text, answer, prompt in zip(texts, eval_set["answer"][:], prompts)
        ]
    values |= parts_of(scores)
    line = {}
    for name, column in values.items():
        numbers = np.asarray(column, dtype=float)
        if not np.isnan(numbers).all():  # NaN counts nowhere
            line[prefix + name] = float(np.nanmean(numbers))
    return line, samples.examples(context.tokenizer, scores, prefix.rstrip("/"))


def exact_match(
    run, model, tokenizer, eval_set, prefix: str
) -> tuple[dict[str, float], list[dict]]:
    """Answers a held-out set's prompts by greedy decoding; returns the share that is right, by tag.

    Also what was answered, for `samples.jsonl`. Asked are the first `--exact_match_rows` rows with
    an `answer`, unless a prompt leaves no position for one. All processes must call it.
    """
    args = run.args
    context = SamplingContext(run, model, tokenizer)
    most = architecture.longest_row(context.unwrapped.model)
    with_answer = [row for row, answer in enumerate(eval_set["answer"][:]) if answer]
    asked = with_answer[: args.exact_match_rows]
    lengths = list(map(len, eval_set["prompt_ids"][:]))  # `[:]`: a column reads slowly by row
    answered = [row for row in asked if lengths[row] < most]
    if left_out := len(asked) - len(answered):
        print_once(f"{prefix}exact_match: left out ({most} positions are too few): {left_out} rows")
    if not answered:
        return {}, []
    names = {"row", "prompt_ids", "answer", "images"} & {*eval_set.column_names}
    rows = eval_set.select_columns(sorted(names))[answered]
    responses = generate(
        context,
        rows["prompt_ids"],
        args.max_new_tokens,
        batch_size=8 * args.micro_train_batch_size,
        images=[files or [] for files in rows.get("images", [])],
    )
    response_ids = [response.ids for response in responses]
    texts = decode_answers(tokenizer, response_ids)
    prompts = tokenizer.batch_decode(rows["prompt_ids"])
    examples = [
        {
            "source": prefix.rstrip("/"),
            "row": rows["row"][number],
            "prompt": prompts[number],
            "response": tokenizer.decode(response_ids[number]),
            "answer": " or ".join(answer.split(dataset.ANSWER_SEPARATOR)),
            "right": is_right(texts[number], answer, prompts[number]),
        }
        for number, answer in enumerate(rows["answer"])
    ]
    share = sum(example["right"] for example in examples) / len(examples)
    return {f"{prefix}exact_match": share}, examples
