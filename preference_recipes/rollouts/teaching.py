"""Rollouts that teachers read: local models, or vLLM servers that return their top tokens."""

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
from preference_recipes.models.teachers import LocalTeachers, TeacherQuery, TopLogps
from preference_recipes.rollouts.rollout_state import Rollout
from preference_recipes.rollouts.samples import Samples, repeat_each
from preference_recipes.rollouts.vllm import Server

REQUESTS_AT_ONCE = 32  # per process: a reply has some kilobytes of text per token


@checkpointable
@dataclass
class TaughtRollout(Rollout):
    """A rollout, and the inputs of its teachers.

    `experience` also has `teacher_index`, the index of each sample's teacher.
    """

    teachers: list[str]  # the name of each sample's teacher
    teacher_prompts: list[list[int]]  # what each sample's teacher reads before the response
    # The servers' replies, see `AllTeachers.query_servers`; None: not asked yet.
    top_logps: list | None = None

    def lengths_as_read(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the samples' lengths `[N]`, with the longer of student's and teacher's prompt.

        All samples of a prompt get the same addition, so sorting still keeps them together.
        """
        prompts = zip(self.samples.prompts, self.teacher_prompts)
        return lengths + [max(len(teacher) - len(student), 0) for student, teacher in prompts]

    def queries(self, indices: Iterable[int]) -> list[TeacherQuery]:
        """Returns the queries to the teachers of these samples."""
        samples = self.samples
        return [
            TeacherQuery(
                self.teachers[index],
                self.teacher_prompts[index],
                samples.responses[index],
                samples.loss_mask[index],
            )
            for index in indices
        ]


class AllTeachers(LocalTeachers):
    """Local teachers and, with `--teacher_url`, those on servers. All processes must ask them."""

    def __init__(self, accelerator: Accelerator, args, tokenizer, model: nn.Module):
        """Exits if a server is unsuitable. `model` is the student."""
        super().__init__(accelerator, args, tokenizer, model)
        self.accelerator = accelerator
        self.args = args
        self.top_k = min(args.teacher_top_k, self.student.vocab_size)
        self.servers: dict[str, list[Server]] = {}  # by teacher
        for name, urls in teachers.sources(args).items():
            for url in urls if isinstance(urls, list) else ():
                server = Server(url)
                proof = (self.verify, server, tokenizer, args.max_length)
                server.model, weights = distributed.on_main_process(accelerator, *proof)
                self.servers.setdefault(name, []).append(server)
                title = f"served teacher {name}".strip()
                if self.fingerprints.setdefault(title, weights) != weights:
                    refuse(f"{url} has {weights}, but the {title} is {self.fingerprints[title]}")
                accelerator.print(f"{title}: {weights} at {url}, its top {self.top_k} tokens")

    def verify(self, server: Server, tokenizer, max_length: int) -> tuple[str, str]:
        """Returns the names of a server's model and of its weights.

        Refuses a server with another tokenizer, or whose replies lack what is needed.
        """
        model, *_ = server.send("/v1/models", method="GET")["data"]
        if (longest := model["max_model_len"]) <= max_length:  # it adds a token
            refuse(f"--max_length {max_length}: {server.url} has --max-model-len {longest}")
        text = tokenizer.decode(sorted(tokenizer.get_vocab().values()))
        ids = tokenizer.encode(text, add_special_tokens=False)
        request = {"prompt": text, "add_special_tokens": False}
        if server.send("/tokenize", request)["tokens"] != ids:
            refuse(f"{server.url} has another tokenizer: the text of all tokens has other ids")
        answer = ids[1:max_length]
        self.ask_server(TeacherQuery("", ids[:1], answer, [True] * len(answer)), server)
        return model["id"], model["root"]

    def assign_teachers(self, samples: Samples, prompts: dict, global_step: int) -> TaughtRollout:
        """Returns the rollout of these samples, with the teacher of each, and what that one reads.

        Args:
            prompts: columns of the data, each prompt once.
        """
        # With several teachers, the data name the teacher of each row.
        names = prompts.get("teacher", [teachers.UNNAMED] * len(prompts["row"]))
        names = repeat_each(names, samples.per_prompt)
        # Without --teacher_prompt, teachers read the student's prompt.
        teacher_prompts = prompts.get("teacher_prompt_ids", prompts["prompt_ids"])
        all_names = list(teachers.sources(self.args))
        experience = {
            "loss_mask": samples.padded_loss_mask,
            "sampler_logps": samples.padded_sampler_logps,
        }
        experience["teacher_index"] = torch.tensor([[all_names.index(name)] for name in names])
        return TaughtRollout(
            samples,
            global_step,
            experience,
            in_update=torch.ones(len(samples), dtype=torch.bool),
            teachers=names,
            teacher_prompts=repeat_each(teacher_prompts, samples.per_prompt),
        )

    def query_servers(self, rollout: TaughtRollout, on_failure: Callable | None = None) -> None:
        """Asks servers about the part of a rollout that they teach, if they were not asked yet.

        If they fail, `on_failure` may save the samples first, so that a resumed run asks again.
        """
        if rollout.top_logps is not None:
            return
        queries = rollout.queries(range(len(rollout.samples)))
        if not self.servers:
            rollout.top_logps = [None] * len(queries)
            return
        accelerator = self.accelerator
        indices = range(accelerator.process_index, len(queries), accelerator.num_processes)
        own_queries = [queries[index] for index in indices]
        try:
            replies = distributed.all_or_none(accelerator, True, self.ask_all, own_queries)
        except Refused:
            if on_failure is not None and rollout.step_at_start:
                on_failure()
            raise
        rollout.top_logps = distributed.gather_by_index(dict(zip(indices, replies)))

    def outputs_for(
        self, rollout: TaughtRollout, indices: list[int], batch: dict, packer: Packer
    ) -> list:
        """Returns the teachers' outputs for these samples; `batch` is what the student reads."""
        server_logps = [rollout.top_logps[index] for index in indices]
        return self.outputs_at_targets(batch, rollout.queries(indices), server_logps, packer)

    def ask_all(self, queries: list[TeacherQuery]) -> list[TopLogps | None]:
        """Returns the servers' replies, None where the teacher is local."""

        def ask(index: int, query: TeacherQuery) -> TopLogps | None:
            servers = self.servers.get(query.teacher)  # they share the queries
            return self.ask_server(query, servers[index % len(servers)]) if servers else None

        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            return list(pool.map(ask, itertools.count(), queries))

    def ask_server(self, query: TeacherQuery, server: Server) -> TopLogps:
        ids = query.prompt + query.answer
        request = {"model": server.model, "prompt": ids, "prompt_logprobs": self.top_k}
        request |= {"return_token_ids": True, "max_tokens": 1, "temperature": 0.0}
        choice = server.send("/v1/completions", request)["choices"][0]
        prompt_logps = choice.get("prompt_logprobs") or []
        is_whole = choice.get("prompt_token_ids") == ids and len(prompt_logps) == len(ids)
        rows_of_ids = []
        rows_of_logps = []
        for position in itertools.compress(itertools.count(len(query.prompt)), query.loss_mask):
            # There is one entry more than `top_k` if the token itself is not among these.
            entries = prompt_logps[position] if is_whole else {}
            own_entry = entries.get(str(ids[position]))
            top = sorted(entries.items(), key=lambda entry: entry[1]["rank"])[: self.top_k]
            ranks = [entry["rank"] for _, entry in top]
            if own_entry is None or ranks != list(range(1, self.top_k + 1)):
                refuse(f"{server.url} does not tell {self.top_k} log-probs of each token asked")
            rows_of_ids.append([int(token) for token, _ in top])
            rows_of_logps.append([entry["logprob"] for _, entry in top] + [own_entry["logprob"]])
        top_ids = torch.tensor(rows_of_ids, dtype=torch.int32)
        logps = torch.tensor(rows_of_logps)
        totals = logps[:, :-1].exp().sum(1)
        if not totals.max() <= 1.001 or top_ids.max() >= self.student.vocab_size:
            problem = f"tokens beyond the {self.student.vocab_size} of the student"
            refuse(f"{server.url} tells no log-probs (its --logprobs-mode), or of {problem}")
        return top_ids, logps
