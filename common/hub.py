"""The Hugging Face hub: finds out once whether it can be reached, and uploads the actor."""

import functools
import os
import socket
import sys
from pathlib import Path
from urllib.parse import urlparse

import datasets
from huggingface_hub import HfApi, constants, get_token

from common import in_one_line, speaks_for_all

SECONDS = 5


@functools.cache
def reach() -> None:
    """Goes offline, and says so, if the hub cannot be reached.

    Otherwise `huggingface_hub` would ask for each file six times, for a minute. Offline, what was
    downloaded before is used, and all else is refused at once. Behind a proxy nothing is tried:
    only the proxy knows.
    """
    proxies = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    if constants.is_offline_mode() or any(os.environ.get(name) for name in proxies):
        return
    endpoint = urlparse(constants.ENDPOINT)
    port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
    try:
        socket.create_connection((endpoint.hostname, port), timeout=SECONDS).close()
    except OSError as error:
        constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True
        if speaks_for_all():
            print(
                f"{endpoint.hostname} cannot be reached ({error}): only what was downloaded before "
                "is used",
                flush=True,
            )


def check_push(args) -> None:
    """Makes the repository of `--push_to_hub`, private if it is new; for the main process.

    So a run that could not upload its actor is refused before it trains.

    Raises:
        SystemExit: nobody is logged in, or the hub does not let this user write there.
    """
    name = getattr(args, "push_to_hub", None)  # benchmarks have their own, fewer arguments
    if not name or args.preview:  # a preview saves no actor
        return
    reach()
    if constants.is_offline_mode():
        sys.exit(f"--push_to_hub {name}: the hub cannot be reached, or HF_HUB_OFFLINE is set")
    if get_token() is None:
        sys.exit(f"--push_to_hub {name}: log in before by `hf auth login`, or set HF_TOKEN")
    try:
        repository = HfApi().create_repo(name, private=True, exist_ok=True)
        # A token that may only read passes until here if the repository is there already.
        HfApi().auth_check(repository.repo_id, write=True)
    except Exception as error:  # the client has several kinds, and lets those of httpx through
        sys.exit(f"--push_to_hub {name}: {in_one_line(error)}")


def push(args, folder: Path) -> None:
    """Uploads the actor's folder if `--push_to_hub` says so. For the main process, at the end.

    Raises:
        SystemExit: the upload failed. The message has the command that does it later.
    """
    name = args.push_to_hub
    if not name:
        return
    try:
        repository = HfApi().create_repo(name, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=repository.repo_id, folder_path=folder)
    except Exception as error:  # whatever it is, the actor must not seem lost
        sys.exit(
            f"--push_to_hub {name}: {in_one_line(error)}. {folder} is whole; upload it by "
            f"hf upload {name} {folder} --private"
        )
    print(f"uploaded {folder} to {repository}", flush=True)
