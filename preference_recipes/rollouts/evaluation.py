"""Evaluates greedy responses to held-out prompts: scores, lengths, the share that is right."""

from typing import Any

import numpy as np

from preference_recipes.rollouts import answers
from preference_recipes.rollouts.rewards import Scores
from preference_recipes.rollouts.rollout import sample
from preference_recipes.rollouts.sampler import Sampler
from preference_recipes.rollouts.samples import Samples


def sample_held_out(sampler: Sampler, eval_set) -> Samples:
    """Returns the policy's greedy responses to a held-out set. All processes must call it."""
    unused = np.zeros((len(eval_set), 1, sampler.args.max_new_tokens))  # nothing is drawn
    return sample(sampler, eval_set[:], unused, temperature=0.0)


def results(
    sampler: Sampler, samples: Samples, scores: Scores, eval_set, prefix: str
) -> tuple[dict[str, float], list[dict]]:
    """Returns the line of a held-out set's evaluation, and its samples for `samples.jsonl`."""
    values = {"scores": scores.total, **of_responses(sampler, samples, eval_set)}
    values |= {f"rewards/{name}/mean": part for name, part in scores.parts.items()}
    return means(values, prefix), samples.examples(sampler.tokenizer, scores, prefix.rstrip("/"))


def of_responses(sampler: Sampler, samples: Samples, eval_set) -> dict[str, Any]:
    """Returns what responses tell by themselves, of each by name: NaN where there is no answer."""
    values: dict[str, Any] = {
        "length": samples.mask.sum(1),
        "eos_rate": samples.ended,
        **samples.of_episodes,
    }
    if "answer" in eval_set.column_names:
        prompts = sampler.tokenizer.batch_decode(samples.prompts)
        texts = map(answers.with_opened_thought, prompts, samples.answers(sampler.tokenizer))
        values["exact_match"] = [
            answers.is_right(text, answer) if answer else np.nan
            for text, answer in zip(texts, eval_set["answer"][:])
        ]
    return values


def means(values: dict[str, Any], prefix: str) -> dict[str, float]:
    """Returns the mean of each, by its tag. NaN counts nowhere; all NaN: no tag."""
    result = {}
    for name, of_samples in values.items():
        numbers = np.asarray(of_samples, dtype=float)
        if not np.isnan(numbers).all():
            result[prefix + name] = float(np.nanmean(numbers))
    return result
