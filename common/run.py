"""What a training run consists of, once the engine has prepared its model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import nn

from common.best import Best
from common.metrics import Metrics
from common.progress import Progress

if TYPE_CHECKING:
    from preference_recipes.data.dataset import Data
    from preference_recipes.rollouts.episodes import Stage
    from preference_recipes.rollouts.vllm import Servers


@dataclasses.dataclass
class Run:
    """A training run: what evaluation, sampling, saving and logging need.

    Attributes:
        model: what `accelerator.prepare` returned.
        unwrapped: the module inside it, whose `model` is the actor.
        scheduler: a `LambdaLR`, not prepared.
        data: the training set and the held-out sets.
        models: fingerprints of the models that decide the result but are not trained, such as a
            reference model, by the name that messages use. Loading such a model adds its own.
        extra: the recipe's own state, the same on all processes, such as PPO's position in its
            rollout. Checkpoints hold it. It may consist of None, numbers, tensors, lists and dicts
            of them, and dataclasses that are `checkpoint.carried`.
        per_process: the recipe's state that differs between processes, such as the shards of a
            running average of the weights (EMA). It may consist of the same. Each process saves its
            own and gets it back.
        saved_with_actor: the Hugging Face models inside `unwrapped` besides the actor, such as
            PPO's critic, by the name of the folder in which a checkpoint holds each.
            `preference_recipes/tools/export.py` reads these folders.
        stage: plays episodes with the environment of `--environment`; None: a sample is one answer.
        servers: vLLM servers that sample for this run; None: it generates by itself.
        best: the best evaluation so far, see `--keep_best`.
        last_saved: `global_step` of the last checkpoint in `checkpoints` that is this run's own;
            None if there is none.
        stop_signal: the signal that ends the run after its update; 0 if none came.
    """

    accelerator: Accelerator
    args: Any
    tokenizer: Any
    data: Data
    model: nn.Module
    unwrapped: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    progress: Progress
    metrics: Metrics
    models: dict[str, str] = dataclasses.field(default_factory=dict)
    extra: Any = None
    per_process: Any = None
    saved_with_actor: dict[str, nn.Module] = dataclasses.field(default_factory=dict)
    stage: Stage | None = None
    servers: Servers | None = None
    best: Best = dataclasses.field(default_factory=Best)
    last_saved: int | None = None
    stop_signal: int = 0

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.accelerator.device

    @property
    def output_dir(self) -> Path:
        """Where the run writes."""
        return Path(self.args.output_dir)

    @property
    def checkpoints(self) -> Path:
        """Where the run's checkpoints are."""
        return self.output_dir / "checkpoints"
