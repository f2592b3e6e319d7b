"""Images in rows: their positions in texts, the tokens that stand for them, and their pixels.

A message's text has `PLACE` where an image is, and under `spellings` the text that the model's
processor writes there, such as `<image><image><image>`. A row keeps the image files; pixels are
made for each batch. transformers' own processor makes both.
"""

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoProcessor

from common import batches, one_line
from preference_recipes.data.messages import (
    IMAGE_COLUMNS,
    PLACE,
    BadRow,
    LeftOut,
    as_list,
    as_messages,
)

MARK = "<image>"  # other programs' mark for an image in a string
ASKING = ("messages", "prompt")  # the columns that begin a conversation


# ============================================================ the processor of a model
def processor_of(name: str, tokenizer) -> tuple[Any, str]:
    """Returns the processor of a model that reads images, or None and why there is none."""
    try:
        processor = AutoProcessor.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # such as a missing torchvision
        return None, f"{one_line(error)}: pip install 'preference-recipes[images]'"
    if not hasattr(processor, "image_processor") or not getattr(processor, "image_token", None):
        return None, f"{name!r} has no processor of images, or one that names no token for them"
    processor.tokenizer = tokenizer  # they are saved together
    processor.chat_template = tokenizer.chat_template
    return processor, ""


def opened(file: bytes):
    """Returns an image upright and in RGB, as transformers loads images."""
    from PIL import Image
    from transformers.image_utils import load_image

    return load_image(Image.open(io.BytesIO(file)))


def processed(processor, files: list[bytes], text: str = "", **settings) -> Any:
    text = text or processor.image_token * len(files)
    return processor(text=[text], images=[[opened(file) for file in files]], **settings)


def spellings(processor, files: list[bytes]) -> list[str]:
    """Returns the text that the processor writes for each image, with the tokens around it."""
    outputs = processed(processor, files, return_text_replacement_offsets=True)
    if not outputs.get("text_replacement_offsets"):
        raise BadRow(f"images: {type(processor).__name__} does not tell which tokens stand for one")
    return [offset["replacement"] for offset in outputs["text_replacement_offsets"][0]]


def pixels(processor, files: list[bytes]) -> dict:
    """Returns a model's inputs for images besides their tokens, such as `pixel_values`."""
    outputs = processed(processor, files, return_tensors="pt")
    text_inputs = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
    return {name: value for name, value in outputs.items() if name not in text_inputs}


def inputs_of(processor, ids: np.ndarray, files: list[bytes], device) -> dict:
    """Returns a model's inputs for images, in the order of the rows, maybe with types of tokens."""
    inputs = pixels(processor, files)
    if name := types_name(processor):
        inputs[name] = torch.tensor(processor.create_mm_token_type_ids(ids))
    return {name: batches.to_device(tensor, device) for name, tensor in inputs.items()}


def types_name(processor) -> str | None:
    """Returns the name of the input that marks the tokens of images, if a model has one."""
    names = ("mm_token_type_ids", "token_type_ids")
    return next((name for name in names if name in processor.model_input_names), None)


def tokens_of(processor) -> list[int]:
    """Returns the ids of the tokens that stand for images, videos and sound."""
    ids = processor.image_token_ids + processor.video_token_ids + processor.audio_token_ids
    return [token for token in ids if token is not None]


def image_positions(processor, ids) -> np.ndarray:
    """Returns the positions of the tokens that stand for images."""
    return np.flatnonzero(np.isin(ids, processor.image_token_ids))


def count_tokens(tokenizer, spelling: str) -> int:
    """Returns how many tokens stand for an image."""
    ids = tokenizer(spelling, add_special_tokens=False).input_ids
    return len(image_positions(tokenizer.processor, ids))


# ============================================================ the images of a row
def find(row: dict, names: tuple[str, ...], converter) -> tuple[dict, list[bytes], list[str]]:
    """Returns a row with the spellings of images in its messages; their files, and spellings.

    A part contains its image, or stands for the next one of the column `images` or `image`. If no
    part is an image, see `mark_places`. `names` are the columns with messages.
    """
    column = next(filter(row.get, IMAGE_COLUMNS), "images")
    items = as_list(row.get(column) or [])
    if not converter.has_images(row):
        return row, [], []
    as_turns = converter.settings.get("strings_as_messages", False)
    chats = {
        name: as_messages(row[name], "user" if name in ASKING else "assistant")
        for name in names
        if row.get(name) and (as_turns or not isinstance(row[name], str))
    }
    if not any(map(sources_of, chats.values())):
        for name in [name for name in ASKING if name in chats] or chats:  # or both answers
            mark_places(chats[name], len(items))
    images_by_column: dict[str, list[tuple[bytes, str]]] = {}
    for name, messages in chats.items():
        sources = sources_of(messages)
        if (n := sources.count(None)) not in (0, len(items)):
            raise BadRow(f"{name!r}: {n} parts want an image of {column!r}, which has {len(items)}")
        next_images = iter(items)
        all_sources = [next(next_images) if source is None else source for source in sources]
        if sources:
            images_by_column[name] = [load(source, converter.folder) for source in all_sources]
    if not images_by_column:
        raise BadRow("images next to strings: give messages, or --strings_as_messages")
    first, *other_images = images_by_column.values()
    if any(images != first for images in other_images):
        raise BadRow(f"{' and '.join(map(repr, images_by_column))} have different images")
    files, image_names = map(list, zip(*first))
    image_spellings = spellings(converter.tokenizer.processor, files)
    for name in images_by_column:
        next_spellings = iter(image_spellings)
        for message in chats[name]:
            if "image_sources" in message:
                message["spellings"] = [next(next_spellings) for _ in message.pop("image_sources")]
    return {**row, **chats, column: image_names}, files, image_spellings


def sources_of(messages: list[dict]) -> list:
    return [source for message in messages for source in message.get("image_sources", [])]


def mark_places(messages: list[dict], n_images: int) -> None:
    """Marks the positions of images: where texts have `MARK`, else before the first question."""
    n_marks = sum(message["content"].count(MARK) for message in messages)
    if n_marks not in (0, n_images):
        raise BadRow(f"images: {n_images}, and the texts have {n_marks} times {MARK!r}")
    if not n_marks:
        first = next((m for m in messages if m["role"] == "user"), messages[0])
        first["content"] = MARK * n_images + first["content"]
    for message in messages:
        if count := message["content"].count(MARK):
            if message["role"] == "assistant":
                raise BadRow(f"{MARK!r} in an answer: a model writes text alone")
            message["content"] = message["content"].replace(MARK, PLACE)
            message["image_sources"] = [None] * count


def load(source: Any, folder: Path) -> tuple[bytes, str]:
    """Returns the file of an image and its name, from any kind of source."""
    name = ""
    if isinstance(source, dict):
        name = source.get("path") or ""
        source = source.get("bytes") or source.get("url") or name
    if isinstance(source, str) and source.startswith("data:"):
        name, _, text = source.partition(",")
        source = base64.b64decode(text)
    if isinstance(source, str) and re.match(r"\w+://", source):
        raise BadRow(f"image {source!r:.80}: nothing is fetched: download it, and give its path")
    if isinstance(source, str):
        return Path(folder, source).read_bytes(), source
    if hasattr(source, "save"):
        buffer = io.BytesIO()
        source.save(buffer, "PNG")
        source = buffer.getvalue()
    if not isinstance(source, bytes):
        raise BadRow(f"expected an image: a path, bytes or a data URI, found {source!r:.80}")
    return source, name or f"{len(source)} bytes"


def columns_of(values: dict, files: list[bytes], image_spellings: list[str], tokenizer) -> dict:
    """Returns the columns of a row for its images; raises `LeftOut` if one of them was cut.

    `images` are the files. Each of several sequences reads the first `images_of_sequence` of them.
    """
    ends = np.cumsum([0, *(count_tokens(tokenizer, text) for text in image_spellings)]).tolist()
    if "sequence_lengths" not in values:
        if len(image_positions(tokenizer.processor, values["prompt_ids"])) != ends[-1]:
            raise BadRow("images: all must be in the prompt, before the first answer")
        return {"images": files}
    sequences = np.split(values["input_ids"], np.cumsum(values["sequence_lengths"])[:-1])
    counts = [len(image_positions(tokenizer.processor, ids)) for ids in sequences]
    if not set(counts) <= set(ends):
        raise LeftOut("an image does not fit within max_length")
    # Tokens of images are never drawn, so they are no targets, not even with --loss_on all.
    loss_mask = np.array(values["loss_mask"])
    loss_mask[image_positions(tokenizer.processor, values["input_ids"])] = False
    return {
        "images": files,
        "images_of_sequence": list(map(ends.index, counts)),
        "loss_mask": loss_mask.tolist(),
        "n_targets": int(loss_mask.sum()),
    }


# ============================================================ images in texts
def spell_out(processor, text: str, messages: list[dict]) -> str:
    """Returns a rendered text in which each image's token is replaced by its spelling."""
    spelled = [spelling for message in messages for spelling in message.get("spellings", [])]
    token = processor.image_token
    other_tokens = {*processor.all_special_multimodal_tokens} - {token}  # such as those of videos
    if text.count(token) != len(spelled) or any(other in text for other in other_tokens):
        mismatch = f"{text.count(token)} {token!r} for {len(spelled)} images"
        reason = "a text spells that token or one of videos, or there is no place for images"
        raise BadRow(f"the chat template writes {mismatch}: {reason}")
    next_spellings = iter(spelled)
    return re.sub(re.escape(token), lambda _: next(next_spellings), text)
