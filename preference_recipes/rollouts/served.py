"""Teachers behind vLLM servers, which tell the k most probable tokens: docs/distill.md."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import torch
from accelerate import Accelerator
from torch import nn

from common import distributed, refuse
from preference_recipes.models import teachers
from preference_recipes.models.teachers import Question, Teachers, TopLogps
from preference_recipes.rollouts.vllm import Server

REQUESTS_AT_ONCE = 32  # of each process: an answer is a text of some kilobytes a token


class AllTeachers(Teachers):
    """Those here and, with `--teacher_url`, those behind servers. All processes must ask them."""

    def __init__(self, accelerator: Accelerator, args, tokenizer, model: nn.Module):
        """Exits if a server is not what it should be. `model` is the student."""
        super().__init__(accelerator, args, tokenizer, model)
        self.accelerator = accelerator
        self.top_k = min(args.teacher_top_k, self.student.vocabulary)
        self.servers: dict[str, list[Server]] = {}  # of each served teacher
        for name, urls in teachers.locations(args).items():
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
        self.ask(Question("", ids[:1], answer, [True] * len(answer)), server)
        return model["id"], model["root"]

    def top_logps(self, questions: list[Question]) -> list[TopLogps | None]:
        """Returns what servers say to each question, None where the teacher is here."""
        if not self.servers:
            return [None] * len(questions)
        accelerator = self.accelerator
        rows = range(accelerator.process_index, len(questions), accelerator.num_processes)
        mine = [questions[row] for row in rows]
        answers = distributed.all_or_none(accelerator, True, self.ask_all, mine)
        return distributed.gather_rows(dict(zip(rows, answers)))

    def ask_all(self, questions: list[Question]) -> list[TopLogps | None]:
        """Returns what servers say; those of one teacher share its questions."""
        chosen: list[Server | None] = []
        for number, question in enumerate(questions):
            servers = self.servers.get(question.teacher, [None])
            chosen.append(servers[number % len(servers)])
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            return list(pool.map(self.ask, questions, chosen))

    def ask(self, question: Question, server: Server | None) -> TopLogps | None:
        if server is None:
            return None
        ids = question.prompt + question.answer
        request = {"model": server.model, "prompt": ids, "prompt_logprobs": self.top_k}
        request |= {"return_token_ids": True, "max_tokens": 1, "temperature": 0.0}
        choice = server.send("/v1/completions", request)["choices"][0]
        told = choice.get("prompt_logprobs") or []
        is_whole = choice.get("prompt_token_ids") == ids and len(told) == len(ids)
        rows_of_ids = []
        rows_of_logps = []
        for place in itertools.compress(itertools.count(len(question.prompt)), question.learned):
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
