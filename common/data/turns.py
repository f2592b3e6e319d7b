"""The token ids between two answers of a conversation that goes on while a model samples.

A turn is never tokenised again: what comes back is appended to the ids that were sampled. So a
template must go on with a conversation by adding to what it wrote, or it is refused.
"""

from typing import Any

from common.data import templates
from common.data.ids import added_tokens, decode, encode_after, encode_beginning
from common.data.messages import BadRow

# A conversation of which only what follows its answer is read.
QUESTION: dict[str, Any] = {"role": "user", "content": "zqz"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "zqa"}
CALL: dict[str, Any] = {"type": "function", "function": {"name": "zqf", "arguments": {}}}
ANSWER_WITH_CALL: dict[str, Any] = {**ANSWER, "tool_calls": [CALL]}
# Splits the text of a control token, and is not seen.
ZERO_WIDTH_SPACE = "\u200b"


def check(tokenizer, tools: list[dict] | None = None) -> None:
    """Refuses a template that cannot go on with a conversation after what a model has sampled.

    Args:
        tools: with them, results of calls come back; without, messages of a user.

    Raises:
        BadRow: it leaves out what comes back, or writes an answer otherwise once it is followed,
            such as one whose generation prompt opens a thought that later turns do not have.
    """
    text, place = rendered(tokenizer, ANSWER, [QUESTION], None)
    prompt = templates.render(tokenizer, [QUESTION], add_generation_prompt=True)
    end = decode(tokenizer, templates.conventions(tokenizer).end_of_answer)
    # Whitespace around the answer is the model's own.
    written = text[len(prompt) : place].removesuffix(end).strip()
    if not text.startswith(prompt) or written != ANSWER["content"]:
        raise BadRow(
            "the tokenizer's chat template writes an answer otherwise once it is followed: its "
            f"generation prompt ends with {prompt[-40:]!r}, a later answer with "
            f"{text[:place][-40:]!r}. So no turn can be appended to what was sampled: give another "
            "template by --chat_template FILE, or switch off thinking by --chat_template_kwargs"
        )
    names = [tool["function"]["name"] for tool in tools or []]
    prompt = templates.render(tokenizer, [QUESTION], tools, add_generation_prompt=True)
    if not all(name in prompt for name in names):
        raise BadRow(f"the tokenizer's chat template does not write the tools {', '.join(names)}")
    role = "tool" if tools else "user"
    back = {"role": role, "name": CALL["function"]["name"], "content": "zqr"}
    if "zqr" not in decode(tokenizer, ids_after_answer(tokenizer, [back], tools)):
        raise BadRow(f"the tokenizer's chat template leaves out messages of role {role!r}")


def ids_after_answer(tokenizer, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
    r"""Returns what the template writes after an answer's last token, up to the next answer.

    Example: of ChatML, after the message `Too high.` of a user, the ids of

        \n<|im_start|>user\nToo high.<|im_end|>\n<|im_start|>assistant\n

    Args:
        messages: what comes back, at least one message. Text of control tokens in them is no
            control token, see `harmless`.
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
    """Returns a conversation that goes on after an answer, and the place where the answer ends."""
    text = templates.render(
        tokenizer, [QUESTION, answer, *messages], tools, add_generation_prompt=True
    )
    end = decode(tokenizer, templates.conventions(tokenizer).end_of_answer)
    after_question = text.find(QUESTION["content"])
    for word in (answer["content"], CALL["function"]["name"]):
        start = text.find(word, after_question)
        if start >= 0:
            break
    found = text.find(end, start)
    if min(after_question, start, found) < 0:
        raise BadRow("the tokenizer's chat template does not write an answer once it is followed")
    return text, found + len(end) if end else start + len(word)


def harmless(tokenizer, message: dict) -> dict:
    """Returns a message in whose text no control token begins or ends a turn.

    An environment may return anything, such as what the model wrote itself. `<|im_end|>` gets a
    zero-width space after its first character.
    """
    content = message["content"]
    for token in added_tokens(tokenizer).values():
        text = token.content
        if len(text) > 1 and not text.isspace() and text in content:
            content = content.replace(text, text[0] + ZERO_WIDTH_SPACE + text[1:])
    return {**message, "content": content}
