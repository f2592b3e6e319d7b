"""recipes/distill.py: its teachers, and whole runs against a plain reference."""

import functools
import sys
import types

import numpy as np
import pytest
import torch

import plain_rollouts
import recipes
import runs
from fake_vllm import FakeServer
from plain_rollouts import PlainRun, coarsened, expect_alike, expect_run, lengths_of
from preference_recipes.models.packing import Packer
from runs import say
from test_distillation import dense

GKD = runs.forked("gkd")
gkd = recipes.load("gkd", GKD)


SHARED = dict(plain_rollouts.SHARED, rollout_batch_size=5)
MIXED = dict(beta=0.3, temperature=0.8, on_policy_share=0.5, teacher_prompt="hint", max_epochs=2)
SAMPLED = dict(loss_type="sampled", temperature=0.8, n_samples_per_prompt=3, train_batch_size=8)
# 7 prompts: rollouts of 5 and 2 an epoch. By name: the settings, and who teaches; @: behind a server.
WHOLE = {
    "reverse kl": (SHARED | dict(max_epochs=2), {"": "same"}),
    "several teachers, other prompts, completions": (SHARED | MIXED, {"a": "same", "b": "padded"}),
    "the top tokens of a server": (
        SHARED | dict(beta=0.3, teacher_top_k=7, max_epochs=2),
        {"": "@same"},
    ),
    "sampled tokens": (
        SHARED | SAMPLED | dict(num_epochs_per_rollout=2, max_steps=7),
        {"": "padded"},
    ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A student, a teacher of its shape and one of another with a head padded to 320 rows, and 7 prompts."""
    folder = tmp_path_factory.mktemp("distill")
    plain_rollouts.make_inputs(
        folder,
        lambda row: {
            "completion": say("assistant", "xyz"[: 1 + row % 3] * (1 + row % 2))
            + (say("user", "7") + say("assistant", "y")) * (row % 3 == 0),
            "teacher": "ab"[row % 2],
            "hint": say("system", "h") + say("user", "12" * (1 + row % 4)),
            "long": say("user", "7" * (40 if row % 2 else 1)),
        },
    )
    runs.tiny_llama(folder / "same", initializer_range=0.3)
    runs.tiny_llama(folder / "padded", vocab_size=320, hidden_size=48, initializer_range=0.2)
    return folder


@functools.cache
def server_of(folder):
    return FakeServer(folder)


def run(inputs, output, settings, teachers: dict, *more, launcher="plain"):
    """Runs the recipe; the only teacher has no name."""
    flags = runs.short_run(inputs, "prompts", output, **settings)
    named: dict[str, list] = {}
    for name, path in teachers.items():
        flag = "teacher" if name else "teacher_model_name_or_path"
        where = inputs / path
        if path.startswith("@"):
            flag, where = "teacher_url", server_of(inputs / path[1:]).url
        named.setdefault(flag, []).append(f"{name}={where}" if name else where)
    flags += runs.flags_of(named)
    file = runs.forked("sdft") if "ema_decay" in settings else runs.recipe("distill")
    file = GKD if "on_policy_share" in settings else file
    runs.launch(runs.LAUNCHERS[launcher], file, *flags, *more)


class Reference(PlainRun):
    def __init__(self, inputs, settings, teachers: dict):
        super().__init__(inputs, gkd.Args(), settings)
        if "padded" in teachers.values():
            self.vocab_size = 261  # the tokenizer's tokens, which all models have
        self.teachers = {name: self.load(path.strip("@")) for name, path in teachers.items()}
        self.top_k = settings.get("teacher_top_k")

    @torch.no_grad()
    def roll_out(self, number: int) -> tuple[list, dict]:
        """The samples of a rollout, and what is logged of it: of the responses that were sampled."""
        s = self.set
        epoch, place = divmod(number, 2)
        place *= s.rollout_batch_size
        order = np.random.default_rng([s.seed, epoch]).permutation(7)
        rows = order[place : place + s.rollout_batch_size]
        uniforms = self.uniforms(len(rows), number, 1)
        own, given = [], []
        for index, (row, of_prompt) in enumerate(zip(rows, uniforms)):
            columns = self.rows[row]
            prompt = self.encode(columns["prompt"])
            of_teacher = self.encode(columns[s.teacher_prompt]) if s.teacher_prompt else prompt
            name = columns["teacher"] if "" not in self.teachers else ""
            draw = np.random.default_rng([s.seed, 7 * epoch + place + index, 4]).random()
            is_own = draw < s.on_policy_share
            if is_own:
                samples = [self.respond(self.policy, prompt, numbers) for numbers in of_prompt]
            else:
                samples = [self.completion_of(columns)]
            for sample in samples:
                sample.teacher = name
                sample.is_learned = getattr(sample, "is_learned", [True] * len(sample.response))
                sample.taught = self.logps(self.teachers[name], of_teacher, sample.response)
                sample.old, _ = self.of_tokens(self.policy, sample)
                (own if is_own else given).append(sample)
        if not own:
            return given, {}
        line = lengths_of(own, "completions")
        line["completions/clipped_ratio"] = np.mean([not sample.ended for sample in own])
        return own + given, line

    def completion_of(self, columns: dict) -> types.SimpleNamespace:
        """That of the data, cut. Of its messages the assistant's are learned."""
        ids, own = [], []
        for part in columns["completion"]:
            text = part["content"] + "<|end|>"
            is_own = part["role"] == "assistant"
            ids += self.tokenizer(text if is_own else f"<|user|>{text}<|assistant|>").input_ids
            own += [is_own] * (len(ids) - len(own))
        most, prompt = self.set.max_new_tokens, self.encode(columns["prompt"])
        return types.SimpleNamespace(prompt=prompt, response=ids[:most], is_learned=own[:most])

    def losses_of(self, sample, is_first: bool) -> dict:
        """The loss of each learned token, and what is logged as means over these."""
        s = self.set
        student = self.logps(self.policy, sample.prompt, sample.response)[sample.is_learned]
        teacher = sample.taught[sample.is_learned]
        targets = torch.tensor(sample.response)[sample.is_learned]
        loss, values = dense(student, teacher, targets, s.beta)
        coarse = values
        if self.top_k:
            top = teacher.topk(self.top_k).indices
            both = [coarsened(logps, top) for logps in (student, teacher)]
            loss, coarse = dense(*both, torch.zeros_like(targets), s.beta)
        if s.loss_type == "sampled":
            old = values["logps"].detach() if is_first else sample.old
            loss = -(values["logps"] - old).exp() * (values["teacher_logps"] - old)
        found = {
            "loss": loss,
            "entropy": values["entropy"],
            "kl/reverse": coarse["reverse_kl"],
            "kl/forward": coarse["forward_kl"],
            "teacher/agreement": values["agreement"],
            "teacher/entropy": coarse["teacher_entropy"],
        }
        if sample.teacher:
            found[f"kl/reverse/{sample.teacher}"] = found["kl/reverse"]
        return found

    def update(self, samples, is_first: bool) -> dict:
        """One step; returns its log line."""
        each = [self.losses_of(sample, is_first) for sample in samples]
        tags = {tag: None for losses in each for tag in losses}
        means = {tag: torch.cat([x[tag] for x in each if tag in x]).mean() for tag in tags}
        line = self.step(samples, means["loss"], learning_rate=self.set.learning_rate)
        return line | {tag: value.item() for tag, value in means.items()}

    def go(self):
        """Trains, and fills `lines`."""
        s = self.set
        for number in range(2 * s.max_epochs if not s.max_steps else 100):
            rollout, line = self.roll_out(number)
            is_first = True
            for samples in self.updates_of(number, rollout):
                if s.max_steps and len(self.lines) == s.max_steps:
                    return self
                found = self.update(samples, is_first)
                self.lines.append(found | (line if is_first else {}))
                is_first = False
        return self


@pytest.fixture(scope="module")
def plain_run(inputs):
    """`name -> folder` of a run of `WHOLE` in one process."""

    @functools.cache
    def made(name):
        run(inputs, inputs / name, *WHOLE[name])
        return inputs / name

    return made


@pytest.mark.parametrize("name", WHOLE)
def test_a_run_is_that_of_the_plain_reference(inputs, plain_run, name):
    expect_run(plain_run(name), Reference(inputs, *WHOLE[name]).go(), without=("epoch",))


def test_a_server_that_tells_of_all_tokens_is_as_a_teacher_here(inputs):
    """Beside one that is here, over two processes."""
    settings = dict(SHARED, beta=0.3, teacher_prompt="hint", max_epochs=2)
    run(inputs, inputs / "here", settings, {"a": "model", "b": "same"})
    settings["teacher_top_k"] = 999  # as many as there are: 264
    run(inputs, inputs / "served", settings, {"a": "model", "b": "@same"}, launcher="ddp")
    expect_alike(inputs / "here", inputs / "served")


@pytest.mark.parametrize("launcher", ["ddp", "zero3", runs.slow("fsdp2")])
def test_several_teachers_under_engines(inputs, plain_run, launcher):
    """Each teacher reads on both processes, though often only one of them has answers of its own."""
    name = "several teachers, other prompts, completions"
    expected = plain_run(name)
    output = inputs / launcher
    settings = {**WHOLE[name][0], "micro_train_batch_size": 1}
    run(inputs, output, settings, WHOLE[name][1], launcher=launcher)
    expect_alike(expected, output)


@pytest.mark.parametrize("launcher", ["plain", runs.slow("zero3"), runs.slow("fsdp2")])
def test_the_base_below_adapters_teaches_what_it_reads_elsewhere(inputs, launcher):
    """At the first update the student is its base. So the KL is that of the base to itself after the other prompt."""
    output = inputs / f"self-{launcher}"
    settings = dict(SHARED, max_steps=3, teacher_prompt="hint", learning_rate=0.02)
    run(inputs, output, {**settings, "lora_r": 4}, {}, launcher=launcher)
    expected = Reference(inputs, {**settings, "max_steps": 1}, {"": "model"}).go().lines[0]
    first, *_, last = runs.training_lines(output)
    for tag in ("kl/reverse", "kl/forward", "teacher/entropy"):
        assert first[tag] == pytest.approx(expected[tag], rel=1e-4)
    assert last["kl/reverse"] != first["kl/reverse"]


class SelfTaught(Reference):
    def update(self, samples, is_first):
        line = super().update(samples, is_first)
        pairs = zip(self.teachers[""].parameters(), self.policy.parameters())
        for mean, weight in pairs:
            mean.data.lerp_(weight.data, 1 - self.set.ema_decay)
        return line


@pytest.mark.parametrize("launcher", ["plain", runs.slow("zero3"), runs.slow("fsdp2")])
def test_the_average_of_a_student_teaches_it(inputs, launcher):
    """SDFT. Each rollout has one update, so that none of its samples has another teacher."""
    output = inputs / f"average-{launcher}"
    settings = dict(SHARED, max_steps=5, rollout_batch_size=4, teacher_prompt="hint")
    settings |= dict(learning_rate=0.02, ema_decay=0.7)
    run(inputs, output, settings, {}, launcher=launcher)
    expect_run(output, SelfTaught(inputs, settings, {"": "model"}).go(), without=("epoch",))


def test_micro_batches_hold_the_tokens_that_are_asked_for_of_what_teachers_read(
    inputs, accelerator, tmp_path, monkeypatch
):
    read = []
    make_batch = Packer.make_batch

    def measured(*given, **named):
        batch = make_batch(*given, **named)
        read.append(batch["inputs"]["input_ids"].numel())
        return batch

    settings = dict(SHARED, rollout_batch_size=7, train_batch_size=7, max_steps=1)
    settings |= dict(teacher_prompt="long", micro_train_tokens=70, share_prompts=False)
    settings |= dict(eval_dataset_name=inputs / "prompts.jsonl")
    settings |= dict(teacher_model_name_or_path=inputs / "same")
    flags = runs.short_run(inputs, "prompts", tmp_path / "out", **settings)
    monkeypatch.setattr(Packer, "make_batch", measured)
    monkeypatch.setattr(sys, "argv", ["distill.py", *flags])
    recipes.load("distill").main()
    assert read and max(read) <= 70
