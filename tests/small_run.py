"""A run of one linear layer in this process, with all that a checkpoint holds but a saved actor."""

import types
from pathlib import Path

import torch
from accelerate import Accelerator

from common.actor import ActorSaver
from common.checkpoint import Checkpoint
from common.metrics import Flop, Means
from common.run import Run


class Settings(types.SimpleNamespace):
    may_change = frozenset()


class NoFolder(ActorSaver):
    """An actor that is never written: a linear layer is no Hugging Face model."""

    def save(self, directory=None, weights=None) -> None:
        pass

    def write_into(self, parent: Path) -> None:
        pass


def small_run(folder: Path, **settings) -> Checkpoint:
    """A run before its first update: 100 rows, 4 in an update. Its parts are the checkpoint's."""
    length = dict(train_batch_size=4, max_epochs=1, max_steps=0, stop_after=0)
    saves = dict(save_steps=0, save_total_limit=2, save_dtype=None, keep_best=None)
    saves |= dict(resume="auto", run_name=None, push_to_hub=None, learning_rate=0.1, values_steps=0)
    given = dict(output_dir=str(folder), seed=0, report_to=["none"], **length, **saves)
    args = Settings(**given | settings)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    layer = torch.nn.ModuleDict({"model": torch.nn.Linear(2, 1)})
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(layer, optimizer)
    run = Run(accelerator, args, 100, flop=Flop(0, 0, None), bar_metric="loss", charts={"loss": []})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1 / (1 + step))
    return Checkpoint(
        run,
        NoFolder(run, model, tokenizer=None),
        optimizer,
        scheduler,
        Means(accelerator),
        must_match=[types.SimpleNamespace(fingerprints={"data": "d"})],
    )


def update(checkpoint: Checkpoint) -> None:
    """One update of 4 samples and 9 tokens."""
    checkpoint.model["model"](torch.randn(4, 2)).sum().backward()
    checkpoint.optimizer.step()
    checkpoint.scheduler.step()
    checkpoint.optimizer.zero_grad()
    checkpoint.run.update_done(True, n_samples=4, n_tokens=9)
