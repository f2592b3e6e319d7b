"""What log lines and `samples.jsonl` contain about responses, in rollouts and evaluations."""

from typing import Any

import numpy as np
import torch

from common import print_once
from preference_recipes.data import dataset
from preference_recipes.models import architecture
from preference_recipes.rollouts.answers import decode_responses, is_right
from preference_recipes.rollouts.context import SamplingContext
from preference_recipes.rollouts.generation import generate
from preference_recipes.rollouts.rewards import Scores
from preference_recipes.rollouts.samples import Samples


def add_rollout_metrics(
    context: SamplingContext,
    samples: Samples,
    scores: Scores | None,
    prefix: str,
    values: dict[str, torch.Tensor],
) -> None:
    """Adds a rollout's values to the next log line. All processes must call it.

    Args:
        scores: None: nothing scores the responses.
        prefix: begins the tags of the lengths.
        values: by tag, each of any shape and the same on every process; NaN is not counted.
    """
    lengths = samples.padded_loss_mask.sum(1)
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
    """Returns a held-out set's metrics, and its samples for `samples.jsonl`."""
    values: dict[str, Any] = {} if scores is None else {"scores": scores.total}
    values |= {
        "length": samples.padded_loss_mask.sum(1),
        "eos_rate": samples.ended,
        **samples.statistics,
    }
    if "answer" in eval_set.column_names:
        prompts = context.tokenizer.batch_decode(samples.prompts)
        texts = samples.response_texts(context.tokenizer)
        values["exact_match"] = [
            is_right(text, answer, prompt) if answer else np.nan
            for text, answer, prompt in zip(texts, eval_set["answer"][:], prompts)
        ]
    values |= parts_of(scores)
    eval_metrics = {}
    for name, column in values.items():
        numbers = np.asarray(column, dtype=float)
        if not np.isnan(numbers).all():  # NaN is not counted
            eval_metrics[prefix + name] = float(np.nanmean(numbers))
    return eval_metrics, samples.examples(context.tokenizer, scores, prefix.rstrip("/"))


def exact_match(
    run, model, tokenizer, eval_set, prefix: str
) -> tuple[dict[str, float], list[dict]]:
    """Answers a held-out set's prompts by greedy decoding; returns the share that is right, by tag.

    It also returns the answers, for `samples.jsonl`. It takes the first `--exact_match_rows` rows
    with an `answer` whose prompt leaves a position for one. All processes must call it.
    """
    args = run.args
    context = SamplingContext(run, model, tokenizer)
    limit = architecture.longest_row(context.unwrapped.model)
    rows_with_answer = [row for row, answer in enumerate(eval_set["answer"][:]) if answer]
    first_rows = rows_with_answer[: args.exact_match_rows]
    lengths = list(map(len, eval_set["prompt_ids"][:]))  # `[:]`: a column reads slowly by row
    usable = [row for row in first_rows if lengths[row] < limit]
    if n_left := len(first_rows) - len(usable):
        print_once(f"{prefix}exact_match: left out ({limit} positions are too few): {n_left} rows")
    if not usable:
        return {}, []
    names = {"row", "prompt_ids", "answer", "images"} & {*eval_set.column_names}
    columns = eval_set.select_columns(sorted(names))[usable]
    responses = generate(
        context,
        columns["prompt_ids"],
        args.max_new_tokens,
        batch_size=8 * args.micro_train_batch_size,
        images=[files or [] for files in columns.get("images", [])],
    )
    response_ids = [response.ids for response in responses]
    texts = decode_responses(tokenizer, response_ids)
    prompts = tokenizer.batch_decode(columns["prompt_ids"])
    examples = [
        {
            "source": prefix.rstrip("/"),
            "row": columns["row"][index],
            "prompt": prompts[index],
            "response": tokenizer.decode(response_ids[index]),
            "answer": " or ".join(answer.split(dataset.ANSWER_SEPARATOR)),
            "right": is_right(texts[index], answer, prompts[index]),
        }
        for index, answer in enumerate(columns["answer"])
    ]
    share = sum(example["right"] for example in examples) / len(examples)
    return {f"{prefix}exact_match": share}, examples
