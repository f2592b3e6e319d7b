"""What a run prints before its first update and after its last one, a block each."""

import re
import time
from pathlib import Path

from huggingface_hub import HfApi
from torch import nn
from tqdm import tqdm

from common import best, counted, engine, log, optim, record
from common.actor import Actor
from common.checkpoint import Checkpoint
from common.run import Run

# Where TensorBoard shows the key charts. Without smoothing: it would smooth a few evaluations as it
# does hundreds of updates, and draw them far from their values.
KEY_CHARTS = "http://localhost:6006/#custom_scalars&_smoothingWeight=0"


def begin(checkpoint: Checkpoint, data: str, updates: str = "") -> None:
    """Prints what is trained on what, and how; once on each node. All processes may call it.

    Args:
        data: what the run learns from.
        updates: the arithmetic of its updates, where it is not that of a plain epoch.
    """
    run = checkpoint.run
    args = run.args
    if not run.accelerator.is_local_main_process:
        return
    lines = {
        "model": describe_model(args, checkpoint.actor.unwrapped),
        "data": data,
        "updates": updates or run.progress.describe(),
        "schedule": optim.describe_schedule(args, run.total_steps, checkpoint.scheduler),
        "update": describe_update(run),
        "engine": engine.describe(run.accelerator),
        "output": args.output_dir,
    }
    if args.eval_dataset_name is None:
        lines["held out"] = "nothing: give --eval_dataset_name to see more than the training loss"
    if not args.save_steps:
        lines["checkpoints"] = "none but when a signal ends the run; give --save_steps for others"
    if "tensorboard" in args.report_to:
        lines["curves"] = (
            f"tensorboard --logdir {args.output_dir}; the key ones are at {KEY_CHARTS}"
        )
    width = max(len(title) for title in lines)
    rows = [f"  {title:{width}}  {text}" for title, text in lines.items()]
    run.logger.bar.write("\n".join(rows))  # above the bar


def describe_model(args, module: nn.Module) -> str:
    """Returns name, architecture, size and dtype of the model that is trained."""
    total = engine.count_parameters(module)
    trained = engine.count_trained_parameters(module)
    share = "all trained" if trained == total else f"{trained / 1e6:.4g} million trained"
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    critic = " with the critic's" if hasattr(module, "critic") else ""
    return (
        f"{args.model_name_or_path} ({type(module.model).__name__}), "
        f"{total / 1e6:.4g} million parameters{critic}, {share}, weights in {dtype}"
    )


def describe_update(run: Run) -> str:
    """Returns how the samples of an update are divided."""
    args = run.args
    processes = counted(run.accelerator.num_processes, "process")
    if args.micro_train_tokens:
        division = f"in micro-batches of up to {args.micro_train_tokens} tokens on {processes}"
    else:
        steps = counted(run.accelerator.gradient_accumulation_steps, "gradient accumulation step")
        division = f"= micro_train_batch_size {args.micro_train_batch_size} x {processes} x {steps}"
    return f"train_batch_size {args.train_batch_size} {division}"


def end(actor: Actor) -> None:
    """Closes the log, prints the result, uploads the model. All processes must call it."""
    run = actor.run
    run.logger.close()
    if not run.accelerator.is_main_process:
        return
    time_taken = tqdm.format_interval(time.monotonic() - run.logger.started)
    folder = run.output_dir / "actor"
    updates = counted(run.global_step, "update")
    print(
        f"done: {updates}, {run.progress.skipped_steps} skipped, took {time_taken}; "
        f"actor in {folder}"
    )
    patterns = [log.pattern(tags) for tags in run.logger.charts.values()]
    table = record.before_and_after(run.output_dir)
    shown = [row for row in table[1:] if any(re.match(each, row[0]) for each in patterns)]
    width = max([len(name) for name, _, _ in shown], default=0)
    for name, before, after in [*table[:1], *shown]:
        print(f"  {name:{width}}  {before:>10}  {after:>10}")
    for line in actor.best.describe_end():
        print(line, flush=True)
    if run.args.push_to_hub:
        upload(run.output_dir / best.FOLDER if run.args.keep_best else folder, run.args.push_to_hub)


def upload(folder: Path, name: str) -> None:
    """Uploads an actor to a repository of the hub, which is private if it is new."""
    repository = HfApi().create_repo(name, private=True, exist_ok=True)
    HfApi().upload_folder(repo_id=repository.repo_id, folder_path=folder)
    print(f"uploaded {folder} to {repository}", flush=True)
