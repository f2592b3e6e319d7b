"""Evaluates responses to held-out prompts: their scores, their lengths, the share that is right."""

import sys
from collections.abc import Callable

import numpy as np
import torch

from common.rollout import answers, generation
from common.rollout.rewards import Scores
from common.rollout.samples import Samples
from common.rollout.schedule import EVALUATION_STREAM
from common.run import Run


def check_settings(args) -> None:
    """Refuses several responses to a prompt if all would be the same.

    Args:
        args: `RolloutArgs`.
    """
    if args.eval_samples > 1 and args.eval_temperature == 0:
        sys.exit(
            f"--eval_samples {args.eval_samples} needs --eval_temperature above 0: greedy "
            "responses to one prompt are all the same"
        )


@torch.no_grad()
def evaluate(run: Run, score: Callable[[Samples], Scores]) -> None:
    """Logs how the policy responds to each held-out set. All processes must call it.

    Responses are greedy, or drawn at `--eval_temperature`, `--eval_samples` to each prompt.

    Args:
        score: the scores of some samples.
    """
    args = run.args
    line = {}
    examples = []
    with run.metrics.timed("paused"):
        for prefix, eval_set in run.data.eval_sets.items():
            draws = np.random.default_rng([args.seed, 0, EVALUATION_STREAM])
            uniforms = draws.random((len(eval_set), args.eval_samples, args.max_new_tokens))
            prompts = eval_set[:]
            samples = generation.sample(run, prompts, uniforms, args.eval_temperature)
            scores = score(samples)
            values = {
                "scores": scores.total,
                "length": [len(response) for response in samples.responses],
                "eos_rate": samples.ended,
            }
            for name, part in scores.parts.items():
                scored = part[~part.isnan()]
                if len(scored):
                    values[f"rewards/{name}/mean"] = scored
            if "answer" in prompts:
                values |= shares_of_right(run, samples, prompts["answer"])
            for name, value in values.items():
                line[prefix + name] = float(np.mean(np.asarray(value, dtype=float)))
            examples += samples.examples(run.tokenizer, scores, prefix.rstrip("/"))
    run.metrics.log_evaluation(line, examples)


def shares_of_right(run: Run, samples: Samples, prompt_answers: list[str]) -> dict[str, np.ndarray]:
    """Returns for each prompt, by name, the share of its responses that are right.

    Args:
        prompt_answers: one for each prompt; prompts without one are left out.
    """
    texts = run.tokenizer.batch_decode(samples.responses, skip_special_tokens=True)
    n_samples = samples.per_prompt
    right_of_prompts = []
    for prompt, answer in enumerate(prompt_answers):
        if answer:
            first = prompt * n_samples
            responses = texts[first : first + n_samples]
            right_of_prompts.append([answers.is_right(text, answer) for text in responses])
    is_right = np.array(right_of_prompts)  # bool `[prompts with an answer, samples]`
    if run.args.eval_temperature == 0:
        return {"exact_match": is_right[:, 0]}
    return {
        f"avg_at_{n_samples}": is_right.mean(1),
        f"pass_at_{n_samples}": is_right.any(1),
    }
