"""The teachers of a distillation: which models they are, and what they say of a batch."""

import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from common import batches, engine, refuse
from preference_recipes.models import load, lora, prepare
from preference_recipes.models.distillation import (
    DistillModel,
    Head,
    TeacherOutput,
    TopKTeacherOutput,
)
from preference_recipes.models.packing import Packer

# The name of a teacher that is alone and has none.
UNNAMED = ""
# What a teacher behind a server says of the n learned tokens of an answer: the ids of the k most
# probable ones, int32 `[n, k]`; their log-probs and that of the token itself, fp32 `[n, k + 1]`.
TopLogps = tuple[torch.Tensor, torch.Tensor]


class TeacherQuery(NamedTuple):
    """What a teacher is asked about."""

    teacher: str  # its name
    prompt: list[int]  # what it reads before the answer
    answer: list[int]
    loss_mask: list[bool]  # of each token of the answer, whether the teacher speaks of it


def sources(args) -> dict[str, str | list[str] | None]:
    """Returns where each teacher is, by what the column `teacher` calls it.

    That is a folder or a hub name, the URLs of its vLLM servers, or None: it is the student itself,
    without its adapters if it has some.
    """
    pairs = [pair.partition("=")[::2] for pair in args.teacher or ()]
    if args.teacher_model_name_or_path:
        pairs.append((UNNAMED, args.teacher_model_name_or_path))
    here: dict[str, Any] = dict(pairs)
    servers: dict[str, list[str]] = {}
    for pair in args.teacher_url or ():
        name, _, url = pair.rpartition("=")
        servers.setdefault(name, []).append(url)
    found = here | servers
    is_clear = len(found) == len(pairs) + len(servers) and all(found.values())
    if not is_clear or (UNNAMED in found and len(found) > 1):
        expected = "one teacher, or several as --teacher NAME=PATH and --teacher_url NAME=URL"
        refuse(f"expected {expected}, each name once. Got {[*here, *servers]}")
    if servers and args.temperature != 1:
        refuse(f"--temperature {args.temperature:g}: a --teacher_url tells log-probs at 1 only")
    return found or {UNNAMED: None}


def check_settings(args) -> None:
    """Refuses arguments that name no teacher, or one twice."""
    if None in sources(args).values() and not (args.lora_r and args.teacher_prompt):
        own = "--lora_r with --teacher_prompt, for the student's base"
        refuse(f"no teacher: give --teacher_model_name_or_path, --teacher_url, or {own}")


def names(args) -> list[str]:
    """Returns the names that the column `teacher` chooses from; none if a teacher has all rows."""
    return [name for name in sources(args) if name != UNNAMED]


def row_settings(args) -> dict[str, Any]:
    """Returns what `prompts.taught_row` has to know of the arguments."""
    return {
        "max_new_tokens": args.max_new_tokens,
        "teacher_names": names(args),
        "teacher_prompt": args.teacher_prompt,
    }


def shared_vocabulary(args, data, student: nn.Module) -> int:
    """Returns how many tokens the student and its teachers here have in common, from the first.

    Output layers may be padded to different sizes (Qwen2.5: 151,936 and 152,064 rows). Then only
    tokens that the tokenizer has are given a probability.
    """
    paths = [path for path in sources(args).values() if not isinstance(path, list)]
    by_model = load.check_embeddings(data, args.model_name_or_path, *paths, draws=True)
    sizes = {student.get_output_embeddings().out_features, *by_model.values()}
    tokens = max(data.converter.tokenizer.get_vocab().values()) + 1
    return min(*sizes, tokens) if len(sizes) > 1 else min(sizes)


class Teacher(NamedTuple):
    """A prepared `DistillModel`, and its output layer at the run's temperature.

    That is whole on every process: else the student's passes would gather it. None: the model is
    the student as it is when it is asked, maybe inside `Average.in_place_of_the_policy`.
    """

    model: nn.Module
    head: Head | None


class Teachers:
    """Models here that a student learns from, each on its own rows of the data."""

    def __init__(self, accelerator: Accelerator, args, tokenizer, model: nn.Module):
        """Loads what the arguments name. All processes must call it; `model` is the student."""
        self.is_sharded = engine.is_sharded(accelerator)
        self.have_own_prompts = args.teacher_prompt is not None
        self.temperature = args.temperature
        self.fingerprints: dict[str, str] = {}  # of models of their own, for a checkpoint
        self.by_name: dict[str, Teacher] = {}  # by what the column `teacher` calls them
        self.student = student = engine.unwrapped(accelerator, model)
        for name, path in sources(args).items():
            if path is None and args.lora_r:
                head = student.whole_head(args.temperature)
                self.by_name[name] = Teacher(lora.WithoutAdapters(model), head)
            elif path is None:
                self.by_name[name] = Teacher(model, head=None)
            elif isinstance(path, str):
                teacher = load.causal_lm(path, tokenizer, args, frozen=True)
                wrapper = DistillModel(teacher, student.vocabulary)
                title = f"teacher {name}" if name != UNNAMED else "teacher"
                self.fingerprints[title] = load.fingerprint(accelerator, path, wrapper.config)
                prepared = prepare.frozen(accelerator, wrapper)
                self.by_name[name] = Teacher(prepared, wrapper.whole_head(args.temperature))

    @torch.no_grad()
    def outputs(
        self,
        batch: dict,
        queries: list[TeacherQuery],
        server_logps: list[TopLogps | None],
        packer: Packer,
    ) -> list[TeacherOutput | TopKTeacherOutput]:
        """Returns what the teachers say at the targets of a batch, each of its own answers.

        All processes must call it equally often, because engines may cut weights.

        Args:
            batch: of the answers in these queries, as the student reads them.
            server_logps: what servers said of each answer; None: its teacher is here.
        """
        # The number of the answer that each target is in.
        owners = np.repeat(np.arange(len(queries)), [sum(each.loss_mask) for each in queries])
        outputs: list[TeacherOutput | TopKTeacherOutput] = []
        for name, teacher in self.by_name.items():
            mine = [number for number, each in enumerate(queries) if each.teacher == name]
            if not mine and not self.is_sharded:
                continue
            own_batch = batch
            if len(mine) < len(queries) or self.have_own_prompts:
                read = [queries[number] for number in mine or [-1]]  # -1: a padding row
                own_batch = packer.make_batch(
                    [each.prompt for each in read],
                    [each.answer for each in read],
                    [each.loss_mask for each in read],
                )
            hidden = teacher.model(own_batch, as_teacher=True)
            head = teacher.head or copy.deepcopy(self.student.whole_head(self.temperature))
            if mine:
                places = batches.send(np.flatnonzero(np.isin(owners, mine)), packer.device)
                outputs.append(TeacherOutput(hidden, head, places))
        served = [number for number, said in enumerate(server_logps) if said is not None]
        if served:
            said = zip(*(server_logps[number] for number in served))
            ids, logps = (batches.send(torch.cat(parts), packer.device) for parts in said)
            places = batches.send(np.flatnonzero(np.isin(owners, served)), packer.device)
            outputs.append(TopKTeacherOutput(ids.long(), logps[:, :-1], logps[:, -1], places))
        return outputs
