"""Models that read images, of many families: log-probs are those of plain transformers."""

import functools
import io
import types

import datasets
import pytest
import torch
import transformers
from PIL import Image

from common.shared_args import SharedArgs
from preference_recipes.data import images
from preference_recipes.data.dataset import Converter
from preference_recipes.data.formats import preference_row
from preference_recipes.data.sequences import Sequences
from preference_recipes.models import checks, load, prepare
from preference_recipes.models.logprobs import LogProbModel
from preference_recipes.models.packing import Packer
from recipes import load as load_recipe
from runs import refuses, slow_but
from vlms import FAMILIES, has_torchvision, picture, save_vlm, some_rows, turn

CPU = torch.device("cpu")
SFT, DPO = load_recipe("sft"), load_recipe("dpo")
FAST = ["llava", "gemma3", "idefics3", "qwen2_5_vl"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Where a family's model is; `seed` makes another one of it."""

    @functools.cache
    def saved(family: str, seed: int = 0):
        return str(save_vlm(family, tmp_path_factory.mktemp(family), seed))

    return saved


def loaded(folder: str) -> tuple[LogProbModel, object]:
    tokenizer = load.load_tokenizer(folder)
    return LogProbModel(load.causal_lm(folder, tokenizer, SharedArgs())).eval(), tokenizer


def converted(rows: list[dict], tokenizer, function, **settings) -> datasets.Dataset:
    converter = Converter(function, tokenizer, {}, dict(max_length=1024, **settings), "")
    return datasets.Dataset.from_list([converter.convert_row(row, 0) for row in rows])


# ============================================================ plain transformers
def plain(folder: str):
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), transformers.AutoProcessor.from_pretrained(folder)


def read(processor, messages: list[dict], images: list[bytes], asks: bool = False) -> dict:
    n = sum(part["type"] == "image" for message in messages for part in message["content"])
    text = processor.apply_chat_template(messages, add_generation_prompt=asks)
    opened = [[Image.open(io.BytesIO(file)) for file in images[:n]]] if n else None
    return processor(text=[text], images=opened, return_tensors="pt", add_special_tokens=False)


def answer_logps(model, processor, messages, images, turns) -> torch.Tensor:
    """The log-probs of the tokens of some turns, each up to its end."""
    whole = read(processor, messages, images)
    ids = whole["input_ids"][0]
    mask = torch.zeros(len(ids), dtype=torch.bool)
    for number in turns:
        start = read(processor, messages[:number], images, asks=True)["input_ids"].shape[1]
        length = (ids[start:] == processor.tokenizer.eos_token_id).nonzero()[0].item() + 1
        mask[start : start + length] = True
    logps = model(**whole, use_cache=False).logits[0, :-1].log_softmax(-1)
    return logps.gather(1, ids[1:, None])[:, 0][mask[1:]]


def decoder_norm(model) -> float:
    """The norm of the gradient of what is trained by default: the decoder and the head."""
    parts = (model.get_decoder(), model.get_output_embeddings())
    trained = {id(p): p for part in parts for p in part.parameters() if p.grad is not None}
    return torch.stack([p.grad.norm() for p in trained.values()]).norm().item()


# ============================================================ log-probs
@pytest.mark.parametrize("family", slow_but(FAST, FAMILIES))
def test_sft_is_that_of_plain_transformers(folder_of, accelerator, family):
    """Batches of two rows: with images and without, of several turns, their images of several sizes."""
    model, tokenizer = loaded(folder_of(family))
    rows = some_rows()
    data = Sequences(converted(rows, tokenizer, SFT.sft_row, loss_on="assistant"))
    packer = checks.make_packer(accelerator, SharedArgs(), [model], tokenizer.processor)
    losses, n_targets = [], 0
    for numbers in ([0, 1], [2, 3], [4]):
        batch = SFT.collate(data[numbers], packer)
        of_tokens, _ = SFT.token_losses(model, batch, "nll")
        losses.append(of_tokens.sum())
        n_targets += int(batch["loss_mask"].sum())
    loss = torch.stack(losses).sum() / n_targets
    loss.backward()

    theirs, processor = plain(folder_of(family))
    logps = [
        answer_logps(theirs, processor, row["messages"], row["images"], turns)
        for row, turns in zip(rows, ([1], [1, 3], [1], [1, 3], [1]))
    ]
    expected = -torch.cat(logps).mean()
    expected.backward()
    assert n_targets == sum(map(len, logps))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert decoder_norm(model.model) == pytest.approx(decoder_norm(theirs), rel=2e-6)


@pytest.mark.parametrize("family", slow_but(["llava", "qwen2_5_vl"], FAMILIES))
def test_dpo_is_that_of_plain_transformers(folder_of, accelerator, family):
    """All pairs are one batch, so that prompts are shared where a family can: two have the same ids, not images."""
    model, tokenizer = loaded(folder_of(family))
    reference, _ = loaded(folder_of(family, seed=1))
    rows = [
        {
            "prompt": row["messages"][:-1],
            "chosen": row["messages"][-1:],
            "rejected": [turn("assistant", f"No idea at all, {number}.")],
            "images": row["images"],
        }
        for number, row in enumerate(some_rows())
    ]
    data = converted(rows, tokenizer, preference_row)
    assert data[0]["prompt_ids"] == data[4]["prompt_ids"]
    models = [model, reference]
    args = types.SimpleNamespace(max_length=1024, share_prompts=True)
    packer = checks.make_packer(accelerator, args, models, tokenizer.processor)
    assert packer.share == (
        family in ("llava", "llava_next", "idefics3", "smolvlm", "internvl", "mistral3")
    )
    batch = DPO.collate(data[:], packer)
    policy_logps, ref_logps = (each(batch)["logps"].sum(1) for each in models)

    theirs = [plain(folder_of(family, seed)) for seed in (0, 1)]
    for number, row in enumerate(rows):
        for place, side in enumerate(("chosen", "rejected")):
            messages = row["prompt"] + row[side]
            for (other, processor), ours in zip(theirs, (policy_logps, ref_logps)):
                turns = [len(messages) - 1]
                expected = answer_logps(other, processor, messages, row["images"], turns).sum()
                assert ours[place * len(rows) + number].item() == pytest.approx(
                    expected.item(), rel=1e-6
                )


def test_a_batch_without_images_reads_an_example_that_changes_nothing(
    folder_of, accelerator, monkeypatch
):
    """Where other processes wait for the tower; the gradients of its weights are exactly zero."""
    model, tokenizer = loaded(folder_of("llava"))
    monkeypatch.setattr(accelerator.state, "num_processes", 2)
    packer = checks.make_packer(accelerator, SharedArgs(), [model], tokenizer.processor)
    batch = packer.make_batch([[5, 6], [7]], [[8, 9], [5]])
    alone = Packer(CPU).make_batch([[5, 6], [7]], [[8, 9], [5]])
    assert batch["inputs"]["input_ids"].shape[0] == 3 and "pixel_values" in batch["inputs"]
    logps = model(batch)["logps"]
    torch.testing.assert_close(logps, model(alone)["logps"], rtol=0, atol=1e-5)
    logps.sum().backward()
    tower = model.model.model.vision_tower
    gradients = [p.grad for p in tower.parameters() if p.grad is not None]
    assert gradients and all((gradient == 0).all() for gradient in gradients)
    with_images = packer.make_batch([packer.example[0], [7]], [[8], [5]], images=[[picture(0)], []])
    assert with_images["inputs"]["input_ids"].shape[0] == 2


# ============================================================ what is tried before training
def test_models_that_read_images_in_another_way_are_refused(folder_of, accelerator, monkeypatch):
    """PaliGemma's kinds of tokens mean prompt and answer. Others' kinds decide positions or masks."""

    def make_packer(family):
        model, tokenizer = loaded(folder_of(family))
        checks.make_packer(accelerator, SharedArgs(), [model], tokenizer.processor)

    def expect_refused(family, *parts):
        refuses(folder_of(family), *parts, call=lambda: make_packer(family))

    expect_refused("paligemma")
    monkeypatch.setattr(images, "types_name", lambda processor: None)
    expect_refused("gemma3", "with images", "head's log-probs differ")
    if has_torchvision():
        expect_refused("qwen2_5_vl", "with images", "head's log-probs differ")
    monkeypatch.undo()
    pixels = images.pixels
    reversed_pixels = lambda processor, files: pixels(processor, files[::-1])
    monkeypatch.setattr(images, "pixels", reversed_pixels)
    expect_refused("llava", "with images", "head's log-probs differ")


def test_a_set_of_texts_is_read_as_by_a_model_of_texts(folder_of):
    """The whole model is loaded; its log-probs are those of what `AutoModelForCausalLM` loads."""
    folder = folder_of("gemma3")
    model, _ = loaded(folder)
    batch = Packer(CPU).make_batch([[5, 6], [7]], [[8, 9], [5, 9]])
    of_texts = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(model(batch)["logps"], LogProbModel(of_texts.eval())(batch)["logps"])


def test_a_tower_is_not_trained_beside_adapters(folder_of, accelerator):
    args = SharedArgs(model_name_or_path=folder_of("llava"), lora_r=2)
    args.train_vision = True
    tokenizer = load.load_tokenizer(args.model_name_or_path)
    refuses("--train_vision", "--lora_r", call=lambda: prepare.policy(accelerator, args, tokenizer))
