"""Finds the thinking in messages and responses."""

import re
from typing import NamedTuple

# The openers and closers of thoughts in the templates of today's models.
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
# Any marker in a template: <...>, [...] or ◁...▷.
ANY_MARKER = re.compile(r"<[^<>]*>|\[[^\[\]]*\]|◁[^◁▷]*▷")
# An empty thought at the beginning of an answer, maybe opened by the prompt.
EMPTY = re.compile(rf"^\s*({OPENERS})?\s*({CLOSERS})\s*")
# A whole thought and nothing else; it may be empty.
CLOSED = re.compile(rf"\s*({OPENERS}).*({CLOSERS})\s*", re.DOTALL)
# An open or an empty thought at the end of a prompt, or only the closer of one.
AT_END = re.compile(rf"(({OPENERS})\s*)?({CLOSERS})\s*$|({OPENERS})\s*$")
QUOTES = " `'\"()"
# Fields of a message that hold a thought. All mean the same, and a template reads one of them.
FIELDS = ("reasoning_content", "thinking", "reasoning")


class Thought(NamedTuple):
    """A thought at the beginning of a content, its markers, and what follows it."""

    opener: str  # "" if there is only a closer, as in a model's output after `<think>`
    closer: str
    text: str
    rest: str


def find_thought(content: str) -> Thought | None:
    """Returns the whole thought that a content begins with, if any. Quoted closers do not count."""
    for opener, closer in MARKERS:
        text, is_closed, rest = content.partition(closer)
        is_opened = text.lstrip().startswith(opener)
        is_quoted = bool(text) and text[-1] in QUOTES and rest[:1] in QUOTES
        if is_closed and (is_opened or not (is_quoted or opener in text)):
            text = text.lstrip().removeprefix(opener).strip()
            return Thought(opener if is_opened else "", closer, text, rest.lstrip())
    return None


# ============================================================ thinking in messages
def split_thinking(content: str) -> tuple[str, str]:
    """Returns a content's thinking, up to and including the marker that closes it, and the rest."""
    ends = [content.rfind(closer) + len(closer) for _, closer in MARKERS if closer in content]
    end = max(ends, default=0)
    return content[:end], content[end:]


def thinking_of(message: dict) -> str:
    """Returns a message's thinking: from its content, with the markers, or else from a field."""
    thought, _ = split_thinking(message["content"])
    return field_of(message) if not thought or EMPTY.fullmatch(thought) else thought


def field_of(message: dict) -> str:
    """Returns the thinking in one of `FIELDS`; "" if there is none."""
    thoughts = [message.get(field) for field in FIELDS]
    return next((text.strip() for text in thoughts if isinstance(text, str) and text.strip()), "")


def without_thinking(message: dict) -> dict:
    """Returns a message without its thinking."""
    others = {key: value for key, value in message.items() if key not in FIELDS}
    return {**others, "content": split_thinking(message["content"])[1]}


def render_thinking(message: dict, template: str) -> str:
    """Returns a message's thinking with its own markers, or the first ones in the template."""
    thought = thinking_of(message)
    in_content, rest = split_thinking(message["content"])
    if thought == in_content:
        opener, closer = next(pair for pair in MARKERS if thought.endswith(pair[1]))
        is_opened = opener in thought.partition(closer)[0]
        return ("" if is_opened else opener) + thought + rest.removesuffix(rest.lstrip())
    template_pairs = [pair for pair in MARKERS if pair[0] in template or pair[1] in template]
    opener, closer = [*template_pairs, MARKERS[0]][0]
    gap = "" if closer == "<channel|>" else "\n\n"  # what Gemma's template writes itself
    return f"{opener}\n{thought}\n{closer}{gap}"


# ============================================================ thinking in prompts and responses
def opened_by(prompt: str) -> tuple[str, str]:
    """Returns the markers of the thought that a prompt opens at its end; else two empty texts."""
    return next((pair for pair in MARKERS if prompt.rstrip().endswith(pair[0])), ("", ""))


def outside_thoughts(text: str) -> str:
    """Returns the text of a response outside its thoughts, whoever opened or closed them."""
    for opener, closer in MARKERS:
        # Keep the text after the end of each thought that is opened here.
        before, *opened = text.split(opener)
        text = before + "".join(thought.partition(closer)[2] for thought in opened)
        # Drop a thought that the prompt has opened.
        text = text.rpartition(closer)[2]
    return text
