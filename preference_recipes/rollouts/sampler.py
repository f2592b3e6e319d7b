"""What draws responses: the policy, and what else decides them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from common import engine
from common.metrics import Means
from common.progress import Progress


@dataclasses.dataclass
class Sampler:
    """A policy that responds to prompts, from transformers, vLLM servers or with an environment.

    Attributes:
        args: of the recipe.
        data: the run's sets, as `dataset.load_data` returned them.
        model: the trained model, prepared.
        unwrapped: the module inside it, whose `model` is the actor.
        progress: the counters of the run; a sampler only reads them.
        means: takes what is logged about sampling.
        stage: plays episodes with the environment of `--environment`; None: a sample is one answer.
        servers: vLLM servers that sample for this run; None: it generates by itself.
        together: prompts that a batch continues as the model continues each alone: "all", "one
            length", "none". None: not tried yet.
    """

    accelerator: Accelerator
    args: Any
    tokenizer: Any
    data: Any
    model: nn.Module
    progress: Progress
    means: Means
    stage: Any = None
    servers: Any = None
    together: str | None = None

    def __post_init__(self):
        self.unwrapped = engine.unwrapped(self.accelerator, self.model)

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.accelerator.device

    @property
    def output_dir(self) -> Path:
        """Where the run writes."""
        return Path(self.args.output_dir)

    def state(self) -> Any:
        """Returns what a checkpoint holds: a rollout that servers sampled ahead, or None."""
        return None if self.servers is None else self.servers.state(self)

    def load_state(self, state: Any) -> None:
        """Takes over what `state` returned."""
        if self.servers is not None and state is not None:
            self.servers.load_state(state)
