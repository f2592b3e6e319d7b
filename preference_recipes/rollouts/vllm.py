"""Samples rollouts on vLLM servers that the user has started: docs/vllm.md.

vLLM is not imported. Before responses are sampled, the servers load the actor's weights from a
folder, and a probe compares their log-probs with those of training.
"""

import contextlib
import dataclasses
import http.client
import itertools
import json
import os
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from common import engine, refuse, saving
from common.distributed import on_main_process
from preference_recipes.models import prepare
from preference_recipes.models.packing import Packer
from preference_recipes.rollouts.context import Response, SamplingContext
from preference_recipes.rollouts.rollout_state import RolloutState, count_updates

FOLDER = "for_vllm"  # inside the run's folder; the servers load the weights from it
ADAPTER = "actor"  # the servers' name for the run's adapter
# The longest wait for a reply: a rollout's longest response may be the last in a server's queue.
TIMEOUT_SECONDS = 3600
# Without proxies from environment variables, which do not reach 127.0.0.1.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# Requests in flight at once. A server queues those that it cannot compute yet.
REQUESTS_AT_ONCE = 512
PROBE_PROMPTS = 4  # from the training data
PROBE_TOKENS = 32  # in the response to each
# A server is refused if the mean difference of a probe's log-probs is above this, by the coarser
# dtype of server and training. Measured on a CPU: fp32 6e-6, bf16 0.04; see docs/vllm.md.
LARGEST_DIFFERENCE = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.2}
# If training's log-probs of a probe have changed by this much, the server's must have changed, too.
VISIBLE_CHANGE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-3}


class PendingRollout(NamedTuple):
    """A rollout that is being sampled while the run trains on the previous one."""

    requests: list[dict]  # one for each prompt
    weights_of: int  # `global_step` of the weights that sample it
    wait: Callable | None  # waits for the responses and returns them; only on the main process


class Servers:
    """vLLM servers that share the prompts of a rollout.

    All processes must call its methods. Only `generate_own` talks to servers from all of them.
    """

    def __init__(self, context: SamplingContext):
        self.context = context
        model = ADAPTER if engine.has_adapter(context.unwrapped) else None
        self.servers = [Server(url, model) for url in context.args.vllm_url]
        self.version = ""  # identifies the weights that the servers loaded last
        self.synced_at: int | None = None  # `global_step` of these weights
        # Each server's last log-probs of a probe, and training's when the server first gave these.
        self.probes: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.pending: PendingRollout | None = None  # see `sample_ahead`
        workers = self.on_main_process(self.workers)
        shortest = min(worker["max_model_len"] for worker in workers)
        if (longest := context.args.max_length) > shortest:  # it might silently cut responses
            refuse(f"--max_length {longest}: a vLLM server has --max-model-len {shortest}, less")
        self.dtype = coarsest(*(worker["dtype"] for worker in workers))
        self.synchronise()

    def on_main_process(self, function: Callable, *args) -> Any:
        return on_main_process(self.context.accelerator, function, *args)

    def workers(self) -> list[dict]:
        return [worker for server in self.servers for worker in server.call("describe")]

    # ======================================================== sampling
    def generate(
        self, prompts: list[list[int]], uniforms: np.ndarray, temperature: float, images=()
    ) -> list[Response]:
        """Returns the responses to all prompts, see `Sampler.sample`. `images` is ignored."""
        context = self.context
        requests = make_requests(context, prompts, uniforms, temperature)
        if self.pending is not None:
            # Even if requests differ: servers sample with one version of the weights at a time.
            responses = self.on_main_process(self.pending.wait)
            if self.pending.requests == requests:
                staleness = context.run.global_step - self.pending.weights_of
                context.means.add_rollout({"sampling/staleness": torch.tensor([float(staleness)])})
                self.pending = None
                return responses
        self.synchronise()
        return self.on_main_process(self.ask, requests)

    def ready(self):
        """Gives the servers the current weights; inside, each process may call `generate_own`."""
        self.synchronise()
        return contextlib.nullcontext()

    def generate_own(
        self, prompts: list[list[int]], uniforms: np.ndarray, temperature: float, images=()
    ) -> Iterator[tuple[int, Response]]:
        """Yields each prompt's index with its response, see `LocalGenerator.generate_own`."""
        requests = make_requests(self.context, prompts, uniforms[:, None], temperature)
        yield from enumerate(self.ask(requests))

    def sample_ahead(self, state: RolloutState) -> None:
        """Starts sampling the next rollout on the servers, from the prompts that follow `state`.

        Does nothing if the run may end first.
        """
        context = self.context
        args = context.args
        state = dataclasses.replace(state)  # the run's own state does not advance
        updates = count_updates(args, args.rollout_batch_size)
        at_end_of_run = context.run.updates_seen + updates >= context.run.total_steps
        at_end_of_data = state.prompts_taken >= args.max_epochs * len(context.data.train)
        if at_end_of_run or (at_end_of_data and not args.max_steps):
            return
        state.end_rollout()  # a rollout's seeds contain its index
        prompts = state.take_prompts(context.data.train, args.seed, args.rollout_batch_size)
        uniforms = state.draw_uniforms(args, len(prompts["row"]))
        requests = make_requests(context, prompts["prompt_ids"], uniforms, args.temperature)
        self.synchronise()
        wait = None
        if context.accelerator.is_main_process:
            background = ThreadPoolExecutor(1)
            wait = background.submit(self.ask, requests).result
            background.shutdown(wait=False)  # ends the thread once it has the responses
        self.pending = PendingRollout(requests, context.run.global_step, wait)

    def state(self) -> dict[str, Any] | None:
        """Returns what a checkpoint holds: the rollout that was sampled ahead, or None.

        A resumed run could not sample it again, because its weights are gone.
        """
        if self.pending is None:
            return None
        requests, weights_of, wait = self.pending
        responses = list(map(tuple, self.on_main_process(wait)))
        return {"requests": requests, "weights_of": weights_of, "responses": responses}

    def load_state(self, state: dict[str, Any]) -> None:
        responses = [Response(*response) for response in state["responses"]]
        self.pending = PendingRollout(state["requests"], state["weights_of"], lambda: responses)

    def ask(self, requests: list[dict]) -> list[Response]:
        """Returns the responses to all requests, in their order; for this process alone."""
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            parts = pool.map(Server.complete, itertools.cycle(self.servers), requests)
            responses = [response for part in parts for response in part]
        if {worker["version"] for worker in self.workers()} != {self.version}:
            refuse(
                "a vLLM server got other weights while it sampled: another run uses it, too, or it "
                "was started again. Its responses are not used"
            )
        return responses

    # ======================================================== weights
    def synchronise(self) -> None:
        """Gives the servers the actor's weights if they lack them, and checks that by a probe."""
        context = self.context
        step = context.run.global_step
        if self.synced_at == step:
            return
        started = time.perf_counter()
        folder = Path(context.args.output_dir).resolve() / FOLDER
        dtype = None if self.dtype == "float32" else self.dtype
        models = {folder: context.unwrapped.model}
        saving.save(
            context.accelerator, context.args, context.model, models, context.tokenizer, dtype
        )
        self.version = self.on_main_process(self.load_weights, str(folder))
        difference = max(map(self.verify, self.servers))
        self.synced_at = step
        seconds = time.perf_counter() - started
        if not context.run.finished:  # otherwise no training line follows
            means = context.means
            means.add_rollout({"sync/seconds": torch.tensor([seconds])})
            means.add_rollout({"sync/probe_difference": torch.tensor([difference])}, reduce="max")

    def load_weights(self, folder: str) -> str:
        """Makes all servers load the weights in a folder; returns the version of these weights."""
        version = str(uuid.uuid4())

        def load_into(server: Server) -> None:
            server.send("/pause?mode=wait")
            if server.model == ADAPTER:
                adapter = {"lora_name": ADAPTER, "lora_path": folder, "load_inplace": True}
                server.send("/v1/load_lora_adapter", adapter)
            else:
                server.call("load", folder=folder)
            # Cached keys and values of prompts come from the old weights.
            server.send("/reset_prefix_cache")
            server.call("note_version", version=version)
            server.send("/resume")

        with ThreadPoolExecutor() as pool:
            list(pool.map(load_into, self.servers))
        return version

    @torch.no_grad()
    def verify(self, server: "Server") -> float:
        """Returns the mean absolute difference between a server's log-probs and training's.

        Refuses a server if that is too large, or if only training's log-probs have changed.
        """
        context = self.context
        args = context.args
        prompts = context.data.train[:PROBE_PROMPTS]["prompt_ids"]
        # Every probe has seed 0, so that unchanged weights give the same responses.
        same_seed = np.zeros((len(prompts), 1, min(PROBE_TOKENS, args.max_new_tokens)))
        requests = make_requests(context, prompts, same_seed, args.temperature)
        responses = self.on_main_process(lambda: [server.complete(r)[0] for r in requests])
        packer = Packer(context.accelerator.device)
        batch = packer.make_batch(prompts, [response.ids for response in responses])
        with prepare.evaluation_mode(context.model):
            train_logps = context.model(batch, args.temperature)["logps"].cpu()
        server_logps = pad_sequence([torch.tensor(response.logps) for response in responses], True)
        difference = (server_logps - train_logps)[batch["loss_mask"].cpu()].abs().mean().item()

        in_training = str(engine.half_precision(context.accelerator) or torch.float32)
        dtype = coarsest(in_training.removeprefix("torch."), self.dtype)
        last_server, last_train = self.probes.get(server.url, (None, None))
        if last_server is None or not torch.equal(server_logps, last_server):
            self.probes[server.url] = (server_logps, train_logps)
        # Otherwise the old probe is kept, so that training's small changes add up against it.
        elif (change := (train_logps - last_train).abs().max().item()) > VISIBLE_CHANGE[dtype]:
            refuse(
                f"{server.url} does not have the weights that it was given: its log-probs are the "
                f"old ones to the last bit, while those of training changed by {change:.3g}"
            )
        bound = args.max_sampler_difference
        if bound is None:
            bound = LARGEST_DIFFERENCE[dtype]
        if not difference <= bound:  # NaN must fail, too
            refuse(
                f"{server.url}: its log-probs differ from those of training by {difference:.3g} on "
                f"average, more than {bound:g} ({dtype}; --max_sampler_difference): wrong weights, "
                "log-probs without the temperature, or another precision; see docs/vllm.md"
            )
        return difference


def coarsest(*dtypes: str) -> str:
    return max(dtypes, key=LARGEST_DIFFERENCE.__getitem__)


# ============================================================ one server
class Server:
    """A vLLM server at an address. Methods raise `Refused` if they fail."""

    def __init__(self, url: str, model: str | None = None):
        self.url = url.rstrip("/")
        self.model = model  # the name of an adapter; None: the model of its start

    def call(self, method: str, **arguments: str) -> list:
        """Calls a method of `vllm_worker.Weights` in each worker process; returns the results."""
        content = {"method": method, "kwargs": arguments}
        return self.send("/collective_rpc", content).get("results", [])

    def complete(self, request: dict[str, Any]) -> list[Response]:
        """Returns the responses to a `/v1/completions` request; refuses any that do not fit it."""
        reply = self.send("/v1/completions", {"model": self.model, **request})
        responses = []
        for choice in sorted(reply["choices"], key=lambda choice: choice["index"]):
            ids = choice["token_ids"]
            logps = choice["logprobs"]["token_logprobs"]
            is_whole = len(ids) == request["max_tokens"] or ids[-1] in request["stop_token_ids"]
            has_prompt = choice["prompt_token_ids"] == request["prompt"]
            if not is_whole or not has_prompt or len(logps) != len(ids):
                refuse(f"{self.url}: a response to another prompt, or one that was cut: {choice}")
            responses.append(Response(ids, logps if request["temperature"] else []))
        if len(responses) != request["n"]:
            refuse(f"{self.url} gave {len(responses)} responses, asked for {request['n']}")
        return responses

    def send(self, path: str, content: dict | None = None, method: str = "POST") -> dict[str, Any]:
        """Sends a request; returns the JSON object of the reply, or an empty dict without one."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self.url + path, body, headers, method=method)
        try:
            with OPENER.open(request, timeout=TIMEOUT_SECONDS) as reply:
                text = reply.read()
        except urllib.error.HTTPError as error:
            problem = f"answered {error.code} {error.read().decode(errors='replace')[:300]!r}"
        except (OSError, http.client.HTTPException) as error:
            problem = f"gave no answer: {error}"
        else:
            return json.loads(text) if text.strip().startswith(b"{") else {}
        refuse(f"the vLLM server {self.url}{path} {problem}; docs/vllm.md says how to start it")


def make_requests(
    context: SamplingContext, prompts: list[list[int]], uniforms: np.ndarray, temperature: float
) -> list[dict]:
    """Returns a request for each prompt, with `uniforms` `[prompts, responses to each, tokens]`.

    It sets everything that a server could add by itself, such as top-p, penalties and its own EOS.
    """
    n, n_tokens = uniforms.shape[1:]
    banned_tokens = context.tokens_without_probability()
    stops = sorted(context.stop_tokens())
    return [
        {
            "prompt": prompt,
            "n": n,
            # The server draws response i from seed + i: multiplied by n, no prompts share a seed.
            "seed": int(uniforms[index, 0, 0] * 2**40) * n,
            # In a batch of episodes, other prompts may leave fewer tokens.
            "max_tokens": min(n_tokens, context.args.max_length - len(prompt)),
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": True,
            "stop_token_ids": stops,
            "logit_bias": {str(token): -100.0 for token in banned_tokens},
            "skip_special_tokens": False,
            "return_token_ids": True,
            "logprobs": 0,  # only of the drawn token
        }
        for index, prompt in enumerate(prompts)
    ]
