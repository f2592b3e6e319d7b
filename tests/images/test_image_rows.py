"""Images in rows: where they are found, which tokens stand for them, what is refused by the row's number."""

import base64
import io
import json

import datasets
import numpy as np
import pytest
from PIL import Image

from common.shared_args import SharedArgs
from preference_recipes.data import dataset, images, unread
from preference_recipes.data.dataset import Converter, load_data
from preference_recipes.data.formats import labelled_row, preference_row
from preference_recipes.data.messages import BadRow
from preference_recipes.data.prompts import prompt_row
from preference_recipes.models import load
from preference_recipes.tools import preview, rows
from recipes import load as load_recipe
from runs import refuses, say, write_jsonl
from test_image_models import read
from vlms import IMAGE, picture, save_vlm, some_rows, turn

sft_row = load_recipe("sft").sft_row
ONE, TWO = picture(0), picture(1)
ASKED = [turn("user", IMAGE, "How many?")]
ANSWER = [turn("assistant", "Three.")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save_vlm("llava", tmp_path_factory.mktemp("llava"))
    (folder / "one.png").write_bytes(ONE)
    return folder


@pytest.fixture(scope="module")
def vlm(folder):
    """A tokenizer with a processor; a square image of 32 pixels is 16 tokens of it."""
    return load.load_tokenizer(str(folder))


def converter(tokenizer, function=sft_row, refusal="", folder=".", **settings) -> Converter:
    of_function = dict(loss_on="assistant") if function is sft_row else {}
    settings = dict(max_length=500) | of_function | settings
    return Converter(function, tokenizer, {}, settings, refusal, folder)


def convert(row: dict, *of_converter, **settings) -> dict:
    return converter(*of_converter, **settings).convert_row(row, 6)


def refused(*parts: str, row: dict, tokenizer, **settings) -> None:
    with pytest.raises(BadRow) as error:
        convert(row, tokenizer, **settings)
    assert all(part in str(error.value) for part in ("row 7", *parts)), error.value


# ============================================================ where an image is
DATA_URI = "data:image/png;base64," + base64.b64encode(ONE).decode()
WITH_COLUMN = {"messages": ASKED + ANSWER}


def in_part(**image) -> dict:
    return {"messages": [turn("user", {"type": "image", **image}, "How many?"), *ANSWER]}


@pytest.mark.parametrize(
    "row",
    [
        {**WITH_COLUMN, "images": [ONE]},
        {**WITH_COLUMN, "image": ONE},
        {**WITH_COLUMN, "image": "one.png"},
        {**WITH_COLUMN, "images": [{"bytes": ONE, "path": None}]},
        in_part(image=images.opened(ONE)),
        in_part(path="one.png"),
        in_part(image={"bytes": None, "path": "one.png"}),
        in_part(image=DATA_URI, text=None),
        in_part(type="image_url", image_url={"url": DATA_URI}),
        in_part(type="input_image", image_url=DATA_URI),
        in_part(base64=DATA_URI.partition(",")[2]),
        {"messages": say("user", "How many?") + say("assistant", "Three."), "images": [ONE]},
        {"messages": say("user", "<image>How many?") + say("assistant", "Three."), "images": [ONE]},
        {"prompt": say("user", "How many?"), "completion": "Three.", "images": [ONE]},
        {"prompt": "How many?", "completion": "Three.", "image": ONE},
        {"instruction": "How many?", "output": "Three.", "image": ONE},
        {
            "conversations": [
                {"from": "human", "value": "<image>How many?"},
                {"from": "gpt", "value": "Three."},
            ],
            "image": "one.png",
        },
    ],
)
def test_an_image_is_in_its_part_or_in_a_column(vlm, folder, row):
    values = convert(row, vlm, folder=folder, strings_as_messages=True)
    spelled = "<image>" * 16
    text = (
        f"<|im_start|>user\n{spelled}How many?<|im_end|>\n<|im_start|>assistant\nThree.<|im_end|>"
    )
    assert vlm.decode(values["input_ids"]) == text
    assert images.opened(values["images"][0]).tobytes() == images.opened(ONE).tobytes()
    assert values["images_of_sequence"] == [1]


def test_images_stand_where_their_parts_are_in_any_turn_and_role(vlm):
    """Also in a tool's result. The ids are those of the processor, which expands its own text."""
    rows = [row["messages"] for row in some_rows()]
    rows.append([*ASKED, turn("assistant", "I look."), turn("tool", IMAGE, "seen"), *ANSWER])
    for messages in rows:
        n = sum(part == IMAGE for each in messages for part in each["content"])
        files = [picture(number) for number in range(n)]
        values = convert({"messages": messages, "images": files}, vlm)
        expected = read(vlm.processor, messages, files)["input_ids"][0].tolist()
        # What follows the last answer's end is not learned, and not there.
        assert values["input_ids"] == expected[: len(values["input_ids"])]
        assert values["images"] == files


def test_what_is_next_to_an_image_is_tokenised_with_it(tmp_path):
    """Gemma 3 writes newlines before an image, which merge with those of the text before it."""
    tokenizer = load.load_tokenizer(str(save_vlm("gemma3", tmp_path)))
    row = {"messages": [turn("user", "Look:\n", IMAGE), *ANSWER], "images": [ONE]}
    ids = convert(row, tokenizer)["input_ids"]
    made = read(tokenizer.processor, row["messages"], [ONE])["input_ids"][0].tolist()
    assert ids == made[: len(ids)]
    apart = [tokenizer(text, add_special_tokens=False).input_ids for text in ("Look:\n", "\n\n")]
    assert str(apart[0] + apart[1])[1:-1] not in str(ids)


def test_a_template_that_writes_no_strings_gets_parts(tmp_path):
    tokenizer = load.load_tokenizer(str(save_vlm("idefics3", tmp_path)))
    values = convert({"messages": say("user", "Why?") + say("assistant", "So.")}, tokenizer)
    assert tokenizer.decode(values["input_ids"]) == "User:Why?<|im_end|>\nAssistant:So.<|im_end|>"


def test_a_photo_is_turned_upright(tmp_path):
    """As transformers and `datasets` do by its EXIF orientation."""
    photo = images.opened(picture(0, 40, 20))
    exif = photo.getexif()
    exif[0x0112] = 6  # a camera that was held upright
    photo.save(tmp_path / "photo.png", exif=exif)
    assert images.opened((tmp_path / "photo.png").read_bytes()).size == (20, 40)


# ============================================================ rows of pairs, labels and prompts
def test_both_answers_of_a_pair_have_the_images_of_their_prompt(vlm):
    other = [turn("assistant", "Four.")]
    pair = {"prompt": ASKED, "chosen": ANSWER, "rejected": other, "images": [ONE]}
    inside = {"chosen": ASKED + ANSWER, "rejected": ASKED + other, "images": [ONE]}
    before = {
        "chosen": say("user", "How many?") + ANSWER,
        "rejected": say("user", "How many?") + other,
    }
    expected = convert(pair, vlm, function=preference_row)
    assert len(images.image_positions(vlm.processor, expected["prompt_ids"])) == 16
    assert convert(inside, vlm, function=preference_row) == expected
    assert convert({**before, "image": ONE}, vlm, function=preference_row) == expected
    labelled = convert({**WITH_COLUMN, "label": True, "images": [ONE]}, vlm, function=labelled_row)
    assert labelled["prompt_ids"] == expected["prompt_ids"] and labelled["images"] == [ONE]
    theirs = {"chosen": in_part(image=ONE)["messages"], "rejected": in_part(image=TWO)["messages"]}
    of_pairs = dict(tokenizer=vlm, function=preference_row)
    refused("'chosen' and 'rejected' have different images", row=theirs, **of_pairs)
    late = {**pair, "chosen": [*ANSWER, *ASKED, *ANSWER], "prompt": say("user", "Look.")}
    refused("in the prompt", row=late, **of_pairs)


def test_a_prompt_names_its_images(vlm, folder):
    row = {"prompt": ASKED, "images": ["one.png", TWO], "answer": "3"}
    row["prompt"] = [turn("user", IMAGE, "or", IMAGE)]
    values = convert(row, vlm, function=prompt_row, folder=folder, max_new_tokens=4)
    columns = json.loads(values["row_json"])
    assert columns["images"] == ["one.png", f"{len(TWO)} bytes"]
    assert columns["prompt"][0]["content"] == "\ufffcor\ufffc"
    assert values["images"] == [ONE, TWO]


# ============================================================ what is cut, refused, and said
@pytest.mark.parametrize(
    ("max_length", "outcome"),
    [
        (30, "nothing to learn within max_length"),
        (50, [1]),
        (60, "an image does not fit within max_length"),
        (80, [2]),
    ],
)
def test_no_image_is_cut(vlm, max_length, outcome):
    """A row whose second image is cut is left out; one that ends before it keeps its first answer."""
    row = {"messages": some_rows()[3]["messages"], "images": [ONE, TWO]}
    values = convert(row, vlm, max_length=max_length)
    assert (values["reason"] or values["images_of_sequence"]) == outcome


def test_what_stands_for_an_image_is_never_learned(vlm):
    """Also where all messages are: a model never draws it."""
    row = {"messages": some_rows()[3]["messages"], "images": [ONE, TWO]}
    values = convert(row, vlm, loss_on="all")
    ids, learned = np.array(values["input_ids"]), np.array(values["loss_mask"])
    is_image = ids == vlm.processor.image_token_id
    assert is_image.sum() == 32 and not learned[is_image].any()
    assert learned[~is_image][1:].all() and values["n_targets"] == learned.sum()


def test_what_is_no_image_is_refused_by_its_row(vlm, folder):
    broken = in_part(image=ONE[:60])
    cases = {
        ("nothing is fetched", "https://a.b/c.png"): in_part(url="https://a.b/c.png"),
        ("No such file", "two.png"): in_part(path="two.png"),
        ("OSError",): broken,
        ("UnidentifiedImageError",): in_part(image=b"no image"),
        ("found 7",): in_part(image=7),
        ("2 parts want an image of 'images', which has 1",): {
            "messages": [turn("user", IMAGE, IMAGE), *ANSWER],
            "images": [ONE],
        },
        ("for 1 images", "spells that token or one of videos"): {
            "messages": [turn("user", IMAGE, "<image>"), *ANSWER],
            "images": [ONE],
        },
        ("for 0 images", "spells that token"): {"messages": say("user", "<image>") + ANSWER},
        ("found {'type': 'image'",): {
            "messages": [*ASKED, turn("assistant", IMAGE)],
            "images": [ONE],
        },
        ("images: 1, and the texts have 2 times '<image>'",): {
            "messages": say("user", "<image><image>") + ANSWER,
            "images": [ONE],
        },
        ("'<image>' in an answer",): {
            "messages": say("user", "How many?") + say("assistant", "<image>"),
            "images": [ONE],
        },
        ("next to strings",): {"prompt": "How many?", "completion": "Three.", "images": [ONE]},
    }
    for parts, row in cases.items():
        refused(*parts, row=row, tokenizer=vlm, folder=folder)


def test_images_are_refused_where_nothing_reads_them(vlm, tokenizer):
    row = {**WITH_COLUMN, "images": [ONE]}
    refused(
        "this recipe, or --vllm_url, reads no images",
        row=row,
        tokenizer=vlm,
        refusal=dataset.NO_IMAGES,
    )
    processor, refusal = images.processor_of(tokenizer.name_or_path, tokenizer)
    assert processor is None
    refused("has no processor of images", row=row, tokenizer=tokenizer, refusal=refusal)


def test_nothing_of_an_image_counts_as_unread(vlm):
    rows = [
        {"messages": ASKED + ANSWER, "images": [{"bytes": ONE, "path": "a.png"}], "id": 3},
        {
            "messages": in_part(image={"bytes": TWO, "path": "b.png"})["messages"],
            "images": None,
            "id": 4,
        },
    ]
    assert unread.describe(iter(rows), converter(vlm)) == 'not read: "id"'


# ============================================================ sets
def as_jpeg(file: bytes) -> bytes:
    """Of the colours of a printer, which no PNG has."""
    jpeg = io.BytesIO()
    Image.open(io.BytesIO(file)).convert("CMYK").save(jpeg, "JPEG")
    return jpeg.getvalue()


def test_files_of_a_set_are_kept_as_they_are(vlm, accelerator, tmp_path, monkeypatch, capsys):
    """Of parquet and of JSON, whose paths are relative to it; rows without images are among them."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "one.png").write_bytes(ONE)
    jsonl = write_jsonl(
        tmp_path / "data" / "rows.jsonl",
        [
            {**WITH_COLUMN, "image": "one.png"},
            {"messages": say("user", "Hm?") + say("assistant", "Hm.")},
        ],
    )
    part = {"type": datasets.Value("string"), "text": datasets.Value("string")}
    features = datasets.Features(
        messages=datasets.List({"role": datasets.Value("string"), "content": datasets.List(part)}),
        images=datasets.List(datasets.Image()),
    )
    photos = [list(map(as_jpeg, row["images"])) for row in some_rows()]
    with_photos = [
        {"messages": row["messages"], "images": [{"bytes": file} for file in images]}
        for row, images in zip(some_rows(), photos)
    ]
    datasets.Dataset.from_list(with_photos, features=features).to_parquet(tmp_path / "rows.parquet")
    text = write_jsonl(
        tmp_path / "text.jsonl", [{"messages": say("user", "Hm?") + say("assistant", "Hm.")}]
    )
    args = SharedArgs(eval_dataset_name=[str(text)], max_length=500)
    args.dataset_name = [str(jsonl), str(tmp_path / "rows.parquet"), str(text)]
    load_sets = lambda **how: load_data(
        accelerator, args, vlm, function=sft_row, loss_on="assistant", **how
    )
    data = load_sets(reads_images=True)
    files = [row["images"] for row in data.train]
    assert files == [[ONE], [], *photos, None]
    assert data.processor is vlm.processor
    assert "images" not in data.eval_sets["eval/"].column_names
    assert "CLIPImageProcessor" in data.fingerprints["images"]
    assert "not read" not in capsys.readouterr().out
    refuses("row 1: images: this recipe", call=load_sets)
    args.dataset_name = [str(text)]
    data = load_sets(reads_images=True)
    assert data.processor is None and "images" not in data.fingerprints
    args.train_vision = True
    refuses(
        "--train_vision: no row of these sets has an image",
        call=lambda: load_sets(reads_images=True),
    )


def test_rows_writes_images_as_data_again(vlm):
    row = {"messages": ASKED + ANSWER, "images": [{"bytes": ONE, "path": None}]}
    written = json.loads(rows.as_text(row))
    assert convert(written, vlm)["images"] == convert(row, vlm)["images"] == [ONE]


def test_the_preview_shows_images(vlm):
    row = {"messages": [turn("user", IMAGE, "How many?"), *ANSWER], "images": [ONE]}
    make = converter(vlm)
    lines = "\n".join(preview.describe_row(row, make.convert_row(row, 0), make))
    assert "image 1  50 x 30 pixels, 16 tokens, from token 4 on" in lines
    assert f"<{len(ONE)} bytes>" in lines
