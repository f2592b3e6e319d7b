"""Finds the thinking in messages and responses."""

import re
from typing import NamedTuple

# What opens and closes a thought in the templates of today's models.
MARKERS = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
]
OPENERS = "|".join(re.escape(opener) for opener, _ in MARKERS)
CLOSERS = "|".join(re.escape(closer) for _, closer in MARKERS)
# The form of markers in templates: <...>, [...] or ◁...▷.
ANY_MARKER = re.compile(r"<[^<>]*>|\[[^\[\]]*\]|◁[^◁▷]*▷")
# An empty thought at the beginning of an answer; the prompt may have opened it.
EMPTY = re.compile(rf"^\s*({OPENERS})?\s*({CLOSERS})\s*")
# A whole thought and nothing else; it may be empty.
CLOSED = re.compile(rf"\s*({OPENERS}).*({CLOSERS})\s*", re.DOTALL)
# An open or an empty thought at the end of a prompt, or what closes one there.
AT_END = re.compile(rf"(({OPENERS})\s*)?({CLOSERS})\s*$|({OPENERS})\s*$")
QUOTES = " `'\"()"
# Fields of a message that hold a thought. They all mean the same, and a template knows one of them.
FIELDS = ("reasoning_content", "thinking", "reasoning")


class Thought(NamedTuple):
    """A thought that a content begins with, between its markers, and what follows it."""

    opener: str  # "": only the closer is there, as in what a model writes after `<think>`
    closer: str
    text: str
    rest: str


def find_thought(content: str) -> Thought | None:
    """Returns the whole thought that a content begins with, if any; a quoted closer is none."""
    for opener, closer in MARKERS:
        text, is_closed, rest = content.partition(closer)
        is_opened = text.lstrip().startswith(opener)
        is_quoted = bool(text) and text[-1] in QUOTES and rest[:1] in QUOTES
        if is_closed and (is_opened or not (is_quoted or opener in text)):
            text = text.lstrip().removeprefix(opener).strip()
            return Thought(opener if is_opened else "", closer, text, rest.lstrip())
    return None


# ============================================================ as templates cut it off a content
def split_thinking(content: str) -> tuple[str, str]:
    """Returns a content's thinking, up to and including the marker that closes it, and the rest."""
    ends = [content.rfind(closer) + len(closer) for _, closer in MARKERS if closer in content]
    end = max(ends, default=0)
    return content[:end], content[end:]


def thinking_of(message: dict) -> str:
    """Returns the thinking of a message: that of its content, with its markers, else of a field."""
    thought, _ = split_thinking(message["content"])
    return field_of(message) if not thought or EMPTY.fullmatch(thought) else thought


def field_of(message: dict) -> str:
    """Returns the thinking in one of the fields for it; "" if there is none."""
    thoughts = [message.get(field) for field in FIELDS]
    return next((text.strip() for text in thoughts if isinstance(text, str) and text.strip()), "")


def without_thinking(message: dict) -> dict:
    """Returns a message without its thinking."""
    others = {key: value for key, value in message.items() if key not in FIELDS}
    return {**others, "content": split_thinking(message["content"])[1]}


def render_thinking(message: dict, template: str) -> str:
    """Returns a message's thinking with markers: its own, or the first that the template has."""
    thought = thinking_of(message)
    in_content, rest = split_thinking(message["content"])
    if thought == in_content:
        opener, closer = next(pair for pair in MARKERS if thought.endswith(pair[1]))
        is_opened = opener in thought.partition(closer)[0]
        return ("" if is_opened else opener) + thought + rest.removesuffix(rest.lstrip())
    known = [pair for pair in MARKERS if pair[0] in template or pair[1] in template]
    opener, closer = [*known, MARKERS[0]][0]
    gap = "" if closer == "<channel|>" else "\n\n"  # what Gemma's template writes itself
    return f"{opener}\n{thought}\n{closer}{gap}"


# ============================================================ in prompts and responses
def opened_by(prompt: str) -> tuple[str, str]:
    """Returns the markers of the thought that a prompt opens at its end; else two empty texts."""
    return next((pair for pair in MARKERS if prompt.rstrip().endswith(pair[0])), ("", ""))


def outside_thoughts(text: str) -> str:
    """Returns what a response says outside its thoughts, whoever opened or closed them."""
    for opener, closer in MARKERS:
        # Keep what follows the end of each thought that is opened here.
        before, *opened = text.split(opener)
        text = before + "".join(thought.partition(closer)[2] for thought in opened)
        # Drop the thought that the prompt has opened.
        text = text.rpartition(closer)[2]
    return text
