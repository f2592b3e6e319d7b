"""What a run prints before its first update and after its last one, a block each."""

from huggingface_hub import HfApi
from tqdm import tqdm

from common import counted, engine, optim
from common.actor import BEST_FOLDER, Actor
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
    last = (run.n_rows - 1) % run.train_batch_size + 1
    of_epoch = f"{run.n_rows} samples / train_batch_size {run.train_batch_size} = "
    of_epoch += f"{counted(run.updates_per_epoch, 'update')} per epoch, the last of {last}"
    warmup = optim.warmup_updates(args, run.total_steps)
    lines = [
        f"model     {args.model_name_or_path} ({type(module.model).__name__}), "
        f"{size:.4g} million parameters, {trained:.4g} million trained",
        f"data      {data}",
        f"updates   {updates or of_epoch}",
        f"schedule  learning rate {args.learning_rate:g}; {args.lr_scheduler_type}, "
        f"{counted(run.total_steps, 'update')}, {warmup} of them warm-up",
        f"update    train_batch_size {args.train_batch_size} {division}",
    ]
    run.bar.write("\n".join(f"  {line}" for line in lines))  # above the bar


def end(actor: Actor) -> None:
    """Ends trackers and bar, prints the result, uploads the model. All processes must call it."""
    run = actor.run
    run.bar.close()
    for tracker in run.accelerator.trackers:
        tracker.finish()
    if run.accelerator.device.type != "cpu":  # what uses gloo ends in `errors.run`
        run.accelerator.state.destroy_process_group()
    if not run.accelerator.is_main_process:
        return
    folder = run.output_dir / "actor"
    took = tqdm.format_interval(run.bar.format_dict["elapsed"])
    updates = counted(run.global_step, "update")
    print(f"done: {updates}, {run.skipped_steps} skipped, took {took}; actor in {folder}")
    best = actor.best
    if best.value is not None:
        folder = run.output_dir / BEST_FOLDER
        kept = f"{run.args.keep_best} {best.value:.4g} at update {best.global_step}"
        print(f"best: {kept}, saved in {folder}")
    if run.args.push_to_hub:
        repository = HfApi().create_repo(run.args.push_to_hub, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=repository.repo_id, folder_path=folder)
        print(f"uploaded {folder} to {repository}", flush=True)
