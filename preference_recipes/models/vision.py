"""Tries before training, on random images, whether a model reads images as we lay them out."""

import io

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from torch import nn

from common import one_line, refuse
from preference_recipes.data import images as pictures
from preference_recipes.data import rendering
from preference_recipes.models.packing import Packer


def random_image(width: int, height: int) -> bytes:
    """Returns the file of a noise image, which no processor takes for padding; always the same."""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def example(processor) -> tuple[list[int], bytes]:
    """Returns the tokens and the file of a small image, see `Packer`."""
    file = random_image(32, 32)
    [spelling] = pictures.spellings(processor, [file])
    return rendering.encode(processor.tokenizer, spelling), file


@torch.no_grad()
def trial(
    accelerator: Accelerator, model: nn.Module, processor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns our log-probs after images, and the model's own for inputs from its processor.

    All processes must call it. The rows have different lengths, with two images and with one.
    """
    packer = Packer(accelerator.device, processor=processor)
    files = [random_image(50, 30), random_image(32, 64)]
    images = [files, files[1:]]
    ids, own_logps = [], []
    try:
        for row_files in images:
            text = "?".join([processor.image_token] * len(row_files)) + " What is it?"
            settings = dict(add_special_tokens=False, return_tensors="pt")
            inputs = pictures.processed(processor, row_files, text, **settings)
            ids.append(inputs["input_ids"][0].tolist())
            spellings = pictures.spellings(processor, row_files)
            spelled = pictures.spell_out(processor, text, [{"spellings": spellings}])
            if rendering.encode(processor.tokenizer, spelled) != ids[-1]:
                raise ValueError("its processor writes other tokens")
            batch = packer.make_batch([ids[-1][:-3]], [ids[-1][-3:]], images=[row_files])
            del inputs["attention_mask"]  # nothing is padded
            batch["inputs"] = inputs.to(accelerator.device)
            own_logps.append(model(batch, check=True)["own_logps"])
        ends = [row[-3:] for row in ids]
        batch = packer.make_batch([row[:-3] for row in ids], ends, images=images)
        return model(batch)["logps"], torch.cat(own_logps)
    except Exception as error:  # any that a processor or a model raises
        problem = f"{processor.tokenizer.name_or_path}: its way to read images is not supported"
        refuse(f"{problem}: {one_line(error)}")
