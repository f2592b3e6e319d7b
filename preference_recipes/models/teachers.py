"""The teachers of a distillation: which models they are, and what they say of a batch."""

import sys
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from common import batches, engine
from preference_recipes.models import load, lora, prepare
from preference_recipes.models.divergence import DistillModel, Head, Lesson
from preference_recipes.models.packing import Packer

# The name of a teacher that is alone and has none.
ONLY = ""


def names_and_paths(args) -> dict[str, str | None]:
    """Returns the teachers' folders or hub names, by what the column `teacher` calls them.

    None stands for the student without its adapters.
    """
    if args.teacher and args.teacher_model_name_or_path:
        sys.exit(
            "--teacher and --teacher_model_name_or_path: give one of them. --teacher NAME=PATH "
            "names several teachers, of which the column `teacher` of a row chooses one"
        )
    if args.teacher_model_name_or_path:
        return {ONLY: args.teacher_model_name_or_path}
    if args.teacher:
        named: dict[str, str | None] = dict(pair.partition("=")[::2] for pair in args.teacher)
        if len(named) < len(args.teacher) or not all(named.values()):
            sys.exit(f"--teacher {' '.join(args.teacher)}: expected NAME=PATH, each name once")
        return named
    if args.lora_r and args.teacher_prompt:
        return {ONLY: None}
    sys.exit(
        "there is no teacher: give --teacher_model_name_or_path, or --lora_r with --teacher_prompt "
        "to make the student's base its teacher"
    )


def names(args) -> list[str]:
    """Returns the names that the column `teacher` chooses from; none if a teacher has all rows."""
    return [name for name in names_and_paths(args) if name != ONLY]


def shared_vocabulary(args, data, student: nn.Module) -> int:
    """Returns how many tokens the student and all its teachers have in common, from the first.

    Output layers are often padded beyond the tokenizer, to different sizes: 151,936 rows in the
    small Qwen2.5 models and 152,064 in the large ones. If all are of one size they are used whole.
    Otherwise only tokens that the tokenizer has are given a probability.
    """
    paths = names_and_paths(args).values()
    by_model = load.check_embeddings(data, args.model_name_or_path, *paths, draws=True)
    sizes = {student.get_output_embeddings().out_features, *by_model.values()}
    tokens = max(data.converter.tokenizer.get_vocab().values()) + 1
    return min(*sizes, tokens) if len(sizes) > 1 else min(sizes)


class Teacher(NamedTuple):
    """A prepared `DistillModel`, and its output layer at the run's temperature.

    That is whole on every process: else the student's passes would gather it.
    """

    model: nn.Module
    head: Head


class Teachers:
    """Frozen models that a student learns from, each on its own rows of the data.

    Attributes:
        by_name: the teachers by what the column `teacher` calls them.
        fingerprints: of teachers that are models of their own, for the identity of a checkpoint.
    """

    def __init__(self, accelerator: Accelerator, args, tokenizer, model: nn.Module):
        """Loads what the arguments name. All processes must call it; `model` is the student."""
        self.is_sharded = engine.is_sharded(accelerator)
        self.have_own_prompts = args.teacher_prompt is not None
        self.fingerprints: dict[str, str] = {}
        self.by_name: dict[str, Teacher] = {}
        student = engine.unwrapped(accelerator, model)
        for name, path in names_and_paths(args).items():
            if path is None:  # the student without its adapters
                wrapper = student
                prepared = lora.WithoutAdapters(model)
            else:
                teacher = load.causal_lm(path, tokenizer, args, frozen=True)
                wrapper = DistillModel(teacher, student.vocabulary)
                title = f"teacher {name}" if name != ONLY else "teacher"
                self.fingerprints[title] = load.fingerprint(accelerator, path, wrapper.config)
                prepared = prepare.frozen(accelerator, wrapper)
            self.by_name[name] = Teacher(prepared, wrapper.whole_head(args.temperature))

    @torch.no_grad()
    def lessons(
        self,
        batch: dict,
        *,
        prompts: list[list[int]],
        answers: list[list[int]],
        learned: list[list[bool]],
        names: list[str],
        packer: Packer,
    ) -> list[Lesson]:
        """Returns what the teachers say at the targets of a batch, each of its own answers.

        Where the engine cuts weights, every teacher reads on all processes, also where it has no
        answer: all must call it equally often.

        Args:
            batch: of these answers, as the student reads them.
            learned: of each of their tokens, whether a teacher speaks of it.
            prompts: what the teacher of each answer reads before it.
            names: of these teachers.
        """
        # Of each target the number of its answer.
        owners = np.repeat(np.arange(len(answers)), [sum(flags) for flags in learned])
        lessons = []
        for name, teacher in self.by_name.items():
            mine = [number for number, owner in enumerate(names) if owner == name]
            if not mine and not self.is_sharded:
                continue
            own_batch = batch
            if len(mine) < len(answers) or self.have_own_prompts:
                read = mine or [-1]  # a padding row, since the others wait
                own_batch = packer.make_batch(
                    [prompts[number] for number in read],
                    [answers[number] for number in read],
                    [learned[number] for number in read],
                )
            hidden = teacher.model(own_batch, as_teacher=True)
            if mine:
                places = batches.send(np.flatnonzero(np.isin(owners, mine)), packer.device)
                lessons.append(Lesson(hidden, teacher.head, places))
        return lessons
