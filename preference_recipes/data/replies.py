"""Encodes what a chat template writes between a sampled answer and the next one.

Turns are never tokenised again, so a template must only append to what it wrote before.
"""

from preference_recipes.data import rendering
from preference_recipes.data.messages import Arguments, BadRow

CALLED = "zqf"  # the name of a tool, for trials
# Begins the reasons why no turn can be appended.
UNFIT = "the tokenizer's chat template (--chat_template, --chat_template_kwargs)"


def check_turns(tokenizer, tools: list[dict] | None = None) -> None:
    """Raises `BadRow` if the template cannot continue a conversation after a sampled answer."""
    prompt = rendering.render(tokenizer, [rendering.QUESTION], add_generation_prompt=True)
    before, _ = render_beyond_answer(tokenizer, [rendering.QUESTION])
    answer = before.removeprefix(prompt).removesuffix(rendering.ending_of(tokenizer).end)
    if answer.strip() != rendering.MARK:  # whitespace around the answer is the model's own
        raise BadRow(f"{UNFIT} writes an answer differently once it is followed")
    prompt = rendering.render(tokenizer, [rendering.QUESTION], tools, add_generation_prompt=True)
    names = [tool["function"]["name"] for tool in tools or []]
    if not all(name in prompt for name in names):
        raise BadRow(f"{UNFIT} does not write the tools {', '.join(names)}")
    role = "tool" if tools else "user"
    reply = {"role": role, "name": CALLED, "content": "zqr"}  # the name of the tool
    if "zqr" not in render_beyond_answer(tokenizer, [reply], tools)[1]:
        raise BadRow(f"{UNFIT} leaves out messages of role {role!r}")


def ids_after_answer(tokenizer, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
    """Returns the ids that the template writes from an answer's last token to the next answer.

    Control tokens spelled out in the messages are split by an invisible space.
    """
    harmless = []
    for message in messages:
        split = rendering.added_tokens(tokenizer).sub(
            lambda token: token[0][:1] + "\u200b" + token[0][1:], message["content"]
        )
        harmless.append({**message, "content": split})
    return rendering.encode_after(tokenizer, *render_beyond_answer(tokenizer, harmless, tools))


def render_beyond_answer(tokenizer, messages: list[dict], tools=None) -> tuple[str, str]:
    """Renders an answer with what follows; returns the text to the answer's end, and the rest."""
    answer: dict = {**rendering.MARKED}
    if messages[0]["role"] == "tool":
        function = {"name": CALLED, "arguments": Arguments()}
        # Mistral's templates want ids of nine characters.
        answer["tool_calls"] = [{"type": "function", "id": "000000000", "function": function}]
    text = rendering.render(
        tokenizer, [rendering.QUESTION, answer, *messages], tools, add_generation_prompt=True
    )
    word = rendering.MARK if rendering.MARK in text else CALLED  # content beside a call may be lost
    end = rendering.ending_of(tokenizer).end  # maybe ""
    start = text.find(end, text.find(word) + len(word)) if word in text else -1
    if start < 0:
        raise BadRow(f"{UNFIT} leaves out an answer, or its end, once it is followed")
    return text[: start + len(end)], text[start + len(end) :]
