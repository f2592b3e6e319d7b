"""The teachers of a distillation: which models they are, and their outputs for a batch."""

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

# The name of a single teacher that the arguments do not name.
UNNAMED = ""
# A server's reply about the n learned tokens of a response: the ids of the k most probable tokens,
# int32 `[n, k]`; their log-probs and that of the learned token itself, fp32 `[n, k + 1]`.
TopLogps = tuple[torch.Tensor, torch.Tensor]


class TeacherQuery(NamedTuple):
    """A prompt and an answer for a teacher."""

    teacher: str  # its name
    prompt: list[int]  # the teacher reads it before the answer
    answer: list[int]
    loss_mask: list[bool]  # the tokens of the answer whose distributions are wanted


def sources(args) -> dict[str, str | list[str] | None]:
    """Returns where each teacher is, by its name in the column `teacher`.

    That is a folder or a hub name, the URLs of its vLLM servers, or None for the student itself,
    without its adapters if it has any.
    """
    pairs = [pair.partition("=")[::2] for pair in args.teacher or ()]
    if args.teacher_model_name_or_path:
        pairs.append((UNNAMED, args.teacher_model_name_or_path))
    local_paths: dict[str, Any] = dict(pairs)
    servers: dict[str, list[str]] = {}
    for pair in args.teacher_url or ():
        name, _, url = pair.rpartition("=")
        servers.setdefault(name, []).append(url)
    all_sources = local_paths | servers
    is_clear = len(all_sources) == len(pairs) + len(servers) and all(all_sources.values())
    if not is_clear or (UNNAMED in all_sources and len(all_sources) > 1):
        expected = "one teacher, or several as --teacher NAME=PATH and --teacher_url NAME=URL"
        refuse(f"expected {expected}, each name once. Got {[*local_paths, *servers]}")
    if servers and args.temperature != 1:
        refuse(f"--temperature {args.temperature:g}: a --teacher_url returns log-probs at 1 only")
    return all_sources or {UNNAMED: None}


def check_settings(args) -> None:
    """Refuses arguments that name no teacher, or one twice."""
    if None in sources(args).values() and not (args.lora_r and args.teacher_prompt):
        student_base = "--lora_r with --teacher_prompt, for the student's base"
        refuse(f"no teacher: give --teacher_model_name_or_path, --teacher_url, or {student_base}")


def names(args) -> list[str]:
    """Returns the names for the column `teacher`; none if one teacher has all rows."""
    return [name for name in sources(args) if name != UNNAMED]


def row_settings(args) -> dict[str, Any]:
    """Returns the arguments of `prompts.distill_row`."""
    return {
        "max_new_tokens": args.max_new_tokens,
        "teacher_names": names(args),
        "teacher_prompt": args.teacher_prompt,
    }


def shared_vocab_size(args, data, student: DistillModel) -> int:
    """Returns how many tokens the student and its local teachers share, counted from the first.

    Output layers may be padded to different sizes (Qwen2.5: 151,936 and 152,064 rows). Then only
    the tokenizer's own tokens have a probability.
    """
    paths = [path for path in sources(args).values() if not isinstance(path, list)]
    embedding_sizes = load.check_embeddings(data, args.model_name_or_path, *paths, draws=True)
    sizes = {student.vocab_size, *embedding_sizes.values()}
    n_tokens = max(data.converter.tokenizer.get_vocab().values()) + 1
    return min(*sizes, n_tokens) if len(sizes) > 1 else min(sizes)


class Teacher(NamedTuple):
    """A prepared `DistillModel`, and its output layer at the run's temperature.

    The layer is whole on every process, so that the student's passes need not gather it. None: the
    model is the student in its current state, maybe inside `EMA.in_place_of_the_policy`.
    """

    model: nn.Module
    head: Head | None


class LocalTeachers:
    """Teachers that run in the training processes, each for its own rows of the data."""

    def __init__(self, accelerator: Accelerator, args, tokenizer, model: nn.Module):
        """Loads the teachers. All processes must call it. `model` is the student, prepared."""
        self.is_sharded = engine.is_sharded(accelerator)
        self.have_own_prompts = args.teacher_prompt is not None
        self.temperature = args.temperature
        self.fingerprints: dict[str, str] = {}  # for a checkpoint, of models of their own
        self.by_name: dict[str, Teacher] = {}  # as in the column `teacher`
        self.student = student = engine.unwrapped(accelerator, model)
        for name, path in sources(args).items():
            if path is None and args.lora_r:
                head = student.whole_head(args.temperature)
                self.by_name[name] = Teacher(lora.WithoutAdapters(model), head)
            elif path is None:
                self.by_name[name] = Teacher(model, head=None)
            elif isinstance(path, str):
                wrapper = DistillModel(load.causal_lm(path, tokenizer, args, frozen=True))
                wrapper.vocab_size = student.vocab_size
                title = f"teacher {name}" if name != UNNAMED else "teacher"
                self.fingerprints[title] = wrapper.model.fingerprint
                prepared = prepare.frozen_model(accelerator, wrapper)
                self.by_name[name] = Teacher(prepared, wrapper.whole_head(args.temperature))

    @torch.no_grad()
    def outputs_at_targets(
        self,
        batch: dict,
        queries: list[TeacherQuery],
        server_logps: list[TopLogps | None],
        packer: Packer,
    ) -> list[TeacherOutput | TopKTeacherOutput]:
        """Returns the teachers' outputs at the targets of a batch, from each for its own answers.

        All processes must call it equally often, because engines may shard weights.

        Args:
            batch: the answers in these queries, as the student reads them.
            server_logps: a server's reply for each query; None: its teacher is local.
        """
        query_of_target = np.repeat(np.arange(len(queries)), [sum(q.loss_mask) for q in queries])

        def targets_of(indices: list[int]) -> torch.Tensor:
            targets = np.flatnonzero(np.isin(query_of_target, indices))
            return batches.to_device(targets, packer.device)

        outputs: list[TeacherOutput | TopKTeacherOutput] = []
        for name, teacher in self.by_name.items():
            indices = [index for index, query in enumerate(queries) if query.teacher == name]
            if not indices and not self.is_sharded:
                continue
            teacher_batch = batch
            if len(indices) < len(queries) or self.have_own_prompts:
                own_queries = [queries[index] for index in indices or [-1]]  # -1: padding
                teacher_batch = packer.make_batch(
                    [query.prompt for query in own_queries],
                    [query.answer for query in own_queries],
                    [query.loss_mask for query in own_queries],
                )
            hidden = teacher.model(teacher_batch, as_teacher=True)
            head = teacher.head or copy.deepcopy(self.student.whole_head(self.temperature))
            if indices:
                outputs.append(TeacherOutput(hidden, head, targets_of(indices)))
        served = [index for index, top_logps in enumerate(server_logps) if top_logps is not None]
        if served:
            columns = zip(*(server_logps[index] for index in served))
            ids, logps = (batches.to_device(torch.cat(parts), packer.device) for parts in columns)
            top_k = TopKTeacherOutput(ids.long(), logps[:, :-1], logps[:, -1], targets_of(served))
            outputs.append(top_k)
        return outputs
