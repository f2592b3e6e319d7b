"""Whether a model reads images as we lay them out, tried before training on random ones."""

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
    """Returns the file of an image that no processor takes for padding, always the same one."""
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
    """Returns our log-probs after images, and the model's own, of inputs that the processor makes.

    All processes must call it. The rows are of different lengths, and have two images and one.
    """
    packer = Packer(accelerator.device, processor=processor)
    files = [random_image(50, 30), random_image(32, 64)]
    images = [files, files[1:]]
    ids, own_logps = [], []
    try:
        for some in images:
            text = "?".join([processor.image_token] * len(some)) + " What is it?"
            settings = dict(add_special_tokens=False, return_tensors="pt")
            made = pictures.processed(processor, some, text, **settings)
            ids.append(made["input_ids"][0].tolist())
            spellings = pictures.spellings(processor, some)
            spelled = pictures.spell_out(processor, text, [{"spellings": spellings}])
            if rendering.encode(processor.tokenizer, spelled) != ids[-1]:
                raise ValueError("its processor writes other tokens")
            batch = packer.make_batch([ids[-1][:-3]], [ids[-1][-3:]], images=[some])
            del made["attention_mask"]  # nothing is padded
            batch["inputs"] = made.to(accelerator.device)
            own_logps.append(model(batch, check=True)["own_logps"])
        ends = [row[-3:] for row in ids]
        batch = packer.make_batch([row[:-3] for row in ids], ends, images=images)
        return model(batch)["logps"], torch.cat(own_logps)
    except Exception as error:  # whatever a processor or a model raises
        which = f"{processor.tokenizer.name_or_path}: its way to read images is not supported"
        refuse(f"{which}: {one_line(error)}")
