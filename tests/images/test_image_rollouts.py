"""Responses to prompts with images: those of plain transformers, scored and trained on with their images."""

import functools
import json

import numpy as np
import pytest
import torch

from preference_recipes.data import images
from preference_recipes.data.dataset import Converter
from preference_recipes.data.prompts import prompt_row
from preference_recipes.models import load
from preference_recipes.models.packing import Packer
from preference_recipes.rollouts import environments, episodes
from preference_recipes.rollouts.rewards import function_arguments
from preference_recipes.rollouts.samples import Samples
from rollout.bare_runs import bare_sampler
from runs import slow_but
from test_image_models import plain, read
from vlms import FAMILIES, save_vlm, some_rows

NEW, TEMPERATURE = 12, 0.8


@pytest.fixture(scope="module")
def prompts_of(tmp_path_factory):
    """A family's folder, tokenizer, and the columns of its prompts: the last answer of each row is asked for."""

    @functools.cache
    def made(family: str):
        folder = str(save_vlm(family, tmp_path_factory.mktemp(family)))
        tokenizer = load.load_tokenizer(folder)
        settings = dict(max_length=900, max_new_tokens=NEW)
        converter = Converter(prompt_row, tokenizer, {}, settings, "")
        rows = [{"prompt": row["messages"][:-1], "images": row["images"]} for row in some_rows()]
        values = [converter.convert_row(row, number) for number, row in enumerate(rows)]
        names = ("prompt_ids", "row_json", "row", "images")
        columns = {name: [value[name] for value in values] for name in names}
        columns["images"][2] = None  # as where another set has none at all
        return folder, tokenizer, columns

    return made


@pytest.mark.parametrize("family", slow_but(["llava", "qwen2_5_vl"], FAMILIES))
def test_responses_are_those_of_plain_transformers(prompts_of, accelerator, family):
    """A batch of all prompts, two of the same ids with other images; drawn tokens have training's log-probs."""
    folder, tokenizer, columns = prompts_of(family)
    model, processor = plain(folder)
    sampler = bare_sampler(accelerator, tokenizer, model, max_new_tokens=NEW, max_length=900)
    never = images.tokens_of(tokenizer.processor)
    greedy = sampler.sample(columns, np.zeros((5, 1, NEW)), 0.0)
    how = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=tokenizer.eos_token_id)
    for number, row in enumerate(some_rows()):
        inputs = read(processor, row["messages"][:-1], row["images"], asks=True)
        made = model.generate(**inputs, **how, suppress_tokens=never)
        assert greedy.responses[number] == made[0, inputs["input_ids"].shape[1] :].tolist()

    uniforms = np.random.default_rng(0).random((5, 2, NEW))
    samples = sampler.sample(columns, uniforms, TEMPERATURE)
    assert samples.images[0] == samples.images[1] == some_rows()[0]["images"]
    expect_training_to_agree(samples, model, tokenizer.processor)


def expect_training_to_agree(samples, model, processor):
    """Drawn tokens have the log-probs of a forward pass over what is trained on."""
    batch = samples.make_batch([*range(10)], Packer(torch.device("cpu"), processor=processor))
    with torch.no_grad():
        logits = model(**batch["inputs"], use_cache=False).logits.flatten(0, 1) / TEMPERATURE
    # Without what stands for an image, which is never drawn.
    never = torch.tensor(images.tokens_of(processor))
    logits = logits[batch["predictor_index"]].index_fill(1, never, -torch.inf)
    expected = logits.log_softmax(-1).gather(1, batch["targets"][:, None])[:, 0]
    drawn = samples.padded_sampler_logps[batch["loss_mask"]]
    torch.testing.assert_close(drawn, expected, rtol=0, atol=2e-5)


class Asks:
    """Adds to the question, and asks once more."""

    def reset(self, prompt, **columns):
        self.asked = prompt[-1]
        self.n_asked = 0
        return " Look."

    def step(self, message):
        self.n_asked += 1
        return [{"role": "user", "content": "Sure?"}] if self.n_asked == 1 else None


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_an_episode_keeps_the_images_of_its_prompt(prompts_of, accelerator, family):
    """Also where `reset` adds to it: the log-probs of all drawn tokens are those of training."""
    folder, tokenizer, columns = prompts_of(family)
    model, _ = plain(folder)
    settings = dict(max_new_tokens=3 * NEW, max_length=900, max_turns=2, environment_timeout=5.0)
    sampler = bare_sampler(accelerator, tokenizer, model, **settings)
    user_class = environments.UserClass("Asks", Asks, False, [])
    sampler.episodes = episodes.EpisodeRunner(sampler, sampler.generator, user_class)
    uniforms = np.random.default_rng(0).random((5, 2, 3 * NEW))
    samples = sampler.sample(columns, uniforms, TEMPERATURE)
    assert sampler.episodes.instances[0].asked["content"] == "\ufffcHow many red dots?"
    assert samples.images[0] == samples.images[1] == some_rows()[0]["images"]
    assert samples.messages[0][0]["content"] == "\ufffcHow many red dots? Look."
    assert samples.statistics["environment/turns"].max() == 2
    texts = [tokenizer.decode(ids) for ids in samples.prompts]
    assert all(" Look.<|im_end|>" in text for text in texts)
    expect_training_to_agree(samples, model, tokenizer.processor)


def test_reward_functions_see_images_and_samples_name_their_files(prompts_of, accelerator):
    _, tokenizer, columns = prompts_of("llava")
    files = [some or [] for some in columns["images"]]
    samples = Samples(
        prompts=columns["prompt_ids"],
        responses=[[5]] * 5,
        row_json=columns["row_json"],
        row_numbers=columns["row"],
        ended=torch.ones(5, dtype=torch.bool),
        images=files,
    )
    sampler = bare_sampler(accelerator, tokenizer)
    given = function_arguments(sampler, samples, [1, 2], ["prompt", "images"])
    assert [image.size for image in given["images"][0]] == [(32, 64), (48, 48)]
    assert given["images"][1] == []
    assert given["prompts"][0][0]["content"] == "Compare \ufffc with \ufffc."
    named = samples.examples(tokenizer, None, "rollout")
    assert named[1]["images"] == json.loads(columns["row_json"][1])["images"] != []
    assert "images" not in named[2]
    kept = samples.select_groups(torch.tensor([False, True, False, False, True]))
    assert kept.images == [files[1], files[4]]
