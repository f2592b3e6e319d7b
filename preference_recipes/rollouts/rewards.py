"""Scores responses by a reward model, reward functions and an environment."""

import itertools
import json
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from common import distributed, refuse
from preference_recipes.data import dataset, prompts
from preference_recipes.data.dataset import Data
from preference_recipes.models import load, prepare, scores
from preference_recipes.models.logprobs import LogProbModel
from preference_recipes.rollouts import answers, environments, reward_functions
from preference_recipes.rollouts.reward_functions import ENVIRONMENT, REWARD_MODEL
from preference_recipes.rollouts.sampler import Sampler
from preference_recipes.rollouts.samples import Samples, share_of_groups


class Scores(NamedTuple):
    """The scores of samples, fp32 `[samples]`, on the CPU, the same on every process."""

    total: torch.Tensor  # the weighted sum of the parts that a sample has
    # By the name of the function, or `reward_model`; NaN where a function returned None.
    parts: dict[str, torch.Tensor]

    def minus(self, penalties: torch.Tensor) -> "Scores":
        """Returns the scores less penalties, fp32 `[samples]`."""
        return self._replace(total=self.total - penalties)


def check_settings(args) -> None:
    if not reward_functions.weights_by_part(args):
        refuse(
            "nothing scores the responses: give --reward_model_name_or_path, --reward_function or "
            "an --environment with get_reward"
        )
    if args.environment and args.rollouts_ahead:
        refuse("--environment with --rollouts_ahead 1: not supported together")


def load_prompts(accelerator, args, tokenizer, reads_images: bool = False) -> Data:
    tools = environments.load(args.environment).tools if args.environment else []
    data = dataset.load_data(
        accelerator,
        args,
        tokenizer,
        function=prompts.prompt_row,
        reads_images=reads_images and not args.vllm_url,
        max_new_tokens=args.max_new_tokens,
        tools=tools or None,
    )
    reward_functions.check_calls(args, columns_of(data))
    return data


def columns_of(data: Data) -> list[str]:
    """Returns the training data's columns, which reward functions and environments may get."""
    # All rows of a set have the columns of its first row, with None for missing values.
    firsts = data.train[data.starts]["row_json"]
    return list(dict.fromkeys(itertools.chain.from_iterable(map(json.loads, firsts))))


def limit_vocab_size(policy: LogProbModel, args, data: Data, *others: str) -> None:
    """Limits a policy to tokens that the reference, the reward model and `others` can embed."""
    readers = (args.ref_model_name_or_path, args.reward_model_name_or_path, *others)
    sizes = load.check_embeddings(data, args.model_name_or_path, *readers, draws=True)
    policy.vocab_size = min(sizes.values())


class Grader:
    """Scores responses by a reward model, reward functions and an environment."""

    def __init__(self, accelerator, args, tokenizer, data: Data):
        self.functions = reward_functions.load_functions(args.reward_function)
        self.weights = reward_functions.weights_by_part(args)
        self.columns = columns_of(data)
        self.fingerprints: dict[str, Any] = {}  # part of the run's identity
        self.model: nn.Module | None = None  # prepared
        self.mean = 0.0  # `mean` and `std` normalise its scores
        self.std = 1.0
        name = args.reward_model_name_or_path
        if name is not None:
            model = scores.score_model(name, tokenizer, args, frozen=True)
            if args.normalize_reward:  # recipes/reward.py with --eval_dataset_name writes these
                self.mean = model.config.reward_mean
                self.std = model.config.reward_std
            self.fingerprints["reward model"] = model.fingerprint
            self.model = prepare.frozen_model(accelerator, scores.ScoreModel(model))

    @torch.no_grad()
    def score(self, sampler: Sampler, samples: Samples) -> Scores:
        """Returns the scores of what a sampler drew last. All processes must call it."""
        parts = {}
        if self.model is not None:
            parts[REWARD_MODEL] = self.scores_of_model(sampler, samples)
        if self.weights.keys() - {REWARD_MODEL}:
            parts |= self.scores_of_functions(sampler, samples)
        if sampler.episodes is not None:
            sampler.episodes.close()
        values = np.array([parts[name] for name in self.weights])  # [parts, samples]
        weights = np.array([[weight] for weight in self.weights.values()])
        is_there = ~np.isnan(values)
        sums = np.where(is_there, values * weights, 0.0).sum(0)
        # A part of weight 0 only measures: a response scored by such parts alone has no reward.
        decides = is_there & (weights != 0) if weights.any() else is_there
        sums[~decides.any(0)] = np.nan
        total = torch.tensor(sums, dtype=torch.float32)
        for data_row, reward in zip(samples.row_numbers, total.tolist()):
            if not math.isfinite(reward):
                refuse(
                    f"the reward of data row {data_row} is {reward}: nothing scored it (nan), or "
                    f"fp32 does not hold it (inf); weights: {self.weights}"
                )
        return Scores(total, dict(zip(self.weights, torch.tensor(values, dtype=torch.float32))))

    def scores_of_model(self, sampler: Sampler, samples: Samples) -> list[float]:
        """Returns the reward model's normalised score of each sample, on every process."""
        score_of_sample = {}  # by index
        for indices, batch in samples.scoring_batches(sampler):
            # The model also reads a padding row: other processes may wait for this forward pass.
            scores = self.model(batch).double().cpu().numpy()
            score_of_sample |= dict(zip(indices, ((scores - self.mean) / self.std).tolist()))
        return reward_functions.as_numbers(
            "the reward model", distributed.gather_by_index(score_of_sample), len(samples)
        )

    def scores_of_functions(self, sampler: Sampler, samples: Samples) -> dict[str, list[float]]:
        """Returns the scores of all samples by each function and by the environment.

        The processes share the samples; those of a prompt stay together. NaN stands for None.
        """
        n_prompts = len(samples) // samples.per_prompt
        own_indices = share_of_groups(sampler.accelerator, n_prompts, samples.per_prompt)

        def own_scores() -> list[list[float]]:
            if not own_indices:
                return []
            arguments = function_arguments(sampler, samples, own_indices, self.columns)
            scores_by_name = {
                f"--reward_function {name}": reward_functions.call_function(function, arguments)
                for name, function in self.functions.items()
            }
            if ENVIRONMENT in self.weights:
                name = f"--environment {sampler.args.environment}: `get_reward`"
                scores_by_name[name] = sampler.episodes.call("get_reward")
            as_numbers = reward_functions.as_numbers
            return [as_numbers(name, s, len(own_indices)) for name, s in scores_by_name.items()]

        # If a call ends the run on one process, it must end on all: they would wait forever.
        score_lists = distributed.all_or_none(sampler.accelerator, True, own_scores)
        scores = distributed.gather_by_index(dict(zip(own_indices, zip(*score_lists))))
        names = [name for name in self.weights if name != REWARD_MODEL]
        return dict(zip(names, map(list, zip(*scores))))


def function_arguments(
    sampler: Sampler, samples: Samples, indices: list[int], columns: list[str]
) -> dict[str, Any]:
    """Returns the arguments that reward functions may take for these samples, by name."""
    data = [json.loads(samples.row_json[index]) for index in indices]
    responses = samples.response_texts(sampler.tokenizer)  # of an episode, the last answer
    # With several training sets, these rows may all lack some of the columns.
    names = dict.fromkeys([*columns, *itertools.chain.from_iterable(data)])
    arguments: dict[str, Any] = {name: [values.get(name) for values in data] for name in names}
    arguments["prompts"] = arguments.pop("prompt")  # strings or lists of messages
    arguments["responses"] = [responses[index] for index in indices]
    arguments["response_ids"] = [samples.responses[index] for index in indices]
    arguments["truncated"] = [not samples.ended[index].item() for index in indices]
    texts = sampler.tokenizer.batch_decode([samples.prompts[index] for index in indices])
    arguments["rendered_prompts"] = texts
    arguments["step"] = sampler.run.global_step
    if getattr(sampler.tokenizer, "processor", None) is not None:  # the model reads images
        from preference_recipes.data import images  # only here: text needs none

        files = samples.images or [[]] * len(samples)
        arguments["images"] = [list(map(images.opened, files[index])) for index in indices]
    if samples.messages:
        arguments["messages"] = [samples.messages[index] for index in indices]
        arguments["environments"] = [sampler.episodes.instances[index] for index in indices]
    return arguments


# ============================================================ a reward function
def answer_reward(prompts, responses, answer, rendered_prompts=None, **columns):
    """Returns 1 if the response's final answer is the column `answer`, else 0; None without one.

    Where the column holds a list, any of its entries is right. See `answers.is_right`.
    """
    prompts = rendered_prompts or [""] * len(responses)
    return [
        float(answers.is_right(response, right, prompt)) if dataset.answer_text(right) else None
        for prompt, response, right in zip(prompts, responses, answer)
    ]
