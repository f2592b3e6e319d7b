"""Texts and token ids: what a tokenizer and its chat template make of texts and of messages."""

import datetime
import functools
import json
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jinja2.meta
import transformers.utils.chat_template_utils as template_utils

from common import refuse
from preference_recipes.data import thoughts
from preference_recipes.data.messages import PLACE, BadRow

# For trials: a question, and an answer. No template and no data write these words by themselves.
QUESTION = {"role": "user", "content": "zqz"}
MARK = "\ue000zqzplace"  # the first character, of private use, begins no other answer
MARKED = {"role": "assistant", "content": MARK}


# ============================================================ texts and ids
@functools.lru_cache(maxsize=32)
def encode(tokenizer, text: str) -> list[int]:
    """Returns the token ids of a text alone. They are kept: do not change the list."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # whatever its file says
    backend.no_padding()
    # Without offsets, which nothing reads here, it takes half the time.
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


def encode_after(tokenizer, before: str, text: str) -> list[int]:
    """Returns the ids of a text as a model would write it after another.

    They are those of both texts together, cut between them. If a token spans the border, the text
    is tokenised alone.
    """
    before = end_of(tokenizer, before)
    before_ids = encode(tokenizer, before)
    both = encode(tokenizer, before + text)
    if both[: len(before_ids)] == before_ids:
        return both[len(before_ids) :]
    return encode(tokenizer, text)


def end_of(tokenizer, text: str) -> str:
    """Returns as much of a text's end as decides how what follows is tokenised: it takes less time.

    It begins with the last marker, where a tokenizer cuts texts first; else between two words, at
    least twenty characters before the end, if its tokens are the text's own.
    """
    near = text[-200:]
    markers = [found.start() for found in added_tokens(tokenizer).finditer(near)]
    if markers:
        return near[markers[-1] :]
    before_word = re.match(r"(?s).*[^\W\d_](?= [^\W\d_])", near[:-20])
    if not before_word:
        return text
    end = near[before_word.end() :]
    ids = encode(tokenizer, end)
    return end if encode(tokenizer, text)[-len(ids) :] == ids else text


def decode(tokenizer, ids: list[int]) -> str:
    """Returns the text of token ids as it is, special tokens included."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@functools.lru_cache(maxsize=16)
def bos_of(tokenizer) -> list[int]:
    """Returns the BOS that the tokenizer puts before a text, or nothing."""
    # Of "" a tokenizer that appends an EOS returns that alone, and it may be the BOS as well.
    first = tokenizer("a").input_ids[:1]
    return first if first == [tokenizer.bos_token_id] else []


@functools.lru_cache(maxsize=16)
def added_tokens(tokenizer) -> re.Pattern:
    """Returns what matches any token that was added to the vocabulary to mark something."""
    texts = [token.content for token in tokenizer.added_tokens_decoder.values()]
    longest_first = sorted(filter(str.strip, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def n_common(first, second) -> int:
    """Returns how many elements, or characters, both begin with."""
    if second[: len(first)] == first:
        return len(first)
    differ = (place for place, (one, other) in enumerate(zip(first, second)) if one != other)
    return next(differ, min(len(first), len(second)))


def fingerprint(tokenizer) -> str:
    """Returns a text that changes whenever the tokenizer would produce different ids."""
    content = tokenizer.backend_tokenizer.to_str()
    date = getattr(tokenizer, "chat_date", None)
    processor = getattr(tokenizer, "processor", None)
    sizes = f"\0{describe_processor(processor)}" if processor is not None else ""
    return f"{content}\0{tokenizer.chat_template}\0{tokenizer.special_tokens_map}\0{date}{sizes}"


def describe_processor(processor) -> str:
    """Returns what pixels and tokens depend on, also whether torchvision or PIL computes them."""
    return f"{type(processor.image_processor).__name__} {processor.to_json_string()}"


def stop_tokens(tokenizer, model) -> set[int]:
    """Returns what ends a response: EOS, the end of a turn, what the generation config says."""
    own = model.generation_config.eos_token_id
    own = [own] if isinstance(own, int) else own or []
    return {tokenizer.eos_token_id, *own, *encode(tokenizer, ending_of(tokenizer).end)[-1:]}


# ============================================================ rendering
def render(
    tokenizer,
    messages: list[dict],
    tools: list[dict] | None = None,
    add_generation_prompt: bool = False,
) -> str:
    """Returns messages as the chat template writes them, which raises what it likes about them."""
    if not messages:
        return ""
    tools = tools or None  # Llama 3 would announce an empty list of them
    text = write(
        tokenizer,
        [to_write(tokenizer, message) for message in messages],
        tools=tools,
        add_generation_prompt=add_generation_prompt,
    )
    processor = getattr(tokenizer, "processor", None)
    if processor is not None:
        from preference_recipes.data import images  # only here: text needs none

        text = images.spell_out(processor, text, messages)
    return text


def write(tokenizer, messages: list[dict], tools: list[dict] | None = None, **settings) -> str:
    """Returns what the template makes of messages, contents as lists of parts where it needs them.

    That is where images are, or where it writes no strings at all (Idefics3, LLaVA-NeXT).
    """
    if any("image_sources" in message for message in messages):
        raise BadRow("a message has an image: only `dataset.Converter` reads images")
    all_parts = needs_parts(tokenizer)
    given = [as_parts(m) if all_parts or m.get("spellings") else m for m in messages]
    template = template_of(tokenizer, has_tools=tools is not None)
    return template(messages=given, tools=tools, **settings)


def as_parts(message: dict) -> dict:
    """Returns a message whose content is a list of parts, as templates read images."""
    pieces = [message["content"]]
    if "spellings" in message:
        pieces = [piece for piece in re.split(f"({PLACE})", message["content"]) if piece]
    parts = [{"type": "image"} if p == PLACE else {"type": "text", "text": p} for p in pieces]
    return {key: value for key, value in message.items() if key != "spellings"} | {"content": parts}


@functools.lru_cache(maxsize=16)
def needs_parts(tokenizer) -> bool:
    """Whether a template writes contents that are lists of parts alone."""
    template = template_of(tokenizer, has_tools=False)
    is_written = []
    for question in (QUESTION, as_parts(QUESTION)):
        try:
            is_written.append(QUESTION["content"] in template(messages=[question]))
        except Exception:  # a template raises what it likes
            is_written.append(False)
    return is_written == [False, True]


@functools.lru_cache(maxsize=32)
def template_of(tokenizer, has_tools: bool) -> Callable[..., str]:
    """Returns what renders a chat template as `apply_chat_template` does, but quickly."""
    if tokenizer.chat_template is None:
        raise BadRow(
            "messages, but the tokenizer has no chat template: give one by --chat_template FILE, "
            "or plain strings in place of messages"
        )
    template = tokenizer.get_chat_template(tools=[] if has_tools else None)
    given: dict[str, Any] = dict(tools=None, documents=None, add_generation_prompt=False)
    given |= tokenizer.special_tokens_map
    if getattr(tokenizer, "chat_date", None):  # else today's
        given["strftime_now"] = datetime.date.fromisoformat(tokenizer.chat_date).strftime
    return functools.partial(template_utils._compile_jinja_template(template).render, **given)


def to_write(tokenizer, message: dict) -> dict:
    """Returns a message as a template reads it: thinking in all fields, a content without its end.

    Thinking in the content stays there, unless the template would take it for the answer.
    """
    if message["role"] != "assistant":
        return message
    content = message["content"]
    while end := next(filter(content.rstrip().endswith, ending_of(tokenizer).ends), ""):
        content = content.rstrip().removesuffix(end)
    thought = thoughts.field_of(message)
    found = thoughts.find_thought(content)
    if found and thought in ("", found.text):
        # Other markers than these may be what a user's own prompt asks for.
        is_misplaced = found.opener == "<think>" and is_foreign(tokenizer, found.closer)
        if is_misplaced or is_doubled(tokenizer, found.opener, found.closer):
            thought = found.text
            content = found.rest
    message = {**message, "content": content}
    if thought:
        message |= {field: message.get(field) or thought for field in thoughts.FIELDS}
    return message


def ignores(tokenizer, messages: list[dict], tools, place: int, **changes) -> bool:
    """Whether the template writes messages as if one had these changes."""
    changed = list(messages)
    changed[place] = {**messages[place], **changes}
    try:
        return render(tokenizer, changed, tools) == render(tokenizer, messages, tools)
    except Exception:  # it wants what is missing
        return False


# ============================================================ what a template does, by trials
def trial(tokenizer, answer: str, *following: dict, **fields: str) -> str:
    """Returns what a template writes after a question; "" if it refuses, as it likes."""
    messages = [QUESTION, {"role": "assistant", "content": answer, **fields}, *following]
    try:
        text = write(tokenizer, messages)
    except Exception:
        return ""
    return text.partition(QUESTION["content"])[2] or text


@functools.lru_cache(maxsize=64)
def is_doubled(tokenizer, opener: str, closer: str) -> bool:
    """Whether a template writes an empty thought before a thought in the content (Qwen3.8)."""
    before, _, _ = trial(tokenizer, f"{opener}zqt{closer}zqa").partition("zqt")
    return closer in before


@functools.lru_cache(maxsize=64)
def is_foreign(tokenizer, closer: str) -> bool:
    """Whether a template writes thinking, but not up to this marker (gpt-oss, Gemma 4)."""
    text = trial(tokenizer, "zqa", **dict.fromkeys(thoughts.FIELDS, "zqt"))
    if "zqt" in text:
        return closer not in text.partition("zqt")[2]
    template = str(tokenizer.chat_template)
    return closer not in template and any(pair[1] in template for pair in thoughts.MARKERS)


class Ending(NamedTuple):
    """What a template writes after an answer, as found out by rendering some."""

    whole: str  # after the last answer, whatever that is: `<|im_end|>\n`
    end: str  # its beginning with the token that ends an answer, `<|im_end|>`, if it has one
    ends: list[str]  # what may end a content: that, and the EOS


@functools.lru_cache(maxsize=16)
def ending_of(tokenizer) -> Ending:
    """Returns what a tokenizer's template writes after an answer.

    The token that ends an answer also ends one that is followed (not so Phi-3's last `<eos>`), or
    the last answer's own counts (gpt-oss). An EOS is the end wherever it is.
    """
    whole, followed = (
        os.path.commonprefix([trial(tokenizer, answer, *more)[::-1] for answer in "ab"])[::-1]
        for more in ([], [QUESTION])
    )
    ends = [whole[: found.end()] for found in added_tokens(tokenizer).finditer(whole)]
    ends = [end for end in ends if followed.startswith(end)] or ends[:1]
    with_eos = [end for end in ends if end.endswith(tokenizer.eos_token)]
    end = [*with_eos, *reversed(ends), ""][0]
    return Ending(whole, end, list(filter(None, (end, tokenizer.eos_token))))


# ============================================================ variables of a template
def set_defaults(tokenizer, text: str) -> None:
    """Gives variables of a tokenizer's chat template default values, which are saved with it."""
    try:
        values = dict(json.loads(text))
    except (ValueError, TypeError):
        refuse(f'--chat_template_kwargs {text}: expected a JSON object, such as {{"name": false}}')
    known = variables(tokenizer)
    unknown = values.keys() - known
    if unknown:
        refuse(
            f"--chat_template_kwargs {text}: the chat template has no variable {min(unknown)!r} to "
            f"set; it has: {', '.join(sorted(known)) or 'none'}"
        )
    # Jinja reads constants as Python writes them.
    lines = [f"{{% set {name} = {name} | default({values[name]!r}) %}}\n" for name in values]
    beginning = "".join(lines)
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several, by their names
        tokenizer.chat_template = {name: beginning + template[name] for name in template}
    else:
        tokenizer.chat_template = beginning + template


def variables(tokenizer) -> set[str]:
    """Returns the variables that a tokenizer's chat template reads and a user may set."""
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several, by their names
        template = "".join(template.values())
    environment = template_utils._compile_jinja_template(template).environment
    names = jinja2.meta.find_undeclared_variables(environment.parse(template))
    given = {"messages", "tools", "documents", "add_generation_prompt", "strftime_now"}
    return names - environment.globals.keys() - given - tokenizer.special_tokens_map.keys()
