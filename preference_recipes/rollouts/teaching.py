"""Rollouts that teachers read: models here, or vLLM servers that tell their top tokens."""

import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from common import Refused, checkpointable, distributed, refuse
from preference_recipes.models import teachers
from preference_recipes.models.packing import Packer
from preference_recipes.models.teachers import TeacherQuery, Teachers, TopLogps
from preference_recipes.rollouts.rollout_state import Rollout
from preference_recipes.rollouts.samples import Samples, repeat_each
from preference_recipes.rollouts.vllm import Server

REQUESTS_AT_ONCE = 32  # of each process: an answer is a text of some kilobytes a token


@checkpointable
@dataclass
class TaughtRollout(Rollout):
    """A rollout, and what its teachers need to know.

    `experience` also has `teacher`, the number of each sample's teacher.
    """

    teachers: list[str]  # the name of each sample's teacher
    teacher_prompts: list[list[int]]  # what its teacher reads before the response
    top_logps: list | None = None  # what servers say, see `AllTeachers.ask`; None: not asked yet

    def lengths_as_read(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the samples' lengths `[N]`, with the longer prompt: student's or teacher's.

        It adds the same to all samples of a prompt, so they stay side by side where they are.
        """
        prompts = zip(self.samples.prompts, self.teacher_prompts)
        return lengths + [max(len(taught) - len(own), 0) for own, taught in prompts]

    def queries(self, rows: Iterable[int]) -> list[TeacherQuery]:
        """Returns what the teachers of some samples are asked."""
        samples = self.samples
        return [
            TeacherQuery(
                self.teachers[row],
                self.teacher_prompts[row],
                samples.responses[row],
                samples.is_sampled[row],
            )
            for row in rows
        ]


class AllTeachers(Teachers):
    """Those here and, with `--teacher_url`, those behind servers. All processes must ask them."""

    def __init__(self, accelerator: Accelerator, args, tokenizer, model: nn.Module):
        """Exits if a server is not what it should be. `model` is the student."""
        super().__init__(accelerator, args, tokenizer, model)
        self.accelerator = accelerator
        self.args = args
        self.top_k = min(args.teacher_top_k, self.student.vocabulary)
        self.servers: dict[str, list[Server]] = {}  # of each served teacher
        for name, urls in teachers.sources(args).items():
            for url in urls if isinstance(urls, list) else ():
                server = Server(url)
                proof = (self.prove, server, tokenizer, args.max_length)
                server.model, weights = distributed.on_main_process(accelerator, *proof)
                self.servers.setdefault(name, []).append(server)
                title = f"served teacher {name}".strip()
                if self.fingerprints.setdefault(title, weights) != weights:
                    refuse(f"{url} has {weights}, but the {title} is {self.fingerprints[title]}")
                accelerator.print(f"{title}: {weights} at {url}, its top {self.top_k} tokens")

    def prove(self, server: Server, tokenizer, max_length: int) -> tuple[str, str]:
        """Returns the names of a server's model and of its weights.

        Refuses one with another tokenizer, or that does not tell what will be asked.
        """
        model, *_ = server.send("/v1/models", method="GET")["data"]
        if (longest := model["max_model_len"]) <= max_length:  # it adds a token of its own
            refuse(f"--max_length {max_length}: {server.url} has --max-model-len {longest}")
        text = tokenizer.decode(sorted(tokenizer.get_vocab().values()))
        ids = tokenizer.encode(text, add_special_tokens=False)
        request = {"prompt": text, "add_special_tokens": False}
        for own, their in itertools.zip_longest(ids, server.send("/tokenize", request)["tokens"]):
            if own != their:
                pair = f"in the text of all tokens the student has id {own}, it has {their}"
                refuse(f"{server.url} has another tokenizer: {pair}")
        answer = ids[1:max_length]
        self.ask_server(TeacherQuery("", ids[:1], answer, [True] * len(answer)), server)
        return model["id"], model["root"]

    def assign(self, samples: Samples, columns: dict, global_step: int) -> TaughtRollout:
        """Returns the rollout of some samples, with who teaches each, and what that teacher reads.

        Args:
            columns: of their prompts in the data, each once.
        """
        # With several teachers, the data name each row's.
        names = columns.get("teacher", [teachers.UNNAMED] * len(columns["row"]))
        names = repeat_each(names, samples.per_prompt)
        # Without --teacher_prompt a teacher reads what the student reads.
        prompts = columns.get("teacher_prompt_ids", columns["prompt_ids"])
        known = list(teachers.sources(self.args))
        experience = {"mask": samples.mask, "sampler_logps": samples.padded_sampler_logps}
        experience["teacher"] = torch.tensor([[known.index(name)] for name in names])
        return TaughtRollout(
            samples,
            global_step,
            experience,
            is_trained=torch.ones(len(samples), dtype=torch.bool),
            teachers=names,
            teacher_prompts=repeat_each(prompts, samples.per_prompt),
        )

    def ask(self, rollout: TaughtRollout, on_failure: Callable | None = None) -> None:
        """Asks servers about a rollout, if they teach some of it and were not asked yet.

        Where they fail, `on_failure` may save the samples first, so that a resumed run asks again.
        """
        if rollout.top_logps is not None:
            return
        queries = rollout.queries(range(len(rollout.samples)))
        if not self.servers:
            rollout.top_logps = [None] * len(queries)
            return
        accelerator = self.accelerator
        rows = range(accelerator.process_index, len(queries), accelerator.num_processes)
        mine = [queries[row] for row in rows]
        try:
            answers = distributed.all_or_none(accelerator, True, self.ask_all, mine)
        except Refused:
            if on_failure is not None and rollout.started_at:
                on_failure()
            raise
        rollout.top_logps = distributed.gather_rows(dict(zip(rows, answers)))

    def read(self, rollout: TaughtRollout, rows: list[int], batch: dict, packer: Packer) -> list:
        """Returns what the teachers say of some samples; `batch` is what the student reads."""
        told = [rollout.top_logps[row] for row in rows]
        return self.outputs(batch, rollout.queries(rows), told, packer)

    def ask_all(self, queries: list[TeacherQuery]) -> list[TopLogps | None]:
        """Returns what servers say; those of one teacher share its queries."""
        chosen: list[Server | None] = []
        for number, query in enumerate(queries):
            servers = self.servers.get(query.teacher, [None])
            chosen.append(servers[number % len(servers)])
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            return list(pool.map(self.ask_server, queries, chosen))

    def ask_server(self, query: TeacherQuery, server: Server | None) -> TopLogps | None:
        if server is None:
            return None
        ids = query.prompt + query.answer
        request = {"model": server.model, "prompt": ids, "prompt_logprobs": self.top_k}
        request |= {"return_token_ids": True, "max_tokens": 1, "temperature": 0.0}
        choice = server.send("/v1/completions", request)["choices"][0]
        told = choice.get("prompt_logprobs") or []
        is_whole = choice.get("prompt_token_ids") == ids and len(told) == len(ids)
        rows_of_ids = []
        rows_of_logps = []
        for place in itertools.compress(itertools.count(len(query.prompt)), query.loss_mask):
            # One entry more than `top_k` if the token itself is not among these.
            entries = told[place] if is_whole else {}
            own = entries.get(str(ids[place]))
            top = sorted(entries.items(), key=lambda entry: entry[1]["rank"])[: self.top_k]
            ranks = [entry["rank"] for _, entry in top]
            if own is None or ranks != list(range(1, self.top_k + 1)):
                refuse(f"{server.url} does not tell {self.top_k} log-probs of each token asked")
            rows_of_ids.append([int(token) for token, _ in top])
            rows_of_logps.append([entry["logprob"] for _, entry in top] + [own["logprob"]])
        top_ids = torch.tensor(rows_of_ids, dtype=torch.int32)
        logps = torch.tensor(rows_of_logps)
        totals = logps[:, :-1].exp().sum(1)
        if not totals.max() <= 1.001 or top_ids.max() >= self.student.vocabulary:
            others = f"tokens beyond the {self.student.vocabulary} of the student"
            refuse(f"{server.url} tells no log-probs (its --logprobs-mode), or of {others}")
        return top_ids, logps
