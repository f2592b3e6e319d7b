"""A vLLM server of the standard library, which answers with the project's own generator.

It has the endpoints that `preference_recipes/rollouts/vllm.py` uses, and runs `vllm_worker.Weights`
itself around a transformers model. A test can make it faulty, see `FakeServer.fault`.
"""

import json
import threading
import types
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from bare_runs import bare_sampler
from preference_recipes.rollouts import generation
from preference_recipes.rollouts.context import Response
from preference_recipes.rollouts.vllm_worker import Weights

# Two servers in one process: `from_pretrained` changes modules of torch while it loads, and two at
# once can leave them changed.
LOADING = threading.Lock()


class Worker(Weights):
    """What vLLM mixes `Weights` into: a model that can be loaded again."""

    def __init__(self, folder: Path):
        self.device = types.SimpleNamespace(type="fake")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.base = self.model
        config = types.SimpleNamespace(dtype=torch.float32, hf_text_config=self.model.config)
        config.max_model_len = self.model.config.max_position_embeddings
        self.model_runner = types.SimpleNamespace(
            model_config=config, reload_weights=self.reload, get_model=lambda: self.model
        )

    def reload(self, weights_path: str) -> None:
        with LOADING:
            new = AutoModelForCausalLM.from_pretrained(weights_path, dtype=self.model.dtype)
        self.model.load_state_dict(new.state_dict())

    def load_adapter(self, folder: str) -> None:
        self.base = self.base.unload() if isinstance(self.base, PeftModel) else self.base
        self.base = PeftModel.from_pretrained(self.base, folder)
        self.model = self.base.eval()


class FakeServer:
    """A server on a free port, in threads that end with this process.

    Attributes:
        requests: path and content of each request, in the order in which they came.
        answered: the version of the weights that answered each request for responses.
        fault: called with a path and the content of a request before it is answered. What it
            returns, a status and a text, is answered in its place; None: the right answer.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.requests: list[tuple[str, dict]] = []
        self.answered: list[str | None] = []
        self.fault: Callable = lambda path, content: None
        self.worker = Worker(folder)
        self.lock = threading.Lock()
        server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def restart(self) -> None:
        """Loses all weights that it was given, as a server that was killed and started again."""
        self.worker = Worker(self.folder)

    def paths(self) -> list[str]:
        """What was asked, without the contents; of a remote call its method."""
        return [content.get("method", path) for path, content in self.requests]

    def handler(fake) -> type:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                length = int(self.headers.get("Content-Length", 0))
                content = json.loads(self.rfile.read(length) or "{}")
                with fake.lock:  # one request at a time
                    fake.requests.append((self.path, content))
                    status, text = fake.fault(self.path, content) or (200, None)
                    if text is None:
                        answer = fake.answer(self.path, content)
                        text = json.dumps(answer) if answer is not None else ""
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST

            def log_message(self, *_):
                pass

        return Handler

    def answer(self, path: str, content: dict) -> dict | None:
        if path == "/collective_rpc":
            method = getattr(self.worker, content["method"])
            return {"results": [method(**content["kwargs"])]}
        if path == "/v1/load_lora_adapter":
            self.worker.load_adapter(content["lora_path"])
            return None
        if path == "/v1/completions":
            return self.tell(content) if "prompt_logprobs" in content else self.complete(content)
        if path == "/v1/models":
            longest = self.worker.model_runner.model_config.max_model_len
            return {"data": [{"id": "M", "root": self.folder.name, "max_model_len": longest}]}
        if path == "/tokenize":
            tokenizer = AutoTokenizer.from_pretrained(self.folder)
            return {"tokens": tokenizer(content["prompt"], add_special_tokens=False).input_ids}
        return None  # pause, resume, reset_prefix_cache

    @torch.no_grad()
    def tell(self, content: dict) -> dict:
        """Log-probs of the prompt's tokens and of the most probable ones, always at temperature 1."""
        ids, told = content["prompt"], []
        all_logps = self.worker.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for logps, token in zip(all_logps, ids[1:]):
            top = logps.topk(content["prompt_logprobs"]).indices.tolist()
            ranks = {token: int((logps >= logps[token]).sum())}
            ranks |= {other: rank for rank, other in enumerate(top, 1)}
            told.append({n: {"logprob": logps[n].item(), "rank": r} for n, r in ranks.items()})
        return {"choices": [{"prompt_token_ids": ids, "prompt_logprobs": [None, *told]}]}

    def complete(self, content: dict) -> dict:
        """Draws response i from the seed + i, alone: it does not depend on the other requests."""
        self.answered.append(self.worker.version)
        choices = []
        for number in range(content["n"]):
            response = self.respond(content, content["seed"] + number)
            choices.append(
                {
                    "index": number,
                    "token_ids": response.ids,
                    "logprobs": {"token_logprobs": response.logps},
                    "prompt_token_ids": content["prompt"],
                    "finish_reason": "stop",
                }
            )
        return {"choices": choices[::-1]}

    def respond(self, content: dict, seed: int) -> Response:
        tokenizer = types.SimpleNamespace(pad_token_id=0)
        sampler = bare_sampler(tokenizer=tokenizer, model=self.worker.model)
        sampler.unwrapped.vocab_size -= len(content["logit_bias"])
        longest = self.worker.model_runner.model_config.max_model_len
        n_tokens = min(content["max_tokens"], longest - len(content["prompt"]))  # as vLLM, unsaid
        draws = np.random.default_rng(seed).random((1, n_tokens))
        # A greedy one is drawn, too, so that it has log-probs: with hardly any temperature.
        temperature = content["temperature"] or 1e-4
        sampler.stop_tokens = lambda: set(content["stop_token_ids"])
        how = (n_tokens, temperature, draws)
        with torch.no_grad():
            ((_, response),) = generation.generate_some(sampler, [content["prompt"]], [0], *how)
            return response
