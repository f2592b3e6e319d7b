"""Finds the thinking in messages, and writes it with the markers that open and close it."""

import re

GEMMA_CLOSER = "<channel|>"
# What opens and closes a thought in the templates of today's models.
MARKERS = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", GEMMA_CLOSER),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
]
# The form of markers in templates: <...>, [...] or ◁...▷.
ANY_MARKER = re.compile(r"<[^<>]*>|\[[^\[\]]*\]|◁[^◁▷]*▷")
# Fields of a message that hold a thought. To transformers they all mean the same.
FIELDS = ("reasoning_content", "thinking", "reasoning")


def of_message(message: dict) -> str:
    """Returns the thinking of an assistant's message, from its content or a field; "" if none."""
    return of_content(message["content"]) or of_field(message)


def of_content(content: str) -> str:
    """Returns the thinking in a content: all up to the last closing marker; "" if there is none.

    `<think>Why</think>Yes` has the thinking `Why`, and so has `Why</think>Yes`, whose prompt has
    opened the thought. Of several pairs of markers the first in `MARKERS` counts.
    """
    for opener, closer in MARKERS:
        before, found, _ = content.rpartition(closer)
        if found:
            return before.strip().removeprefix(opener).strip()
    return ""


def of_field(message: dict) -> str:
    """Returns the thinking in one of the fields for it; "" if there is none."""
    for field in FIELDS:
        if isinstance(message.get(field), str) and message[field].strip():
            return message[field].strip()
    return ""


def without_thought(content: str) -> str:
    """Returns the content of a message after its thinking."""
    for _, closer in MARKERS:
        content = content.rpartition(closer)[2]
    return content


def outside_of(text: str) -> str:
    """Returns what a response says outside its thoughts.

    Examples that give `Yes`: `<think>a</think>Yes`; `a</think>Yes`, whose thought the prompt has
    opened; `Yes<think>a`, whose thought was cut.
    """
    for opener, closer in MARKERS:
        # Of each thought that is opened here, keep what follows its end.
        before, *opened = text.split(opener)
        text = before + "".join(thought.partition(closer)[2] for thought in opened)
        # Drop the thought that the prompt has opened.
        text = text.rpartition(closer)[2]
    return text


def removed(message: dict) -> dict:
    """Returns a message without its thinking."""
    others = {key: value for key, value in message.items() if key not in FIELDS}
    return {**others, "content": without_thought(message["content"])}


def markers_of(tokenizer) -> tuple[str, str]:
    """Returns the first of `MARKERS` that closes thoughts in the chat template, else `<think>`."""
    template = str(tokenizer.chat_template)
    return next((pair for pair in MARKERS if pair[1] in template), MARKERS[0])


def thinking_and_content(tokenizer, message: dict) -> tuple[str, str]:
    r"""Returns a message that has thinking as two parts: all before the answer, and the answer.

    Thinking in the content keeps its markers, see `with_opener`. Thinking in a field gets those of
    `markers_of`. Examples, with | between the two parts:

        content                     reasoning_content    returned
        <think>Why</think>\nYes     none                 <think>Why</think>\n | Yes
        Why</think>\nYes            none                 <think>Why</think>\n | Yes
        \n\nYes                     Why                  <think>\nWhy\n</think>\n\n | Yes
    """
    content = message["content"]
    answer = without_thought(content).lstrip()
    if of_content(content):
        thinking = content.removesuffix(answer)  # with the whitespace at its end
        return with_opener(thinking), answer
    opener, closer = markers_of(tokenizer)
    gap = "" if closer == GEMMA_CLOSER else "\n\n"  # what the template writes before the content
    return f"{opener}\n{of_field(message)}\n{closer}{gap}", answer


def with_opener(thinking: str) -> str:
    """Returns closed thinking with its opening marker, which the prompt may have written.

    Examples: `Why</think>` gets one; `<think>Why</think>` and `Sure. <think>Why</think>` have one;
    `a</think>b<think>c</think>` gets one, since its first thought is closed before one is opened.
    """
    opener, closer = next(pair for pair in MARKERS if thinking.rstrip().endswith(pair[1]))
    is_opened = opener in thinking.partition(closer)[0]
    return thinking if is_opened else opener + thinking


def opened_by(prompt: str) -> tuple[str, str]:
    """Returns the markers of the thought that a prompt opens at its end; two "" if it opens none.

    Templates of models that always think write `<think>` there.
    """
    for opener, closer in MARKERS:
        if prompt.rstrip().endswith(opener):
            return opener, closer
    return "", ""


def end_that_opens(prompt: str) -> str:
    """Returns the end of a prompt from the marker that opens a thought there; "" if none does."""
    opener, _ = opened_by(prompt)
    return prompt[prompt.rindex(opener) :] if opener else ""


def without_empty_thought(text: str) -> str:
    r"""Returns a text without an empty thought at its beginning, and the whitespace after that.

    Examples: `<think>\n</think>\nYes` gives `Yes`, and so does `</think>Yes`, whose thought was
    opened in the prompt.
    """
    for opener, closer in MARKERS:
        inside, found, rest = text.partition(closer)
        if found and inside.strip() in ("", opener):
            return rest.lstrip()
    return text


def without_thought_at_end(text: str) -> str:
    r"""Returns a text without the thought that ends it. In a prompt it tells a model not to think.

    A thought with other markers inside may be from an earlier message, so only its end is removed.
    Examples:

        text                         returned
        <bot><think>\n</think>\n     <bot>
        <bot></think>                <bot>               (DeepSeek-V3.1 writes no opening marker)
        <bot></think>Sure,           <bot></think>Sure,
        <bot><think>\n               <bot><think>\n      (it is not closed)
    """
    closing = [pair for pair in MARKERS if text.rstrip().endswith(pair[1])]
    if not closing:
        return text
    opener, closer = closing[0]
    up_to_closer = text.rpartition(closer)[0]
    up_to_opener, found, inside = up_to_closer.rpartition(opener)
    if not found or ANY_MARKER.search(inside):
        return up_to_closer
    return up_to_opener


def is_whole_thought(text: str) -> bool:
    r"""Whether a text is a thought and nothing else, as far as its form tells; it may be empty.

    Templates have more markers than those of `MARKERS`. So the text must begin and end with any
    marker, the last one must look as if it closes (a "/" or "end" in it, or Gemma's), and a word
    for thinking must be somewhere. Examples:

        <think></think>                      is one
        [THINK]\n[/THINK]                    is one
        <think>\n                            is not closed
        <|channel|>analysis<|message|>       is not closed
        <|im_start|><|im_end|>               has no word for thinking
    """
    text = text.strip()
    markers = ANY_MARKER.findall(text)
    if len(markers) < 2:
        return False
    first = markers[0]
    last = markers[-1]
    is_all_of_it = text.startswith(first) and text.endswith(last)
    is_about_thinking = re.search("think|thought|reason|analysis", text, re.IGNORECASE)
    is_closed = "/" in last or "end" in last.lower() or last == GEMMA_CLOSER
    return bool(is_all_of_it and is_about_thinking and is_closed)
