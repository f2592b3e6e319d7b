"""One vLLM server: its requests, and what is refused in its answers."""

import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any

from preference_recipes.rollouts.samples import Response

# How long an answer may take: that of a rollout's longest response, behind all others in a queue.
TIMEOUT_SECONDS = 3600
# Without the proxies of the surroundings, which do not reach 127.0.0.1.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Server:
    """A vLLM server at an address. Every method raises `SystemExit` with one line if it fails."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.model: str | None = None  # the name of an adapter; None: that of the start

    def call(self, method: str, **arguments: str) -> list:
        """Returns what a method of `vllm_worker.Weights` returns in each worker process."""
        content = {"method": method, "kwargs": arguments}
        return self.send("/collective_rpc", content).get("results", [])

    def complete(self, request: dict[str, Any]) -> list[Response]:
        """Returns the responses to a request to `/v1/completions`."""
        answer = self.send("/v1/completions", {"model": self.model, **request})
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if len(choices) != request["n"]:
            sys.exit(f"{self.url} gave {len(choices)} responses, asked for {request['n']}")
        return [self.response_of(choice, request) for choice in choices]

    def complete_each(self, requests: list[dict]) -> list[Response]:
        return [response for request in requests for response in self.complete(request)]

    def response_of(self, choice: dict[str, Any], request: dict[str, Any]) -> Response:
        """Returns a response, and refuses one that is not what was asked for."""
        ids = choice["token_ids"]
        logps = (choice.get("logprobs") or {}).get("token_logprobs") or []
        if choice.get("prompt_token_ids") != request["prompt"]:
            sys.exit(f"{self.url} read another prompt than it was sent: {choice}")
        if not ids or len(logps) != len(ids):
            sys.exit(f"{self.url} gave {len(ids)} tokens with {len(logps)} log-probs")
        if ids[-1] not in request["stop_token_ids"] and len(ids) != request["max_tokens"]:
            sys.exit(
                f"{self.url} cut a response after {len(ids)} of {request['max_tokens']} tokens"
            )
        return Response(ids, logps if request["temperature"] else [])

    def send(self, path: str, content: dict | None = None) -> dict[str, Any]:
        """Posts a request, and returns the JSON of the answer; an empty dict if it has none."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self.url + path, body, headers, method="POST")
        try:
            with OPENER.open(request, timeout=TIMEOUT_SECONDS) as answer:
                text = answer.read()
                return json.loads(text) if text.strip().startswith(b"{") else {}
        except urllib.error.HTTPError as error:
            said = f"answered {error.code} {error.read().decode(errors='replace')[:300]!r}"
        except (OSError, http.client.HTTPException, ValueError) as error:
            said = f"gave no answer: {type(error).__name__}: {error}"
        sys.exit(f"the vLLM server {self.url}{path} {said}; docs/vllm.md says how it is started")
