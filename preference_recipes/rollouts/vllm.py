"""Rollouts from vLLM servers that the user has started: docs/vllm.md.

Nothing of vLLM is imported. Before responses are sampled, the servers get the actor's weights
through a folder, and a probe compares their log-probs with those of training.
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
from preference_recipes.models import checks
from preference_recipes.models.packing import Packer
from preference_recipes.rollouts.context import Response, SamplingContext
from preference_recipes.rollouts.rollout_state import RolloutState, count_updates

FOLDER = "for_vllm"  # in the run's folder; where the servers find the weights
ADAPTER = "actor"  # what servers call the adapter of a run
# How long an answer may take: that of a rollout's longest response, behind all others in a queue.
TIMEOUT_SECONDS = 3600
# Without the proxies of the surroundings, which do not reach 127.0.0.1.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# Requests that wait for a server at once. It queues those that it cannot compute yet.
REQUESTS_AT_ONCE = 512
PROBE_PROMPTS = 4  # of the training data
PROBE_TOKENS = 32  # in response to each
# The mean difference of a probe's log-probs above which the servers are not what they should be,
# by the coarser dtype of both. Measured on a CPU: fp32 6e-6, bf16 0.04; see docs/vllm.md.
LARGEST_DIFFERENCE = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.2}
# If training's log-probs of a probe have changed by this much, those of the server must have, too.
VISIBLE_CHANGE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-3}


class Ahead(NamedTuple):
    """A rollout that is sampled while the one before it is trained on."""

    requests: list[dict]  # one for each prompt
    weights_of: int  # `global_step` of the weights that sample it
    answer: Callable | None  # waits for its responses and returns them; on the main process alone


class Servers:
    """vLLM servers that share the prompts of a rollout.

    All processes must call its methods. The main process alone talks to the servers, except in
    `generate_own`.
    """

    def __init__(self, context: SamplingContext):
        self.context = context
        self.servers = [Server(url) for url in context.args.vllm_url]
        self.version = ""  # names the weights that the servers were last given
        self.synced_at: int | None = None  # `global_step` of these weights
        # Each server's last log-probs of a probe, and those of training when it first gave these.
        self.probes: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.ahead: Ahead | None = None  # see `sample_ahead`
        workers = self.on_main_process(self.workers)
        shortest = min(worker["max_model_len"] for worker in workers)
        if (longest := context.args.max_length) > shortest:  # it might cut responses, unsaid
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
        """Returns the responses to each prompt in turn, see `Sampler.sample`. None has images."""
        context = self.context
        requests = make_requests(context, prompts, uniforms, temperature)
        if self.ahead is not None:
            # Also for other requests: servers sample with one version of the weights at a time.
            responses = self.on_main_process(self.ahead.answer)
            if self.ahead.requests == requests:
                staleness = context.run.global_step - self.ahead.weights_of
                context.means.add_rollout({"sampling/staleness": torch.tensor([float(staleness)])})
                self.ahead = None
                return responses
        self.synchronise()
        return self.on_main_process(self.ask, requests)

    @contextlib.contextmanager
    def ready(self):
        """Gives the servers the current weights: inside the block a process may ask for its own."""
        self.synchronise()
        yield

    def generate_own(
        self, prompts: list[list[int]], uniforms: np.ndarray, temperature: float, images=()
    ) -> Iterator[tuple[int, Response]]:
        """Yields the number of each prompt with its response; for this process alone.

        `uniforms` are `[prompts, tokens]`.
        """
        requests = make_requests(self.context, prompts, uniforms[:, None], temperature)
        yield from enumerate(self.ask(requests))

    def sample_ahead(self, state: RolloutState) -> None:
        """Lets the servers begin with the next rollout, whose prompts come after `state`.

        Does nothing without `--rollouts_ahead`, nor if the run may end before.
        """
        context = self.context
        args = context.args
        if not args.rollouts_ahead:
            return
        state = dataclasses.replace(state)  # the run's own stays where it is
        updates = count_updates(args, args.rollout_batch_size)
        at_end_of_run = context.run.updates_seen + updates >= context.run.total_steps
        at_end_of_data = state.prompts_seen >= args.max_epochs * len(context.data.train)
        if at_end_of_run or (at_end_of_data and not args.max_steps):
            return
        state.end_rollout()  # the number of the rollout is part of its seeds
        prompts = state.take_prompts(context.data.train, args.seed, args.rollout_batch_size)
        uniforms = state.draw_uniforms(args, len(prompts["row"]))
        requests = make_requests(context, prompts["prompt_ids"], uniforms, args.temperature)
        self.synchronise()
        answer = None
        if context.accelerator.is_main_process:
            background = ThreadPoolExecutor(1)
            answer = background.submit(self.ask, requests).result
            background.shutdown(wait=False)  # ends the thread once it has the answer
        self.ahead = Ahead(requests, context.run.global_step, answer)

    def state(self) -> dict[str, Any] | None:
        """Returns what a checkpoint holds: the rollout that was sampled ahead, or None.

        A resumed run could not sample it again: the weights that it began with are gone.
        """
        if self.ahead is None:
            return None
        responses = self.on_main_process(self.ahead.answer)
        return {**self.ahead._asdict(), "answer": list(map(tuple, responses))}

    def load_state(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        responses = [Response(*response) for response in state["answer"]]
        self.ahead = Ahead(**{**state, "answer": lambda: responses})

    def ask(self, requests: list[dict]) -> list[Response]:
        """Returns the responses to all requests, in their order; for this process alone."""
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            answers = pool.map(Server.complete, itertools.cycle(self.servers), requests)
            responses = [response for answer in answers for response in answer]
        if {worker["version"] for worker in self.workers()} != {self.version}:
            refuse(
                "a vLLM server got other weights while it sampled: another run uses it, too, or it "
                "was started again. Its responses are not used"
            )
        return responses

    # ======================================================== weights
    def synchronise(self) -> None:
        """Gives the servers the actor's weights, if theirs are others, and proves it by a probe."""
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
        is_adapter = engine.has_adapter(context.unwrapped)
        self.version = self.on_main_process(self.load_weights, str(folder), is_adapter)
        if is_adapter:
            for server in self.servers:
                server.model = ADAPTER
        difference = max(map(self.prove, self.servers))
        self.synced_at = step
        seconds = time.perf_counter() - started
        if not context.run.finished:  # else no training line follows
            means = context.means
            means.add_rollout({"sync/seconds": torch.tensor([seconds])})
            means.add_rollout({"sync/probe_difference": torch.tensor([difference])}, reduce="max")

    def load_weights(self, folder: str, is_adapter: bool) -> str:
        """Lets all servers load the weights in a folder, and returns their new version."""
        version = str(uuid.uuid4())

        def load_into(server: Server) -> None:
            server.send("/pause?mode=wait")
            if is_adapter:
                adapter = {"lora_name": ADAPTER, "lora_path": folder, "load_inplace": True}
                server.send("/v1/load_lora_adapter", adapter)
            else:
                server.call("load", folder=folder)
            # The keys and values of prompts that it still holds come from the old weights.
            server.send("/reset_prefix_cache")
            server.call("note_version", version=version)
            server.send("/resume")

        with ThreadPoolExecutor() as pool:
            list(pool.map(load_into, self.servers))
        return version

    @torch.no_grad()
    def prove(self, server: "Server") -> float:
        """Returns the mean absolute difference of some log-probs, server to training.

        Refuses one that is too large, and a server whose log-probs have not changed at all while
        those of training have.
        """
        context = self.context
        args = context.args
        prompts = context.data.train[:PROBE_PROMPTS]["prompt_ids"]
        # Every probe draws from seed 0, so that unchanged weights give the same answer.
        same_seed = np.zeros((len(prompts), 1, min(PROBE_TOKENS, args.max_new_tokens)))
        requests = make_requests(context, prompts, same_seed, args.temperature)
        responses = self.on_main_process(lambda: [server.complete(r)[0] for r in requests])
        packer = Packer(context.accelerator.device)
        batch = packer.make_batch(prompts, [response.ids for response in responses])
        with checks.evaluation_mode(context.model):
            ours = context.model(batch, args.temperature)["logps"].cpu()
        theirs = pad_sequence([torch.tensor(response.logps) for response in responses], True)
        difference = (theirs - ours)[batch["mask"].cpu()].abs().mean().item()

        in_training = str(engine.half_precision(context.accelerator) or torch.float32)
        dtype = coarsest(in_training.removeprefix("torch."), self.dtype)
        last_theirs, last_ours = self.probes.get(server.url, (None, None))
        if last_theirs is None or not torch.equal(theirs, last_theirs):
            self.probes[server.url] = (theirs, ours)
        # Else the old probe is kept: training's small changes add up against it.
        elif (change := (ours - last_ours).abs().max().item()) > VISIBLE_CHANGE[dtype]:
            refuse(
                f"{server.url} does not have the weights that it was given: its log-probs are the "
                f"old ones to the last bit, while those of training changed by {change:.3g}"
            )
        bound = args.max_sampler_difference
        if bound is None:
            bound = LARGEST_DIFFERENCE[dtype]
        if not difference <= bound:  # also where it is not a number
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
    """A vLLM server at an address. Every method raises `Refused` if it fails."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.model: str | None = None  # the name of an adapter; None: that of the start

    def call(self, method: str, **arguments: str) -> list:
        """Returns what a method of `vllm_worker.Weights` returns in each worker process."""
        content = {"method": method, "kwargs": arguments}
        return self.send("/collective_rpc", content).get("results", [])

    def complete(self, request: dict[str, Any]) -> list[Response]:
        """Returns the responses to a request to `/v1/completions`; refuses what was not asked."""
        answer = self.send("/v1/completions", {"model": self.model, **request})
        responses = []
        for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
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
        """Sends a request, and returns the JSON of the answer; an empty dict if it has none."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self.url + path, body, headers, method=method)
        try:
            with OPENER.open(request, timeout=TIMEOUT_SECONDS) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            said = f"answered {error.code} {error.read().decode(errors='replace')[:300]!r}"
        except (OSError, http.client.HTTPException) as error:
            said = f"gave no answer: {error}"
        else:
            return json.loads(text) if text.strip().startswith(b"{") else {}
        refuse(f"the vLLM server {self.url}{path} {said}; docs/vllm.md says how to start it")


def make_requests(
    context: SamplingContext, prompts: list[list[int]], uniforms: np.ndarray, temperature: float
) -> list[dict]:
    """Returns a request for each prompt, with `uniforms` `[prompts, responses to each, tokens]`.

    It names all that a server could add by itself, such as top-p, penalties and its own end token.
    """
    n, n_tokens = uniforms.shape[1:]
    never_drawn = context.tokens_without_probability()
    stops = sorted(context.stop_tokens())
    return [
        {
            "prompt": prompt,
            "n": n,
            # The server draws response i from seed + i: times n, so that no two prompts share one.
            "seed": int(uniforms[number, 0, 0] * 2**40) * n,
            # In a batch of episodes the others may have less room.
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
            "logit_bias": {str(token): -100.0 for token in never_drawn},
            "skip_special_tokens": False,
            "return_token_ids": True,
            "logprobs": 0,  # of the drawn token, and of no other
        }
        for number, prompt in enumerate(prompts)
    ]
