"""Evaluates responses to held-out prompts: their scores, their lengths, the share that is right."""

from typing import Any

import numpy as np
import torch

from preference_recipes.rollouts import answers, generation
from preference_recipes.rollouts.rewards import Scores
from preference_recipes.rollouts.sampler import Sampler
from preference_recipes.rollouts.samples import Samples
from preference_recipes.rollouts.schedule import EVALUATION_STREAM


def results(
    sampler: Sampler, samples: Samples, scores: Scores, eval_set, prefix: str
) -> tuple[dict[str, float], list[dict]]:
    """Returns the line of a held-out set's evaluation, and its samples for `samples.jsonl`.

    Args:
        samples: of `sample_held_out`.
        prefix: of the set's tags, such as `eval/`.
    """
    values = {"scores": scores.total, **of_responses(sampler, samples, eval_set)}
    values |= {f"rewards/{name}/mean": part for name, part in scores.parts.items()}
    return means(values, prefix), samples.examples(sampler.tokenizer, scores, prefix.rstrip("/"))


@torch.no_grad()
def sample_held_out(sampler: Sampler, eval_set) -> Samples:
    """Returns the policy's responses to a held-out set. All processes must call it."""
    args = sampler.args
    generator = np.random.default_rng([args.seed, 0, EVALUATION_STREAM])
    uniforms = generator.random((len(eval_set), args.eval_samples, args.max_new_tokens))
    return generation.sample(sampler, eval_set[:], uniforms, args.eval_temperature)


def of_responses(sampler: Sampler, samples: Samples, eval_set) -> dict[str, Any]:
    """Returns what responses tell by themselves: their lengths, whether they end, which are right.

    By name, a number for each sample, or for each prompt that has an answer.
    """
    values: dict[str, Any] = {
        "length": samples.mask.sum(1),
        "eos_rate": samples.ended,
        **samples.of_episodes,
    }
    if "answer" in eval_set.column_names:
        values |= shares_of_right(sampler, samples, eval_set["answer"][:])
    return values


def means(values: dict[str, Any], prefix: str) -> dict[str, float]:
    """Returns the mean of each of these lists, arrays or tensors, by its tag.

    NaN counts nowhere, and a tag without any number is left out.
    """
    result = {}
    for name, of_samples in values.items():
        numbers = np.asarray(of_samples, dtype=float)
        if not np.isnan(numbers).all():
            result[prefix + name] = float(np.nanmean(numbers))
    return result


def shares_of_right(
    sampler: Sampler, samples: Samples, prompt_answers: list[str]
) -> dict[str, np.ndarray]:
    """Returns, by name, for each prompt that has an answer whether responses are right.

    Greedy: whether the one response is. Else the share that are, and whether one is.
    """
    prompts = sampler.tokenizer.batch_decode(samples.prompts)
    texts = list(map(answers.with_opened_thought, prompts, samples.answers(sampler.tokenizer)))
    n_samples = samples.per_prompt
    is_right = np.array(
        [
            [answers.is_right(text, answer) for text in texts[n * n_samples : (n + 1) * n_samples]]
            for n, answer in enumerate(prompt_answers)
            if answer
        ]
    )  # bool `[prompts with an answer, samples]`
    if sampler.args.eval_temperature == 0:
        return {"exact_match": is_right[:, 0]}
    return {
        f"avg_at_{n_samples}": is_right.mean(1),
        f"pass_at_{n_samples}": is_right.any(1),
    }
