"""The token ids between two answers of a conversation that continues while a model samples.

A turn is never tokenised again: what comes back is appended to the ids that were sampled. So a
template must continue a conversation by adding to what it wrote, or it is refused.
"""

from typing import Any

from preference_recipes.data import templates
from preference_recipes.data.ids import added_tokens, decode, encode_after, encode_beginning
from preference_recipes.data.messages import BadRow

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

    prompt = templates.render(tokenizer, [QUESTION], tools, add_generation_prompt=True)
    names = [tool["function"]["name"] for tool in tools or []]
    if not all(name in prompt for name in names):
        raise BadRow(f"the tokenizer's chat template does not write the tools {', '.join(names)}")

    role = "tool" if tools else "user"
    # The name is that of a tool; templates ignore it in a message of a user.
    reply = {"role": role, "name": CALL["function"]["name"], "content": REPLY}
    written = decode(tokenizer, ids_after_answer(tokenizer, [reply], tools))
    if REPLY not in written:
        raise BadRow(f"the tokenizer's chat template leaves out messages of role {role!r}")


def refuse_rewritten_answers(tokenizer) -> None:
    """Refuses a template that writes an answer differently once another message follows it.

    Example of one that does: its generation prompt ends with `<bot><think>`, and it writes an
    earlier answer as `<bot>Yes`.
    """
    prompt = templates.render(tokenizer, [QUESTION], add_generation_prompt=True)
    text, end_of_answer = render_beyond_answer(tokenizer, ANSWER, [QUESTION], None)
    up_to_answer = text[:end_of_answer]
    end_token = decode(tokenizer, templates.conventions(tokenizer).end_of_answer)
    # Whitespace around the answer is the model's own.
    answer = up_to_answer.removeprefix(prompt).removesuffix(end_token).strip()
    if not up_to_answer.startswith(prompt) or answer != ANSWER["content"]:
        raise BadRow(
            "the tokenizer's chat template writes an answer differently once it is followed: its "
            f"generation prompt ends with {prompt[-40:]!r}, an earlier answer with "
            f"{up_to_answer[-40:]!r}. So no turn can be appended to what was sampled: give another "
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
    text, end_of_answer = render_beyond_answer(tokenizer, answer, messages, tools)
    beginning = encode_beginning(tokenizer, text[:end_of_answer])
    return encode_after(tokenizer, beginning, text[end_of_answer:])


def render_beyond_answer(
    tokenizer, answer: dict, messages: list[dict], tools: list[dict] | None
) -> tuple[str, int]:
    r"""Renders a conversation that goes on after an answer; also returns where the answer ends.

    Example, with ChatML. The answer is `zqa`, and ends with the first line:

        <|im_start|>user\nzqz<|im_end|>\n<|im_start|>assistant\nzqa<|im_end|>
        \n<|im_start|>user\nToo high.<|im_end|>\n<|im_start|>assistant\n

    Raises:
        BadRow: the template refuses the messages, leaves out the answer, or ends it differently
            once it is followed.
    """
    text = templates.render(
        tokenizer, [QUESTION, answer, *messages], tools, add_generation_prompt=True
    )
    end_token = decode(tokenizer, templates.conventions(tokenizer).end_of_answer)  # maybe ""
    # By what an answer is found: its content or, in templates that drop that of a call, the call.
    words = [answer["content"]]
    words += [call["function"]["name"] for call in answer.get("tool_calls", [])]
    for word in words:
        place = place_after(text, [QUESTION["content"], word, end_token])
        if place is not None:
            return text, place
    raise BadRow(
        "the tokenizer's chat template leaves out an answer, or ends it differently, once it is "
        "followed"
    )


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
