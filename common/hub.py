"""Uploads the actor to the Hugging Face hub."""

from pathlib import Path

from huggingface_hub import HfApi


def check_push(args) -> None:
    """Makes the repository of `--push_to_hub`, private if it is new; for the main process.

    So a run that may not upload its actor fails before it trains.
    """
    name = getattr(args, "push_to_hub", None)  # benchmarks have their own, fewer arguments
    if name and not args.preview:  # a preview saves no actor
        repository = HfApi().create_repo(name, private=True, exist_ok=True)
        # A token that may only read passes until here if the repository is there already.
        HfApi().auth_check(repository.repo_id, write=True)


def push(args, folder: Path) -> None:
    """Uploads the actor's folder if `--push_to_hub` says so. For the main process, at the end."""
    if args.push_to_hub:
        repository = HfApi().create_repo(args.push_to_hub, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=repository.repo_id, folder_path=folder)
        print(f"uploaded {folder} to {repository}", flush=True)
