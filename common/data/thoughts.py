"""Finds the thinking in messages, and writes it with the markers that open and close it."""

import re

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
# Fields of a message that hold a thought. To transformers they all mean the same.
FIELDS = ("reasoning_content", "thinking", "reasoning")


def of_message(message: dict) -> str:
    """Returns what an assistant thought before its answer, from a field or the content; or ""."""
    for field in FIELDS:
        if isinstance(message.get(field), str) and message[field].strip():
            return message[field].strip()
    content = message["content"]
    for opener, closer in MARKERS:
        if closer in content:
            return content.partition(closer)[0].strip().removeprefix(opener).strip()
    return ""


def without_thought(content: str) -> str:
    """Returns the content of a message after its thinking."""
    for _, closer in MARKERS:
        content = content.rpartition(closer)[2]
    return content


def removed(message: dict) -> dict:
    """Returns a message without its thinking."""
    others = {key: value for key, value in message.items() if key not in FIELDS}
    return {**others, "content": without_thought(message["content"])}


def split(tokenizer, message: dict) -> tuple[str, str]:
    r"""Returns the thinking of an answer as a text, and the content that follows it.

    The text has the markers that the user wrote, or that the chat template knows, or else
    `<think>`. It ends with the whitespace that separates it from the content. Examples:

        content                     reasoning_content    returned
        <think>Why</think>\nYes     none                 <think>Why</think>\n             Yes
        Yes                         Why                  <think>\nWhy\n</think>\n\n       Yes
        \n\nYes                     Why                  <think>\nWhy\n</think>\n\n       Yes
    """
    content = message["content"]
    after_thought = without_thought(content)
    answer = after_thought.lstrip()
    if after_thought != content:
        return content.removesuffix(answer), answer
    template = str(tokenizer.chat_template)
    opener, closer = MARKERS[0]
    for known_opener, known_closer in MARKERS:
        if known_closer in template:
            opener = known_opener
            closer = known_closer
            break
    gap = "" if closer == "<channel|>" else "\n\n"
    return f"{opener}\n{of_message(message)}\n{closer}{gap}", answer


def without_empty_thought(text: str) -> str:
    """Returns a text without the empty thought, such as `<think></think>`, that it begins with."""
    for opener, closer in MARKERS:
        inside, found, rest = text.partition(closer)
        if found and inside.strip() in ("", opener):
            return rest.lstrip()
    return text


def is_whole_thought(text: str) -> bool:
    r"""Whether a text is a thinking block that opens and closes.

    Examples: `<think></think>` is one, and so is `[THINK]\n[/THINK]`; `<think>\n` is not closed,
    and `<|im_start|><|im_end|>` is not about thinking.
    """
    markers = re.findall(r"[<\[◁][^<>\[\]◁▷]*[>\]▷]", text)
    is_about_thinking = re.search("think|thought|reason|analysis", text, re.IGNORECASE)
    starts_and_ends = re.fullmatch(r"\s*[<\[◁].*[>\]▷]\s*", text, re.DOTALL)
    return bool(len(markers) > 1 and is_about_thinking and starts_and_ends)
