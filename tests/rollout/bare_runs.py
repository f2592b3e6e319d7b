"""Samplers without a recipe: what sampling, scoring and evaluating look at, and nothing else."""

import datasets
import torch
from accelerate import Accelerator

from common.metrics import Means
from common.progress import Progress
from preference_recipes.data.dataset import Data
from preference_recipes.models.packing import Packer
from preference_recipes.rollouts.args import RewardArgs
from preference_recipes.rollouts.rewards import Grader
from preference_recipes.rollouts.sampler import Sampler

SHARING = Packer(torch.device("cpu"), share=True)


def bare_sampler(accelerator=None, tokenizer=None, model=None, data=None, **settings) -> Sampler:
    """A sampler of a Hugging Face model, or of none, with these arguments."""
    wrapper = torch.nn.Module()
    if model is not None:
        wrapper.model = model
        wrapper.config = model.config
        wrapper.vocab_size = model.config.get_text_config().vocab_size
    run = Progress(10, train_batch_size=4, max_epochs=2, max_steps=0)
    run.accelerator = accelerator or Accelerator(cpu=True)
    sizes = dict(max_length=64, max_new_tokens=8, score_batch_size=4, micro_train_batch_size=4)
    run.args = RewardArgs(**sizes)
    vars(run.args).update(settings)  # maybe a recipe's own
    data = data or data_of(['{"prompt": "p"}'])
    means = Means(run.accelerator)
    return Sampler(run, wrapper, tokenizer, data, SHARING, means, environment=run.args.environment)


def bare_grader(**settings) -> Grader:
    sampler = bare_sampler(**settings)
    return Grader(sampler.accelerator, sampler.args, sampler.tokenizer, sampler.data)


def grader_of(weights: dict | None = None, **functions) -> Grader:
    grader = bare_grader()
    grader.functions = functions
    grader.weights = weights or dict.fromkeys(functions, 1.0)
    return grader


def data_of(*sets: list[str]) -> Data:
    """Training sets whose rows are these JSON texts."""
    train = datasets.Dataset.from_dict({"row_json": [text for texts in sets for text in texts]})
    starts = [sum(map(len, sets[:place])) for place in range(len(sets))]
    return Data(train, starts, eval_sets={}, converter=None)
