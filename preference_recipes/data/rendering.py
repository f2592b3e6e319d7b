"""Texts and token ids: tokenises texts, renders messages, and tries what a chat template does."""

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

# A question and an answer for trials. Neither templates nor data contain these words.
QUESTION = {"role": "user", "content": "zqz"}
MARK = "\ue000zqzplace"  # its first character, of private use, begins no other answer
MARKED = {"role": "assistant", "content": MARK}


# ============================================================ texts and ids
@functools.lru_cache(maxsize=32)
def encode(tokenizer, text: str) -> list[int]:
    """Returns the token ids of a text alone. They are cached: do not change the list."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # whatever its file says
    backend.no_padding()
    # The fast version computes no offsets, which are not needed, and takes half the time.
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


def encode_after(tokenizer, before: str, text: str) -> list[int]:
    """Returns the ids of a text as a model would write it after another.

    Both are tokenised together and split between them, or apart if a token spans the border.
    """
    before = end_of(tokenizer, before)
    before_ids = encode(tokenizer, before)
    both = encode(tokenizer, before + text)
    if both[: len(before_ids)] == before_ids:
        return both[len(before_ids) :]
    return encode(tokenizer, text)


def end_of(tokenizer, text: str) -> str:
    """Returns the end of a text that decides how a continuation is tokenised, to save time.

    It begins with the last marker, where a tokenizer splits texts first; or between two words, at
    least twenty characters before the end, if its tokens are also the whole text's.
    """
    near = text[-200:]
    markers = [match.start() for match in added_tokens(tokenizer).finditer(near)]
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
    """Returns the BOS that the tokenizer puts before a text, if any."""
    # For "", a tokenizer that appends an EOS returns it alone, and it may equal the BOS.
    first = tokenizer("a").input_ids[:1]
    return first if first == [tokenizer.bos_token_id] else []


@functools.lru_cache(maxsize=16)
def added_tokens(tokenizer) -> re.Pattern:
    """Returns a pattern for the tokens that were added to the vocabulary as markers."""
    texts = [token.content for token in tokenizer.added_tokens_decoder.values()]
    longest_first = sorted(filter(str.strip, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def n_common(first, second) -> int:
    """Returns the length of the common beginning of two lists or texts."""
    if second[: len(first)] == first:
        return len(first)
    differences = (index for index, (x, y) in enumerate(zip(first, second)) if x != y)
    return next(differences, min(len(first), len(second)))


def fingerprint(tokenizer) -> str:
    """Returns a text that changes whenever the tokenizer would produce different ids."""
    content = tokenizer.backend_tokenizer.to_str()
    date = getattr(tokenizer, "chat_date", None)
    processor = getattr(tokenizer, "processor", None)
    sizes = f"\0{describe_processor(processor)}" if processor is not None else ""
    return f"{content}\0{tokenizer.chat_template}\0{tokenizer.special_tokens_map}\0{date}{sizes}"


def describe_processor(processor) -> str:
    """Returns the settings behind pixels and tokens, and the backend: torchvision or PIL."""
    return f"{type(processor.image_processor).__name__} {processor.to_json_string()}"


def stop_tokens(tokenizer, model) -> set[int]:
    """Returns the tokens that end a response: EOS, the end of a turn, the generation config's."""
    published = model.generation_config.eos_token_id
    published = [published] if isinstance(published, int) else published or []
    return {tokenizer.eos_token_id, *published, *encode(tokenizer, ending_of(tokenizer).end)[-1:]}


# ============================================================ rendering
def render(
    tokenizer,
    messages: list[dict],
    tools: list[dict] | None = None,
    add_generation_prompt: bool = False,
) -> str:
    """Returns messages as the chat template writes them. The template may raise anything."""
    if not messages:
        return ""
    tools = tools or None  # Llama 3 would announce an empty list of tools
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
    """Renders messages by the template, with contents as lists of parts where it needs them.

    It needs them for images, or always if it writes no strings (Idefics3, LLaVA-NeXT).
    """
    if any("image_sources" in message for message in messages):
        raise BadRow("a message has an image: only `dataset.Converter` reads images")
    all_parts = needs_parts(tokenizer)
    prepared = [as_parts(m) if all_parts or m.get("spellings") else m for m in messages]
    template = template_of(tokenizer, has_tools=tools is not None)
    return template(messages=prepared, tools=tools, **settings)


def as_parts(message: dict) -> dict:
    """Returns a message whose content is a list of parts, as templates read images."""
    pieces = [message["content"]]
    if "spellings" in message:
        pieces = [piece for piece in re.split(f"({PLACE})", message["content"]) if piece]
    parts = [{"type": "image"} if p == PLACE else {"type": "text", "text": p} for p in pieces]
    return {key: value for key, value in message.items() if key != "spellings"} | {"content": parts}


@functools.lru_cache(maxsize=16)
def needs_parts(tokenizer) -> bool:
    """Whether a template writes contents only if they are lists of parts."""
    template = template_of(tokenizer, has_tools=False)
    is_written = []
    for question in (QUESTION, as_parts(QUESTION)):
        try:
            is_written.append(QUESTION["content"] in template(messages=[question]))
        except Exception:  # a template may raise anything
            is_written.append(False)
    return is_written == [False, True]


@functools.lru_cache(maxsize=32)
def template_of(tokenizer, has_tools: bool) -> Callable[..., str]:
    """Returns a function that renders like `apply_chat_template`, but faster."""
    if tokenizer.chat_template is None:
        raise BadRow(
            "messages, but the tokenizer has no chat template: give one by --chat_template FILE, "
            "or plain strings in place of messages"
        )
    template = tokenizer.get_chat_template(tools=[] if has_tools else None)
    variables: dict[str, Any] = dict(tools=None, documents=None, add_generation_prompt=False)
    variables |= tokenizer.special_tokens_map
    if getattr(tokenizer, "chat_date", None):  # otherwise today's date
        variables["strftime_now"] = datetime.date.fromisoformat(tokenizer.chat_date).strftime
    return functools.partial(template_utils._compile_jinja_template(template).render, **variables)


def to_write(tokenizer, message: dict) -> dict:
    """Prepares a message for a template: copies thinking into all fields, cuts the content's end.

    Thinking in the content stays there, unless the template would take it for the answer.
    """
    if message["role"] != "assistant":
        return message
    content = message["content"]
    while end := next(filter(content.rstrip().endswith, ending_of(tokenizer).ends), ""):
        content = content.rstrip().removesuffix(end)
    thought = thoughts.field_of(message)
    in_content = thoughts.find_thought(content)
    if in_content and thought in ("", in_content.text):
        # Other markers may be the ones that a user's own prompt asks for.
        is_misplaced = in_content.opener == "<think>" and is_foreign(tokenizer, in_content.closer)
        if is_misplaced or is_doubled(tokenizer, in_content.opener, in_content.closer):
            thought = in_content.text
            content = in_content.rest
    message = {**message, "content": content}
    if thought:
        message |= {field: message.get(field) or thought for field in thoughts.FIELDS}
    return message


def ignores(tokenizer, messages: list[dict], tools, index: int, **changes) -> bool:
    """Whether the template writes the same if one of the messages is changed."""
    changed = list(messages)
    changed[index] = {**messages[index], **changes}
    try:
        return render(tokenizer, changed, tools) == render(tokenizer, messages, tools)
    except Exception:  # it requires the changed fields
        return False


# ============================================================ trials of a template
def trial(tokenizer, answer: str, *following: dict, **fields: str) -> str:
    """Returns what a template writes after a question; "" if it raises an error."""
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
    """The text that a template writes after an answer, found by rendering some."""

    whole: str  # after the last answer, whatever that is: `<|im_end|>\n`
    end: str  # its beginning up to the token that ends an answer, `<|im_end|>`; may be ""
    ends: list[str]  # texts that may end a content: `end` and the EOS


@functools.lru_cache(maxsize=16)
def ending_of(tokenizer) -> Ending:
    """Finds the text that a tokenizer's template writes after an answer.

    The token that ends an answer is one that also ends an answer with a turn after it (unlike
    Phi-3's last `<eos>`), or else the last answer's first (gpt-oss). An EOS always counts.
    """
    whole, followed = (
        os.path.commonprefix([trial(tokenizer, answer, *more)[::-1] for answer in "ab"])[::-1]
        for more in ([], [QUESTION])
    )
    ends = [whole[: marker.end()] for marker in added_tokens(tokenizer).finditer(whole)]
    ends = [end for end in ends if followed.startswith(end)] or ends[:1]
    with_eos = [end for end in ends if end.endswith(tokenizer.eos_token)]
    end = [*with_eos, *reversed(ends), ""][0]
    return Ending(whole, end, list(filter(None, (end, tokenizer.eos_token))))


# ============================================================ variables of a template
def set_defaults(tokenizer, text: str) -> None:
    """Sets default values for variables of a tokenizer's chat template, which are saved with it."""
    try:
        values = dict(json.loads(text))
    except (ValueError, TypeError):
        refuse(f'--chat_template_kwargs {text}: expected a JSON object, such as {{"name": false}}')
    names = variables(tokenizer)
    unknown = values.keys() - names
    if unknown:
        refuse(
            f"--chat_template_kwargs {text}: the chat template has no variable {min(unknown)!r} to "
            f"set; it has: {', '.join(sorted(names)) or 'none'}"
        )
    # Jinja reads constants as Python writes them.
    lines = [f"{{% set {name} = {name} | default({values[name]!r}) %}}\n" for name in values]
    beginning = "".join(lines)
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several templates by name
        tokenizer.chat_template = {name: beginning + template[name] for name in template}
    else:
        tokenizer.chat_template = beginning + template


def variables(tokenizer) -> set[str]:
    """Returns the variables that a tokenizer's chat template reads and a user may set."""
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several templates by name
        template = "".join(template.values())
    environment = template_utils._compile_jinja_template(template).environment
    names = jinja2.meta.find_undeclared_variables(environment.parse(template))
    set_by_code = {"messages", "tools", "documents", "add_generation_prompt", "strftime_now"}
    return names - environment.globals.keys() - set_by_code - tokenizer.special_tokens_map.keys()
