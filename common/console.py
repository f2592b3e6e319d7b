"""What a run prints before its first update and after its last one, a block each."""

from pathlib import Path

from huggingface_hub import HfApi
from tqdm import tqdm

from common import counted, engine, optim
from common.actor import BEST_FOLDER, Actor, metric_of
from common.checkpoint import Checkpoint


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
    module = checkpoint.actor.unwrapped
    size, trained = [count / 1e6 for count in engine.count_parameters(module)]
    processes = counted(run.accelerator.num_processes, "process")
    steps = counted(run.accelerator.gradient_accumulation_steps, "gradient accumulation step")
    division = f"= micro_train_batch_size {args.micro_train_batch_size} x {processes} x {steps}"
    if args.micro_train_tokens:
        division = f"in micro-batches of up to {args.micro_train_tokens} tokens on {processes}"
    lines = {
        "model": f"{args.model_name_or_path} ({type(module.model).__name__}), "
        f"{size:.4g} million parameters, {trained:.4g} million trained",
        "data": data,
        "updates": updates or run.describe(),
        "schedule": optim.describe_schedule(args, run.total_steps, checkpoint.scheduler),
        "update": f"train_batch_size {args.train_batch_size} {division}",
        "engine": engine.describe(run.accelerator),
        "output": args.output_dir,
    }
    if args.eval_dataset_name is None:
        lines["held out"] = "nothing: give --eval_dataset_name to see more than the training loss"
    if not args.save_steps:
        lines["checkpoints"] = "none but when a signal ends the run; give --save_steps for others"
    if "tensorboard" in args.report_to:
        lines["curves"] = f"tensorboard --logdir {args.output_dir}; the key ones: Custom scalars"
    width = max(len(title) for title in lines)
    rows = [f"  {title:{width}}  {text}" for title, text in lines.items()]
    run.logger.bar.write("\n".join(rows))  # above the bar


def end(actor: Actor) -> None:
    """Closes the log, prints the result, uploads the model. All processes must call it."""
    run = actor.run
    run.logger.close()
    if not run.accelerator.is_main_process:
        return
    folder = run.output_dir / "actor"
    took = tqdm.format_interval(run.logger.bar.format_dict["elapsed"])
    updates = counted(run.global_step, "update")
    print(f"done: {updates}, {run.skipped_steps} skipped, took {took}; actor in {folder}")
    kept = actor.best
    if kept.value is not None:
        folder = run.output_dir / BEST_FOLDER
        metric, _ = metric_of(run.args.keep_best)
        print(f"best: {metric} {kept.value:.4g} at update {kept.global_step}, saved in {folder}")
    if run.args.push_to_hub:
        upload(folder, run.args.push_to_hub)


def upload(folder: Path, name: str) -> None:
    """Uploads an actor to a repository of the hub, which is private if it is new."""
    repository = HfApi().create_repo(name, private=True, exist_ok=True)
    HfApi().upload_folder(repo_id=repository.repo_id, folder_path=folder)
    print(f"uploaded {folder} to {repository}", flush=True)
