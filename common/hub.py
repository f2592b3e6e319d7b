"""Finds out once whether the Hugging Face hub can be reached, so that no run waits in vain."""

import functools
import os
import socket
from urllib.parse import urlparse

from huggingface_hub import constants

from common import lazily, speaks_for_all

datasets = lazily("datasets")

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
