"""The token ids between two answers of a conversation that continues while a model samples.

A turn is never tokenised again: what comes back is appended to the ids that were sampled. So a
template must continue a conversation by adding to what it wrote, or it is refused.
"""

from typing import Any

from common.data import templates
from common.data.ids import added_tokens, decode, encode_after, encode_beginning
from common.data.messages import BadRow

# A conversation that stands for any other: only what the template writes after the answer is read.
# No template writes these words by itself.
QUESTION: dict[str, Any] = {"role": "user", "content": "zqz"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "zqa"}
CALL: dict[str, Any] = {"type": "function", "function": {"name": "zqf", "arguments": {}}}
ANSWER_WITH_CALL: dict[str, Any] = {**ANSWER, "tool_calls": [CALL]}
REPLY = "zqr"
# Splits the text of a control token, and is invisible.
ZERO_WIDTH_SPACE = "\u200b"


def check(tokenizer, tools: list[dict] | None = None) -> None:
    """Refuses a template that cannot continue a conversation after what a model has sampled.

    Args:
        tools: with them, results of calls come back; without, messages of a user.

    Raises:
        BadRow: it leaves out what comes back, or the tools; or see `refuse_rewritten_answers`.
    """
    refuse_rewritten_answers(tokenizer)
    names = [tool["function"]["name"] for tool in tools or []]
    prompt = templates.render(tokenizer, [QUESTION], tools, add_generation_prompt=True)
    if not all(name in prompt for name in names):
        raise BadRow(f"the tokenizer's chat template does not write the tools {', '.join(names)}")
    role = "tool" if tools else "user"
    reply = {"role": role, "name": CALL["function"]["name"], "content": REPLY}
    if REPLY not in decode(tokenizer, ids_after_answer(tokenizer, [reply], tools)):
        raise BadRow(f"the tokenizer's chat template leaves out messages of role {role!r}")


def refuse_rewritten_answers(tokenizer) -> None:
    """Refuses a template that writes an answer differently once another message follows it.

    Example of one that does: its generation prompt ends with `<bot><think>`, and it writes an
    earlier answer as `<bot>Yes`.
    """
    text, place = rendered(tokenizer, ANSWER, [QUESTION], None)
    prompt = templates.render(tokenizer, [QUESTION], add_generation_prompt=True)
    end = decode(tokenizer, templates.conventions(tokenizer).end_of_answer)
    # Whitespace around the answer is the model's own.
    written = text[len(prompt) : place].removesuffix(end).strip()
    if not text.startswith(prompt) or written != ANSWER["content"]:
        raise BadRow(
            "the tokenizer's chat template writes an answer differently once it is followed: its "
            f"generation prompt ends with {prompt[-40:]!r}, a later answer with "
            f"{text[:place][-40:]!r}. So no turn can be appended to what was sampled: give another "
            "template by --chat_template FILE, or switch off thinking by --chat_template_kwargs"
        )


def ids_after_answer(tokenizer, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
    r"""Returns what the template writes after an answer's last token, up to the next answer.

    Example: of ChatML, after the message `Too high.` of a user, the ids of

        \n<|im_start|>user\nToo high.<|im_end|>\n<|im_start|>assistant\n

    Args:
        messages: what comes back, at least one message. Control tokens that are spelled out in
            them are made harmless, see `harmless`.
        tools: JSON schemas of what the model may call.

    Raises:
        BadRow: the template refuses the messages.
    """
    answer = ANSWER_WITH_CALL if messages[0]["role"] == "tool" else ANSWER
    messages = [harmless(tokenizer, message) for message in messages]
    text, place = rendered(tokenizer, answer, messages, tools)
    return encode_after(tokenizer, encode_beginning(tokenizer, text[:place]), text[place:])


def rendered(
    tokenizer, answer: dict, messages: list[dict], tools: list[dict] | None
) -> tuple[str, int]:
    r"""Returns a conversation that continues after an answer, and where the answer ends.

    Example, with ChatML: the answer to `zqz` is `zqa`, and ends before the second line.

        <|im_start|>user\nzqz<|im_end|>\n<|im_start|>assistant\nzqa<|im_end|>
        \n<|im_start|>user\nToo high.<|im_end|>\n<|im_start|>assistant\n

    Raises:
        BadRow: the template refuses the messages, or does not write the answer.
    """
    text = templates.render(
        tokenizer, [QUESTION, answer, *messages], tools, add_generation_prompt=True
    )
    end = decode(tokenizer, templates.conventions(tokenizer).end_of_answer)  # maybe ""
    words = [answer["content"]]
    # Some templates write only the call of an answer that has one.
    words += [call["function"]["name"] for call in answer.get("tool_calls", [])]
    for word in words:
        place = place_after(text, [QUESTION["content"], word, end])
        if place is not None:
            return text, place
    raise BadRow("the tokenizer's chat template does not write an answer once it is followed")


def place_after(text: str, words: list[str]) -> int | None:
    """Returns where the last word ends, if each is searched after the one before it.

    None if one of them is not there. Example: `place_after("a b a c", ["b", "a"])` is 5.
    """
    place = 0
    for word in words:
        start = text.find(word, place)
        if start < 0:
            return None
        place = start + len(word)
    return place


def harmless(tokenizer, message: dict) -> dict:
    """Returns a message whose text is tokenised without control tokens, such as `<|im_end|>`.

    An environment may return anything, such as what the model wrote itself. A zero-width space
    after the first character keeps the text from becoming the token.
    """
    content = message["content"]
    for token in added_tokens(tokenizer).values():
        text = token.content
        if len(text) > 1 and not text.isspace() and text in content:
            content = content.replace(text, text[0] + ZERO_WIDTH_SPACE + text[1:])
    return {**message, "content": content}
