"""One vLLM server: its requests, and what is refused in its answers."""

import http.client
import json
import os
import sys
import urllib.parse
from typing import Any

from preference_recipes.rollouts.samples import Response

# How long an answer may take: that of a rollout's longest response, behind all others in a queue.
TIMEOUT_SECONDS = 3600

START = (
    "VLLM_SERVER_DEV_MODE=1 PYTHONPATH=<this repository> vllm serve MODEL --generation-config vllm "
    "--logprobs-mode processed_logprobs "
    "--worker-extension-cls preference_recipes.rollouts.vllm_worker.Weights"
)


class Server:
    """A vLLM server at an address. Every method raises `SystemExit` with one line if it fails.

    Attributes:
        url: as the user gave it.
        model: the name by which the server knows the model; with adapters, that of the adapter.
    """

    def __init__(self, url: str):
        self.url = url
        self.address = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        if not self.address.hostname:
            sys.exit(f"--vllm_url {url!r}: expected an address such as http://127.0.0.1:8000")
        self.model = ""

    def describe_model(self) -> dict[str, Any]:
        """Returns what `/v1/models` says of the model that the server was started with."""
        models = self.send("GET", "/v1/models")["data"]
        # Adapters have a parent.
        return next(model for model in models if model.get("parent") is None)

    def call(self, method: str, **arguments: str) -> list:
        """Returns what a method of `vllm_worker.Weights` returns in each worker process."""
        answer = self.send(
            "POST",
            "/collective_rpc",
            {"method": method, "kwargs": arguments},
            if_it_fails=f"start it as docs/vllm.md says: {START}",
        )
        return answer.get("results", [])

    def load_adapter(self, name: str, folder: str) -> None:
        """Loads a peft adapter in the place of the one of this name, if there is one."""
        self.send(
            "POST",
            "/v1/load_lora_adapter",
            {"lora_name": name, "lora_path": folder, "load_inplace": True},
            if_it_fails="start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora and "
            "--max-lora-rank at least --lora_r",
        )

    def complete(self, request: dict[str, Any]) -> list[Response]:
        """Returns the responses to one prompt.

        Args:
            request: the body of a request to `/v1/completions`, without `model`.
        """
        answer = self.send("POST", "/v1/completions", {"model": self.model, **request})
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if len(choices) != request["n"]:
            sys.exit(f"{self.url} gave {len(choices)} responses, asked for {request['n']}")
        return [self.response_of(choice, request) for choice in choices]

    def response_of(self, choice: dict[str, Any], request: dict[str, Any]) -> Response:
        """Returns a response, and refuses one that is not what was asked for."""
        read = choice.get("prompt_token_ids")
        if read != request["prompt"]:
            sys.exit(
                f"{self.url} read another prompt than it was sent: {read} for {request['prompt']}"
            )
        ids = choice["token_ids"]
        logps = (choice.get("logprobs") or {}).get("token_logprobs") or []
        if not ids or len(logps) != len(ids):
            sys.exit(f"{self.url} gave {len(ids)} tokens with {len(logps)} log-probs")
        ended = ids[-1] in request["stop_token_ids"]
        if not ended and len(ids) != request["max_tokens"]:
            sys.exit(
                f"{self.url} cut a response after {len(ids)} of {request['max_tokens']} tokens, "
                f"without a stop token ({choice.get('finish_reason')})"
            )
        return Response(ids, logps if request["temperature"] else [])

    def send(
        self, verb: str, path: str, content: dict | None = None, *, if_it_fails: str = ""
    ) -> dict[str, Any]:
        """Sends a request, and returns the JSON of the answer; an empty dict if it has none.

        Args:
            if_it_fails: what the user can do then.
        """
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        is_secure = self.address.scheme == "https"
        kind = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
        connection = kind(self.address.netloc, timeout=TIMEOUT_SECONDS)
        way_out = f": {if_it_fails}" if if_it_fails else ""
        try:
            body = None if content is None else json.dumps(content)
            connection.request(verb, self.address.path.rstrip("/") + path, body, headers)
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", errors="replace")
            if answer.status != http.client.OK:
                sys.exit(f"{self.url}{path} answered {answer.status} {text[:300]!r}{way_out}")
            return json.loads(text) if text.strip().startswith("{") else {}
        except (OSError, http.client.HTTPException, ValueError) as error:
            sys.exit(
                f"no answer from the vLLM server {self.url}{path}: "
                f"{type(error).__name__}: {str(error)[:200]}{way_out}"
            )
        finally:
            connection.close()
