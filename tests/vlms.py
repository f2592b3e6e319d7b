"""Tiny random models that read images, of many families, with their processors, made offline."""

import functools
import io
import itertools

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers import models as families

from templates import byte_level_bpe

TEXT = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
TEXT |= dict(num_key_value_heads=2, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1)
TOWER = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
TOWER |= dict(patch_size=8, image_size=32)
ROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2])

# Contents as strings or as parts, of which some are images.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Idefics', it writes no strings.
OF_PARTS = (
    "{% for m in messages %}{{ m['role'].capitalize() }}:{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}<image>{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def tokenizer_with(*special: str, **named: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer; it merges newlines, so that what is next to an image decides its tokens."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(["user\n\n\nHow many\n\n red dots?\n\n"] * 20, 290),
        eos_token="<|im_end|>",
        pad_token="<pad>",
        bos_token="<bos>",
        extra_special_tokens=named or None,
    )
    tokens = ["<|im_start|>", *special, *named.values()]
    fast.add_special_tokens({"additional_special_tokens": list(dict.fromkeys(tokens))})
    return fast


def text_config(tokenizer, **changes) -> dict:
    return TEXT | dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id) | changes


def image_processor(module, name: str, **settings):
    """The one of torchvision if that is there, as `AutoProcessor` chooses."""
    suffix = "" if transformers.utils.is_torchvision_available() else "Pil"
    return getattr(module, f"{name}ImageProcessor{suffix}")(**settings)


def qwen(kind: str):
    tokenizer = tokenizer_with(
        "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
    )
    ids = tokenizer.convert_tokens_to_ids
    tokens = dict(image_token_id=ids("<|image_pad|>"), video_token_id=ids("<|video_pad|>"))
    tokens |= dict(vision_start_token_id=ids("<|vision_start|>"))
    tokens |= dict(vision_end_token_id=ids("<|vision_end|>"), tie_word_embeddings=False)
    tower = dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=4, out_hidden_size=32)
    tower |= dict(patch_size=8, spatial_merge_size=2, temporal_patch_size=2)
    rope = dict(ROPE)
    processors = "Qwen3VL"
    layers = {}
    if kind == "Qwen2_5_VL":
        tower |= dict(window_size=32, fullatt_block_indexes=[1])
        processors = kind
    else:
        rope["mrope_interleaved"] = True
        tower |= dict(num_position_embeddings=64)
    if kind == "Qwen3VL":
        tower |= dict(deepstack_visual_indexes=[0])
    if kind == "Qwen3_5":
        rope["partial_rotary_factor"] = 1.0
        layers = dict(layer_types=["linear_attention", "full_attention"])
        layers |= dict(linear_key_head_dim=8, linear_value_head_dim=8)
        layers |= dict(linear_num_key_heads=2, linear_num_value_heads=4)
    text = text_config(tokenizer, rope_parameters=rope, head_dim=8, **layers)
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=tower, **tokens)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    pixels = image_processor(
        families.qwen2_vl,
        "Qwen2VL",
        patch_size=8,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 256, "longest_edge": 4096},
    )
    video = transformers.Qwen2VLVideoProcessor()
    processor = getattr(transformers, f"{processors}Processor")(pixels, tokenizer, video)
    return model, processor, CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")


def gemma3():
    named = dict(boi_token="<start_of_image>", eoi_token="<end_of_image>")
    tokenizer = tokenizer_with(image_token="<image_soft_token>", **named)
    ids = tokenizer.convert_tokens_to_ids
    layers = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=1024)
    config = transformers.Gemma3Config(
        text_config=text_config(tokenizer, head_dim=8, query_pre_attn_scalar=8, **layers),
        vision_config=TOWER,
        mm_tokens_per_image=4,
        image_token_index=ids("<image_soft_token>"),
        boi_token_index=ids("<start_of_image>"),
        eoi_token_index=ids("<end_of_image>"),
    )
    pixels = image_processor(families.gemma3, "Gemma3", size={"height": 32, "width": 32})
    processor = transformers.Gemma3Processor(pixels, tokenizer, image_seq_length=4)
    model = transformers.Gemma3ForConditionalGeneration(config)
    return model, processor, CHATML.replace("IMAGE", "<start_of_image>")


def gemma4():
    named = dict(boi_token="<|image>", eoi_token="<image|>", audio_token="<|audio|>")
    named |= dict(boa_token="<|audio>", eoa_token="<audio|>")
    tokenizer = tokenizer_with("<|video|>", image_token="<|image|>", **named)
    ids = tokenizer.convert_tokens_to_ids
    text = text_config(
        tokenizer,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=1024,
        head_dim=8,
        global_head_dim=8,
        vocab_size_per_layer_input=len(tokenizer),
        hidden_size_per_layer_input=8,
        use_bidirectional_attention="vision",
    )
    tower = dict(TOWER, num_key_value_heads=4, head_dim=8, patch_size=8, pooling_kernel_size=2)
    tower |= dict(position_embedding_size=64)
    config = transformers.Gemma4Config(
        text_config=text,
        vision_config=tower,
        image_token_id=ids("<|image|>"),
        video_token_id=ids("<|video|>"),
        boi_token_id=ids("<|image>"),
        eoi_token_id=ids("<image|>"),
    )
    sizes = dict(patch_size=8, pooling_kernel_size=2, max_soft_tokens=70)
    pixels = image_processor(families.gemma4, "Gemma4", **sizes)
    video = transformers.Gemma4VideoProcessor(**sizes)
    sound = transformers.Gemma4AudioFeatureExtractor()
    processor = transformers.Gemma4Processor(sound, pixels, tokenizer, video)
    model = transformers.Gemma4ForConditionalGeneration(config)
    return model, processor, CHATML.replace("IMAGE", "<|image|>")


def idefics(kind: str):
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    around = dict(fake_image_token="<fake_token_around_image>", global_image_token="<global-img>")
    around |= dict(end_of_utterance_token="<|im_end|>")
    tokenizer = tokenizer_with(*tiles, image_token="<image>", **around)
    name, module = (
        ("Idefics3", families.idefics3) if kind == "idefics3" else ("SmolVLM", families.smolvlm)
    )
    text = text_config(tokenizer, model_type="llama")
    image = tokenizer.convert_tokens_to_ids("<image>")
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=TOWER, scale_factor=2, image_token_id=image, pad_token_id=0
    )
    edges = dict(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    parts = [image_processor(module, name, **edges), tokenizer]
    parts += [transformers.SmolVLMVideoProcessor(**edges)] if kind == "smolvlm" else []
    processor = getattr(transformers, f"{name}Processor")(*parts, image_seq_len=4)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config), processor, OF_PARTS


def llava(kind: str):
    tokenizer = tokenizer_with(image_token="<image>")
    text = text_config(tokenizer, model_type="llama")
    sizes = dict(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    name, module, changes = "Llava", families.clip, {}
    pixels = "CLIP"
    if kind == "llava_next":
        changes = dict(image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]])
        name, module, pixels = "LlavaNext", families.llava_next, "LlavaNext"
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config=TOWER | dict(model_type="clip_vision_model"),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        **changes,
    )
    processor = getattr(transformers, f"{name}Processor")(
        image_processor(module, pixels, **sizes, **changes),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return model, processor, CHATML.replace("IMAGE", "<image>")


def internvl():
    named = dict(start_image_token="<img>", end_image_token="</img>", video_token="<video>")
    tokenizer = tokenizer_with(context_image_token="<IMG_CONTEXT>", **named)
    config = transformers.InternVLConfig(
        text_config=text_config(tokenizer, model_type="qwen2", layer_types=["full_attention"] * 2),
        vision_config=TOWER | dict(image_size=[32, 32], patch_size=[8, 8]),
        image_seq_length=4,
        downsample_ratio=0.5,
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
    )
    tiles = dict(crop_to_patches=True, min_patches=1, max_patches=4)
    pixels = image_processor(
        families.got_ocr2, "GotOcr2", size={"height": 32, "width": 32}, **tiles
    )
    video = transformers.Qwen2VLVideoProcessor()
    processor = transformers.InternVLProcessor(pixels, tokenizer, video, image_seq_length=4)
    model = transformers.InternVLForConditionalGeneration(config)
    return model, processor, CHATML.replace("IMAGE", "<IMG_CONTEXT>\n")


def mistral3():
    tokenizer = tokenizer_with("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    text = text_config(tokenizer, model_type="mistral", sliding_window=None, head_dim=8)
    config = transformers.Mistral3Config(
        text_config=text,
        vision_config=TOWER | dict(model_type="pixtral", image_size=64, head_dim=8),
        spatial_merge_size=2,
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
    )
    sizes = dict(size={"longest_edge": 64}, patch_size={"height": 8, "width": 8})
    pixels = image_processor(families.pixtral, "Pixtral", **sizes)
    processor = transformers.PixtralProcessor(pixels, tokenizer, patch_size=8, spatial_merge_size=2)
    model = transformers.Mistral3ForConditionalGeneration(config)
    return model, processor, CHATML.replace("IMAGE", "[IMG]")


def paligemma():
    tokenizer = tokenizer_with(image_token="<image>")
    pixels = image_processor(families.siglip, "Siglip", size={"height": 32, "width": 32})
    pixels.image_seq_length = 16
    config = transformers.PaliGemmaConfig(
        text_config=text_config(tokenizer, model_type="gemma", head_dim=8),
        vision_config=TOWER | dict(projection_dim=32),
        projection_dim=32,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    model = transformers.PaliGemmaForConditionalGeneration(config)
    return (
        model,
        transformers.PaliGemmaProcessor(pixels, tokenizer),
        CHATML.replace("IMAGE", "<image>"),
    )


FAMILIES = {
    "llava": lambda: llava("llava"),
    "llava_next": lambda: llava("llava_next"),
    "gemma3": gemma3,
    "idefics3": lambda: idefics("idefics3"),
    "smolvlm": lambda: idefics("smolvlm"),
    "qwen2_5_vl": lambda: qwen("Qwen2_5_VL"),
    "qwen3_vl": lambda: qwen("Qwen3VL"),
    "qwen3_5": lambda: qwen("Qwen3_5"),
    "gemma4": gemma4,
    "internvl": internvl,
    "mistral3": mistral3,
}
WITHOUT_TORCHVISION = {"llava", "llava_next", "gemma3", "idefics3", "paligemma"}


@functools.cache
def has_torchvision() -> bool:
    try:
        import torchvision  # noqa: F401
    except Exception:  # ImportError, or RuntimeError next to a torch of another index
        return False
    return True


def save_vlm(name: str, folder, seed: int = 0):
    """Saves a family's tiny model with its processor, its weights large enough for images to show."""
    if name not in WITHOUT_TORCHVISION and not has_torchvision():
        pytest.skip(f"{name}: its processor needs torchvision, from the same index as torch")
    if name == "smolvlm":
        pytest.importorskip("num2words")
    torch.manual_seed(seed)
    model, processor, template = (FAMILIES | {"paligemma": paligemma})[name]()
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() >= 2 or not parameter_name.endswith("weight"):
            torch.nn.init.normal_(parameter, std=0.2)
    processor.chat_template = processor.tokenizer.chat_template = template
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


# ============================================================ rows
SIZES = [(50, 30), (32, 64), (48, 48), (20, 70), (64, 32)]
IMAGE = {"type": "image"}


def picture(number: int, width: int = 0, height: int = 0) -> bytes:
    """A PNG of noise; its number decides its size and its pixels."""
    default = SIZES[number % len(SIZES)]
    shape = (height or default[1], width or default[0], 3)
    pixels = np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def turn(role: str, *parts: str | dict) -> dict:
    return {
        "role": role,
        "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts],
    }


def some_rows() -> list[dict]:
    """Conversations with one image, two, none, an image in each of two turns; two with one question and size."""
    asked = "How many red dots?"
    rows = [
        [turn("user", IMAGE, asked), turn("assistant", "There are three.")],
        [
            turn("user", "Compare ", IMAGE, " with ", IMAGE, "."),
            turn("assistant", "Alike."),
            turn("user", "Why?"),
            turn("assistant", "Both have three red dots."),
        ],
        [turn("user", "No image here: how many?"), turn("assistant", "None.")],
        [
            turn("user", IMAGE, "What is this?"),
            turn("assistant", "A dot."),
            turn("user", IMAGE, "And this?"),
            turn("assistant", "Two dots, both red."),
        ],
        [turn("user", IMAGE, asked), turn("assistant", "There are four of them.")],
    ]
    numbers = itertools.chain([0], [1, 2], [3, 4], [5])  # 5 has the size of 0
    count = [sum(part == IMAGE for m in row for part in m["content"]) for row in rows]
    files = [[picture(next(numbers)) for _ in range(n)] for n in count]
    return [{"messages": row, "images": images} for row, images in zip(rows, files)]
