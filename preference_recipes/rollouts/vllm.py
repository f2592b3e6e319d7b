"""Rollouts from vLLM servers that the user has started: docs/vllm.md.

Nothing of vLLM is imported. Before responses are sampled, the servers get the actor's weights
through a folder, and a probe compares their log-probs with those of training.
"""

import dataclasses
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import actor, adapters, distributed
from common.shared_args import refuse_changed
from preference_recipes.data import chat
from preference_recipes.models import checks
from preference_recipes.models.packing import Packer
from preference_recipes.rollouts.sampler import Sampler
from preference_recipes.rollouts.samples import Response
from preference_recipes.rollouts.schedule import Position, RolloutSchedule
from preference_recipes.rollouts.vllm_server import Server

# The folder in which the servers find the weights, in the run's own.
FOLDER = "for_vllm"
# What servers call the adapter of a run.
ADAPTER = "actor"
# Requests that wait for a server at once. It queues those that it cannot compute yet.
REQUESTS_AT_ONCE = 512
# A probe: this many prompts of the training data, and tokens in response to each.
PROBE_PROMPTS = 4
PROBE_TOKENS = 32
# The mean difference of a probe's log-probs above which the servers are not what they should be,
# by the coarser dtype of both. Measured on a CPU: fp32 6e-6, bf16 0.04; see docs/vllm.md.
LARGEST_DIFFERENCE = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.2}
# If training's log-probs of a probe have changed by this much, those of the server must have, too.
VISIBLE_CHANGE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-3}
# Arguments that mean something with `--vllm_url` alone.
NEED_SERVERS = (
    "sampler_correction",
    "sampler_correction_max",
    "max_sampler_difference",
    "rollouts_ahead",
)
# What must be equal in the configs of the server's model and of the actor.
SAME_IN_CONFIGS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)


def check_settings(args) -> None:
    """Refuses settings of a sampler that would be ignored.

    Args:
        args: `RolloutArgs`.
    """
    if not args.vllm_url:
        refuse_changed(args, NEED_SERVERS, "only vLLM servers need it; give --vllm_url")


def connect(sampler: Sampler) -> None:
    """Lets a run sample from the servers of `--vllm_url`. Does nothing without it.

    All processes must call it.

    Raises:
        SystemExit: a server does not answer, was not started as docs/vllm.md says, has another
            model, or does not see the run's folder; see also `Servers.synchronise`.
    """
    if not sampler.args.vllm_url:
        return
    sampler.servers = Servers(sampler.args.vllm_url)
    sampler.servers.dtype = distributed.on_main_process(
        sampler.accelerator, sampler.servers.check, sampler
    )
    sampler.servers.synchronise(sampler)


def sample_ahead(sampler: Sampler, position: Position) -> None:
    """Lets the servers begin with the responses of the next rollout, with the weights of now.

    They answer while the rollout that was just sampled is trained on. All processes must call it,
    after `generation.sample` and before an update. Does nothing without `--rollouts_ahead`, nor if
    the run may end before.

    Args:
        position: of the run, once the prompts of the current rollout are taken.
    """
    args = sampler.args
    if not args.rollouts_ahead:
        return
    position = dataclasses.replace(position)  # the run's own stays where it is
    updates = RolloutSchedule(args, sampler.data.mixture.samples).updates_per_rollout
    at_end_of_run = sampler.progress.updates_seen + updates >= sampler.progress.total_steps
    at_end_of_data = position.prompts_seen >= args.max_epochs * sampler.data.mixture.samples
    if at_end_of_run or (at_end_of_data and not args.max_steps):
        return
    position.end_rollout()  # the number of the rollout is part of its seeds
    prompts = position.take_prompts(sampler, args.rollout_batch_size)
    uniforms = position.draw_uniforms(args, len(prompts["row"]))
    sampler.servers.begin_ahead(sampler, prompts["prompt_ids"], uniforms)


@dataclasses.dataclass
class Ahead:
    """A rollout that is sampled while the one before it is trained on.

    Attributes:
        requests: one for each prompt.
        weights_of: `global_step` of the weights that sample it.
        answer: its responses, when they are there; on the main process alone.
    """

    requests: list[dict]
    weights_of: int
    answer: Future | None


@dataclasses.dataclass
class Probe:
    """A server's responses to the prompts of a probe.

    Attributes:
        responses: one to each prompt.
        ours: training's log-probs of these responses, computed when the server first gave this
            answer, `[prompts, longest response]`.
    """

    responses: list[Response]
    ours: torch.Tensor


class Servers:
    """vLLM servers that share the prompts of a rollout.

    The main process alone talks to them, except in episodes: each process asks for its own.

    Attributes:
        version: names the weights that the servers were last given; an empty string: none.
        synced_at: `global_step` of these weights; None before the first.
        probes: what each server last answered to a probe.
        dtype: that in which the servers compute.
        ahead: the rollout that they were asked for before it was due, see `sample_ahead`.
    """

    def __init__(self, urls: list[str]):
        self.servers = [Server(url) for url in urls]
        self.version = ""
        self.synced_at: int | None = None
        self.probes: dict[str, Probe] = {}
        self.dtype = "float32"
        self.ahead: Ahead | None = None

    # ======================================================== sampling

    def generate(
        self, sampler: Sampler, prompts: list[list[int]], uniforms: np.ndarray, temperature: float
    ) -> list[Response]:
        """Returns the responses to some prompts, on every process. All processes must call it.

        Args:
            prompts: token ids of each prompt.
            uniforms: `[prompts, responses to each, max_new_tokens]` in [0, 1). The first number of
                a prompt decides the seed that the server draws its responses from.
            temperature: 0 is greedy.

        Returns:
            Those to the first prompt, those to the second one, and so on.
        """
        requests = make_requests(sampler, prompts, uniforms, temperature)
        if self.ahead is not None and self.ahead.requests == requests:
            responses = self.wait_for_ahead(sampler)
            staleness = sampler.progress.global_step - self.ahead.weights_of
            sampler.means.add_rollout({"sampling/staleness": torch.tensor([float(staleness)])})
            self.ahead = None
            return responses
        # Their responses stay in `ahead`. Servers sample with one version of the weights at a time.
        self.wait_for_ahead(sampler)
        self.synchronise(sampler)
        return self.on_main_process(sampler, self.ask, requests)

    def begin_ahead(self, sampler: Sampler, prompts: list[list[int]], uniforms: np.ndarray) -> None:
        """Asks for responses that `generate` is going to be asked for, and does not wait for them.

        All processes must call it, with the arguments that `generate` will have.
        """
        self.synchronise(sampler)
        requests = make_requests(sampler, prompts, uniforms, sampler.args.temperature)
        answer = None
        if sampler.accelerator.is_main_process:
            background = ThreadPoolExecutor(1)
            answer = background.submit(self.ask, requests)
            background.shutdown(wait=False)  # ends the thread once it has the answer
        self.ahead = Ahead(requests, sampler.progress.global_step, answer)

    def wait_for_ahead(self, sampler: Sampler) -> list[Response]:
        """Waits for the responses that were asked for ahead, and returns them; [] if none were.

        They stay in `ahead` until `generate` is asked for them. All processes must call it.
        """
        ahead = self.ahead
        if ahead is None:
            return []
        # Only the main process calls the lambda, and has an `answer`.
        return self.on_main_process(sampler, lambda: ahead.answer.result())

    def state(self, sampler: Sampler) -> dict[str, Any] | None:
        """Returns what a checkpoint holds: the rollout that was sampled ahead. None without one.

        A resumed run could not sample it again: the weights that it began with are gone. All
        processes must call it.
        """
        if self.ahead is None:
            return None
        return {
            "requests": self.ahead.requests,
            "weights_of": self.ahead.weights_of,
            "responses": [tuple(response) for response in self.wait_for_ahead(sampler)],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes over what `state` returned."""
        answer: Future = Future()
        answer.set_result([Response(*response) for response in state["responses"]])
        self.ahead = Ahead(state["requests"], state["weights_of"], answer)

    def ask(self, requests: list[dict]) -> list[Response]:
        """Returns the servers' responses to all requests, in their order."""
        responses = dict(self.responses_as_they_come(requests))
        return [response for number in range(len(requests)) for response in responses[number]]

    def generate_locally(
        self, sampler: Sampler, prompts: list[list[int]], uniforms: np.ndarray, temperature: float
    ) -> Iterator[tuple[int, Response]]:
        """Asks for a response to each prompt; see `generation.LocalGenerator`."""
        requests = make_requests(sampler, prompts, uniforms[:, None], temperature)
        for number, (response,) in self.responses_as_they_come(requests):
            yield number, response

    def responses_as_they_come(self, requests: list[dict]) -> Iterator[tuple[int, list[Response]]]:
        """Yields the number of each request and its responses, once a server has answered it.

        Raises:
            SystemExit: a server got other weights meanwhile; or see `Server.complete`.
        """

        def complete(number: int) -> tuple[int, list[Response]]:
            server = self.servers[number % len(self.servers)]
            return number, server.complete(requests[number])

        yield from in_parallel(complete, range(len(requests)))
        if not self.all_have_version():
            sys.exit(
                "a vLLM server got other weights while it sampled: another run uses it, too, or it "
                f"was started again. Its responses are not used. Servers: {self.urls()}"
            )

    # ======================================================== weights

    def synchronise(self, sampler: Sampler) -> None:
        """Gives the servers the actor's weights, if theirs are others, and proves it by a probe.

        All processes must call it.

        Raises:
            SystemExit: the weights could not be written or loaded; see also `prove`.
        """
        started = time.perf_counter()
        is_current = self.synced_at == sampler.progress.global_step
        if is_current and self.on_main_process(sampler, self.all_have_version):
            return
        folder = sampler.output_dir / FOLDER / "weights"
        self.write_weights(sampler, folder)
        self.version, models = self.on_main_process(
            sampler, self.load_weights, folder, adapters.has_adapter(sampler.unwrapped)
        )
        for server, model in zip(self.servers, models):
            server.model = model
        difference = self.prove(sampler)
        self.synced_at = sampler.progress.global_step
        seconds = time.perf_counter() - started
        if sampler.progress.finished:
            return  # no training line follows
        sampler.means.add_rollout({"sync/seconds": torch.tensor([seconds])})
        sampler.means.add_rollout(
            {"sync/probe_difference": torch.tensor([difference])}, reduce="max"
        )

    def write_weights(self, sampler: Sampler, folder: Path) -> None:
        """Writes the actor, or its adapter, for the servers."""
        try:
            actor.save(
                sampler.accelerator,
                sampler.model,
                sampler.unwrapped,
                sampler.tokenizer,
                folder,
                dtype=None if self.dtype == "float32" else self.dtype,
            )
        except OSError as error:
            shutil.rmtree(folder.parent, ignore_errors=True)
            sys.exit(f"{folder} could not be written for the vLLM servers: {str(error)[:200]}")

    def load_weights(self, folder: Path, is_adapter: bool) -> tuple[str, list[str]]:
        """Lets all servers load the weights in a folder, and forget what they computed with others.

        For the main process.

        Returns:
            The new version, and what each server calls its model.
        """
        self.version = str(uuid.uuid4())
        path = str(folder.resolve())

        def load_into(server: Server) -> None:
            server.send("POST", "/pause?mode=wait")
            if is_adapter:
                server.load_adapter(ADAPTER, path)
                server.model = ADAPTER
            else:
                server.call("load", folder=path)
            # The keys and values of prompts that it still holds come from the old weights.
            server.send("POST", "/reset_prefix_cache")
            server.call("note_version", version=self.version)
            server.send("POST", "/resume")

        list(in_parallel(load_into, self.servers))
        return self.version, [server.model for server in self.servers]

    def all_have_version(self) -> bool:
        """Whether all workers of all servers have the weights that they were last given."""
        versions = [
            worker["version"] for server in self.servers for worker in server.call("describe")
        ]
        return set(versions) == {self.version}

    def prove(self, sampler: Sampler) -> float:
        """Compares the servers' log-probs of some responses with those of training.

        Returns:
            The mean absolute difference, the largest of all servers.

        Raises:
            SystemExit: it is too large; or training's log-probs have changed while those of a
                server are the same to the last bit.
        """
        prompts = sampler.data.train[:PROBE_PROMPTS]["prompt_ids"]
        n_tokens = min(PROBE_TOKENS, sampler.args.max_new_tokens)
        # Every probe draws from seed 0, so that unchanged weights give the same answer.
        same_seed = np.zeros((len(prompts), 1, n_tokens))
        requests = make_requests(sampler, prompts, same_seed, sampler.args.temperature)
        largest = 0.0
        for server in self.servers:
            responses = self.on_main_process(sampler, answers_of, server, requests)
            ours = logps_in_training(sampler, prompts, responses)
            self.refuse_lost_weights(sampler, server, Probe(responses, ours))  # and keeps the probe
            difference = mean_difference(responses, ours)
            self.refuse_difference(sampler, server, difference)
            largest = max(largest, difference)
        return largest

    def refuse_lost_weights(self, sampler: Sampler, server: Server, probe: Probe) -> None:
        """Ends the run if a server's log-probs did not change though training's did."""
        last = self.probes.get(server.url)
        # Responses contain log-probs, so new weights make them differ, if only in the last bit.
        if last is None or last.responses != probe.responses:
            self.probes[server.url] = probe
            return
        # The old probe is kept: small changes of training's log-probs add up against it.
        change = (probe.ours - last.ours).abs().max().item()
        if change > VISIBLE_CHANGE[self.coarser_dtype(sampler)]:
            sys.exit(
                f"{server.url} does not have the weights that it was given: its log-probs are the "
                f"old ones to the last bit, while those of training changed by {change:.3g}"
            )

    def refuse_difference(self, sampler: Sampler, server: Server, difference: float) -> None:
        """Ends the run if a server's log-probs are too far from training's."""
        bound = sampler.args.max_sampler_difference
        dtype = self.coarser_dtype(sampler)
        if bound is None:
            bound = LARGEST_DIFFERENCE[dtype]
        if not difference <= bound:  # also where it is not a number
            sys.exit(
                f"{server.url}: its log-probs differ from those of training by {difference:.3g} on "
                f"average, more than {bound:g} ({dtype}; --max_sampler_difference). Such a "
                "server has stale or damaged weights, or returns log-probs without the "
                "temperature (--logprobs-mode processed_logprobs), or computes in another "
                "precision; see docs/vllm.md"
            )

    def coarser_dtype(self, sampler: Sampler) -> str:
        """Returns the less precise of the dtypes in which the servers and training compute."""
        ours = {"bf16": "bfloat16", "fp16": "float16"}.get(sampler.accelerator.mixed_precision)
        return max(ours or "float32", self.dtype, key=LARGEST_DIFFERENCE.__getitem__)

    # ======================================================== the beginning

    def check(self, sampler: Sampler) -> str:
        """Refuses servers that cannot serve this run. For the main process.

        Returns:
            The dtype in which they compute.
        """
        dtypes = set()
        for server in self.servers:
            model = server.describe_model()
            server.model = model["id"]
            longest = model.get("max_model_len")
            if longest is not None and longest < sampler.args.max_length:
                sys.exit(
                    f"{server.url}: --max-model-len {longest} is below --max_length "
                    f"{sampler.args.max_length}"
                )
            for worker in server.call("describe"):
                refuse_another_model(server, worker["config"], sampler)
                dtypes.add(worker["dtype"])
        if len(dtypes) > 1:
            sys.exit(f"--vllm_url: servers of {' and '.join(sorted(dtypes))}: give all one --dtype")
        self.check_folder(sampler.output_dir / FOLDER)
        return dtypes.pop()

    def check_folder(self, folder: Path) -> None:
        """Refuses servers that do not see the folder through which they get weights."""
        folder.mkdir(exist_ok=True)
        file = folder.resolve() / "seen.txt"
        word = str(uuid.uuid4())
        file.write_text(word, encoding="utf-8")
        for server in self.servers:
            if any(text != [word] for text in server.call("read_text", path=str(file))):
                sys.exit(
                    f"{server.url} does not see {file}: give an --output_dir on a disk that it "
                    "and this machine share, under the same path"
                )
        file.unlink()

    def urls(self) -> str:
        return ", ".join(server.url for server in self.servers)

    def on_main_process(self, sampler: Sampler, function: Callable, *args) -> Any:
        """Returns what the function returns on the main process, on every process."""
        return distributed.on_main_process(sampler.accelerator, function, *args)


def answers_of(server: Server, requests: list[dict]) -> list[Response]:
    """Returns a server's one response to each request."""
    return [response for request in requests for response in server.complete(request)]


def refuse_another_model(server: Server, config: dict[str, Any], sampler: Sampler) -> None:
    """Refuses a server whose model has another architecture: new weights would crash it."""
    ours = sampler.unwrapped.config.get_text_config().to_dict()
    for name in SAME_IN_CONFIGS:
        if name in config and name in ours and config[name] != ours[name]:
            sys.exit(
                f"{server.url} serves a model with {name} {config[name]}, "
                f"{sampler.args.model_name_or_path} has {ours[name]}: start it with that model"
            )


def make_requests(
    sampler: Sampler, prompts: list[list[int]], uniforms: np.ndarray, temperature: float
) -> list[dict]:
    """Returns a request for each prompt, see `Servers.generate`.

    All that a server could add by itself is named: top-p, top-k, penalties, its own end token.
    """
    n, n_tokens = uniforms.shape[1:]
    head_size = sampler.unwrapped.model.get_output_embeddings().out_features
    without_probability = range(sampler.unwrapped.vocabulary, head_size)
    stops = sorted(chat.stop_tokens(sampler.tokenizer, sampler.unwrapped.model))
    return [
        {
            "prompt": prompt,
            "n": n,
            # The server draws response i from seed + i: times n, so that no two prompts share one.
            "seed": int(uniforms[number, 0, 0] * 2**40) * n,
            "max_tokens": n_tokens,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": True,
            "stop_token_ids": stops,
            "logit_bias": {str(token): -100.0 for token in without_probability},
            "skip_special_tokens": False,
            "return_token_ids": True,
            "logprobs": 0,  # of the drawn token, and of no other
        }
        for number, prompt in enumerate(prompts)
    ]


def in_parallel(function: Callable, jobs: Sequence) -> Iterator:
    """Yields the results of a function that waits for servers, in the order in which they come.

    If one fails, those that have not begun are not begun.
    """
    pool = ThreadPoolExecutor(min(len(jobs), REQUESTS_AT_ONCE))
    try:
        for future in as_completed([pool.submit(function, job) for job in jobs]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


@torch.no_grad()
def logps_in_training(
    sampler: Sampler, prompts: list[list[int]], responses: list[Response]
) -> torch.Tensor:
    """Returns training's log-probs of responses, fp32 `[prompts, longest response]` on the CPU.

    All processes must call it.
    """
    batch = Packer(sampler.device).make_batch(prompts, [response.ids for response in responses])
    with checks.evaluation_mode(sampler.model):
        return sampler.model(batch, sampler.args.temperature)["logps"].cpu()


def mean_difference(responses: list[Response], ours: torch.Tensor) -> float:
    """Returns the mean absolute difference of log-probs over all tokens of the responses."""
    differences = [
        (torch.tensor(response.logps) - logps[: len(response.ids)]).abs()
        for response, logps in zip(responses, ours)
    ]
    return torch.cat(differences).mean().item()
