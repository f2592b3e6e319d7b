"""Images in rows: where one stands, the tokens that stand for it, the pixels that a model reads.

A message's text has `PLACE` where an image is, and under `spellings` what the model's processor
writes there, such as `<image><image><image>`. A row keeps the files as they are; pixels are made
for each batch. Both is done by the call of transformers' own processor.
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

MARK = "<image>"  # how other programs mark the place of an image in a string
ASKING = ("messages", "prompt")  # the columns that a conversation begins with


# ============================================================ the processor of a model
def processor_of(name: str, tokenizer) -> tuple[Any, str]:
    """Returns what makes pixels for a model that reads images, else None and why there is none."""
    try:
        processor = AutoProcessor.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # such as a missing torchvision
        return None, f"{one_line(error)}: pip install 'preference-recipes[images]'"
    if not hasattr(processor, "image_processor") or not getattr(processor, "image_token", None):
        return None, f"{name!r} has no processor of images, or one that names no token for them"
    processor.tokenizer = tokenizer  # it is saved with it
    processor.chat_template = tokenizer.chat_template
    return processor, ""


def opened(file: bytes):
    """Returns an image upright and in RGB, as transformers loads it."""
    from PIL import Image
    from transformers.image_utils import load_image

    return load_image(Image.open(io.BytesIO(file)))


def processed(processor, files: list[bytes], text: str = "", **settings) -> Any:
    text = text or processor.image_token * len(files)
    return processor(text=[text], images=[[opened(file) for file in files]], **settings)


def spellings(processor, files: list[bytes]) -> list[str]:
    """Returns what the processor writes for each image: its tokens, and those around them."""
    made = processed(processor, files, return_text_replacement_offsets=True)
    if not made.get("text_replacement_offsets"):
        raise BadRow(f"images: {type(processor).__name__} does not tell which tokens stand for one")
    return [offset["replacement"] for offset in made["text_replacement_offsets"][0]]


def pixels(processor, files: list[bytes]) -> dict:
    """Returns what a model reads of images besides their tokens, such as `pixel_values`."""
    made = processed(processor, files, return_tensors="pt")
    for_text = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
    return {name: value for name, value in made.items() if name not in for_text}


def inputs_of(processor, ids: np.ndarray, files: list[bytes], device) -> dict:
    """Returns the pixels of images, in the order of the rows, and which tokens stand for them."""
    inputs = pixels(processor, files)
    if name := types_name(processor):
        inputs[name] = torch.tensor(processor.create_mm_token_type_ids(ids))
    return {name: batches.send(tensor, device) for name, tensor in inputs.items()}


def types_name(processor) -> str | None:
    """Returns under which name a model is told which tokens are of images, if it is."""
    names = ("mm_token_type_ids", "token_type_ids")
    return next((name for name in names if name in processor.model_input_names), None)


def tokens_of(processor) -> list[int]:
    """Returns the ids of all that stand for images, videos and sound."""
    ids = processor.image_token_ids + processor.video_token_ids + processor.audio_token_ids
    return [token for token in ids if token is not None]


def places_of(processor, ids) -> np.ndarray:
    """Returns the places of the tokens that stand for images."""
    return np.flatnonzero(np.isin(ids, processor.image_token_ids))


def count_tokens(tokenizer, spelling: str) -> int:
    """Returns how many tokens stand for an image."""
    ids = tokenizer(spelling, add_special_tokens=False).input_ids
    return len(places_of(tokenizer.processor, ids))


# ============================================================ the images of a row
def find(row: dict, names: tuple[str, ...], converter) -> tuple[dict, list[bytes], list[str]]:
    """Returns a row whose messages hold the spellings of their images; their files, and spellings.

    A part has its image itself, or it is the next of the column `images` or `image`. If no part is
    an image, see `mark_places`. `names` are those of the columns with messages.
    """
    column = next(filter(row.get, IMAGE_COLUMNS), "images")
    given = as_list(row.get(column) or [])
    if not converter.has_images(row):
        return row, [], []
    as_turns = converter.settings.get("strings_as_messages", False)
    chats = {
        name: as_messages(row[name], "user" if name in ASKING else "assistant")
        for name in names
        if row.get(name) and (as_turns or not isinstance(row[name], str))
    }
    if not any(map(sources_of, chats.values())):
        for name in [name for name in ASKING if name in chats] or chats:  # or both of a pair
            mark_places(chats[name], len(given))
    loaded: dict[str, list[tuple[bytes, str]]] = {}
    for name, messages in chats.items():
        sources = sources_of(messages)
        if (n := sources.count(None)) not in (0, len(given)):
            raise BadRow(f"{name!r}: {n} parts want an image of {column!r}, which has {len(given)}")
        following = iter(given)
        found = [next(following) if source is None else source for source in sources]
        if sources:
            loaded[name] = [load(source, converter.folder) for source in found]
    if not loaded:
        raise BadRow("images next to strings: give messages, or --strings_as_messages")
    first, *others = loaded.values()
    if any(images != first for images in others):
        raise BadRow(f"{' and '.join(map(repr, loaded))} have different images")
    files, shown = map(list, zip(*first))
    spelled = spellings(converter.tokenizer.processor, files)
    for name in loaded:
        left = iter(spelled)
        for message in chats[name]:
            if "image_sources" in message:
                message["spellings"] = [next(left) for _ in message.pop("image_sources")]
    return {**row, **chats, column: shown}, files, spelled


def sources_of(messages: list[dict]) -> list:
    return [source for message in messages for source in message.get("image_sources", [])]


def mark_places(messages: list[dict], n_images: int) -> None:
    """Gives messages places of images: where texts have `MARK`, else before the first question."""
    n_marks = sum(message["content"].count(MARK) for message in messages)
    if n_marks not in (0, n_images):
        raise BadRow(f"images: {n_images}, and the texts have {n_marks} times {MARK!r}")
    if not n_marks:
        first = next((m for m in messages if m["role"] == "user"), messages[0])
        first["content"] = MARK * n_images + first["content"]
    for message in messages:
        if n := message["content"].count(MARK):
            if message["role"] == "assistant":
                raise BadRow(f"{MARK!r} in an answer: a model writes text alone")
            message["content"] = message["content"].replace(MARK, PLACE)
            message["image_sources"] = [None] * n


def load(source: Any, folder: Path) -> tuple[bytes, str]:
    """Returns the file of an image and its name: from any of its sources."""
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


def columns_of(values: dict, files: list[bytes], spelled: list[str], tokenizer) -> dict:
    """Returns the columns of a row for its images; raises `LeftOut` if one of them was cut.

    `images` are the files, and each of several sequences reads its first `images_of_sequence`.
    """
    ends = np.cumsum([0, *(count_tokens(tokenizer, text) for text in spelled)]).tolist()
    if "sequence_lengths" not in values:
        if len(places_of(tokenizer.processor, values["prompt_ids"])) != ends[-1]:
            raise BadRow("images: all must be in the prompt, before the first answer")
        return {"images": files}
    sequences = np.split(values["input_ids"], np.cumsum(values["sequence_lengths"])[:-1])
    counts = [len(places_of(tokenizer.processor, ids)) for ids in sequences]
    if not set(counts) <= set(ends):
        raise LeftOut("an image does not fit within max_length")
    # What stands for an image is never drawn, so it is no target, not even with --loss_on all.
    loss_mask = np.array(values["loss_mask"])
    loss_mask[places_of(tokenizer.processor, values["input_ids"])] = False
    return {
        "images": files,
        "images_of_sequence": list(map(ends.index, counts)),
        "loss_mask": loss_mask.tolist(),
        "n_targets": int(loss_mask.sum()),
    }


# ============================================================ images in texts
def spell_out(processor, text: str, messages: list[dict]) -> str:
    """Returns a rendered text with the spelling of each image in place of its token."""
    spelled = [spelling for message in messages for spelling in message.get("spellings", [])]
    token = processor.image_token
    others = {*processor.all_special_multimodal_tokens} - {token}  # such as those of videos
    if text.count(token) != len(spelled) or any(other in text for other in others):
        written = f"{text.count(token)} {token!r} for {len(spelled)} images"
        why = "a text spells that token or one of videos, or there is no place for images"
        raise BadRow(f"the chat template writes {written}: {why}")
    left = iter(spelled)
    return re.sub(re.escape(token), lambda _: next(left), text)
