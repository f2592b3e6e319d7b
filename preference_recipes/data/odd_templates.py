"""Finds answers that a chat template does not simply write after the generation prompt."""

import re

from preference_recipes.data import thoughts
from preference_recipes.data.messages import BadRow, LeftOut
from preference_recipes.data.rendering import MARK, MARKED, QUESTION, ignores, n_common, render

# Reasons to leave an answer out, and notes about answers that are kept.
DROPS_CALLS = "tool calls are not learned, because the chat template does not write them"
DROPS_ANSWER = "answers are not learned, because the chat template does not write them"
DROPS_THOUGHT = "the chat template drops the thinking of answers, so it is put back in"
FOLLOWS_LESS = "answers do not continue the prompt: they are learned after what they share with it"


def find_opening(tokenizer, tools, whole: str) -> str:
    """Returns what the template writes before an answer that begins a conversation, `whole`.

    Raises `LeftOut` if the template takes the answer for the user's message.
    """
    question = render(tokenizer, [QUESTION], tools)
    prompt = render(tokenizer, [QUESTION], tools, add_generation_prompt=True)
    opening = prompt[n_common(question, prompt) :]
    written = thoughts.AT_END.sub("", opening)  # another answer may have another thought there
    if not written:
        return ""
    before, separator, _ = whole.partition(written)
    if not separator:
        raise LeftOut(DROPS_ANSWER)
    return before + opening


def find_answer(
    tokenizer, prompt: str, history: list[dict], answer: dict, tools, whole: str
) -> tuple[str, str, list[str]]:
    """Returns the context of an answer, the answer with all that follows it, and notes.

    Thinking that the template drops is restored, and so is the history of the prompt. Raises
    `LeftOut` if it drops the content or a call, `BadRow` if it merges the answer with the history.
    """
    messages = [*history, answer]
    calls = answer.get("tool_calls", [])
    fewer_calls = [calls[:index] + calls[index + 1 :] for index in range(len(calls))]
    if any(ignores(tokenizer, messages, tools, -1, tool_calls=fewer) for fewer in fewer_calls):
        raise LeftOut(DROPS_CALLS)
    thought = ""  # what the template drops
    bare = thoughts.without_thinking(answer)
    if thoughts.thinking_of(answer):
        # Some templates also drop the whitespace after it, which is restored with the thinking.
        stripped = {**bare, "content": bare["content"].lstrip()}
        rendered = [render(tokenizer, [*history, other], tools) for other in (bare, stripped)]
        if whole in rendered:
            thought = thoughts.render_thinking(answer, str(tokenizer.chat_template))
            bare = stripped
            whole = rendered[1]
    whole = with_history_of(prompt, tokenizer, history, tools, whole)
    context, text = split_answer(prompt, whole, thinks=bool(thought))
    longer = answer["content"] + MARK  # a template may drop everything after an open marker
    is_there = bare["content"].strip() in text
    if not is_there and ignores(tokenizer, messages, tools, -1, content=longer):
        raise LeftOut(DROPS_ANSWER)
    if thought:
        context, text = with_thinking(prompt, context, text, thought)
    if context == prompt:
        return context, text, [DROPS_THOUGHT] if thought else []
    if len(context) < len(render(tokenizer, history, tools)):
        raise BadRow("the chat template writes the history differently before the answer")
    return context, text, [DROPS_THOUGHT if thought else FOLLOWS_LESS]


def split_answer(prompt: str, whole: str, thinks: bool = False) -> tuple[str, str]:
    r"""Returns the context of an answer, and the answer with all that follows it.

       prompt                  whole                   context                 answer
    1. <bot>                   <bot>Yes                <bot>                   Yes
    2. <bot><think></think>    <bot>Yes                <bot><think></think>    Yes
    3. <bot>\n\n               <bot>\nYes              <bot>\n\n               Yes
    4. <bot><think>            <bot>Yes                <bot>                   Yes
    5. <bot><think></think>    <bot><think>Why ...     <bot>                   <think>Why ...
    6. <bot><think>            <bot>Why</think>Yes     <bot><think>            Why</think>Yes

    If a thought will be put in front of the answer, case 2 is treated as case 4.
    """
    if whole.startswith(prompt):  # 1.
        return prompt, whole[len(prompt) :]
    n = n_common(prompt, whole)
    inside = [match.start() for match in thoughts.ANY_MARKER.finditer(prompt) if match.end() > n]
    n = min([n, *inside])
    only_in_prompt = prompt[n:]
    is_thought = thoughts.CLOSED.fullmatch(only_in_prompt) and not thinks
    if is_thought or only_in_prompt.isspace():  # 2, 3. A model would write this answer after it.
        return prompt, whole[n:]
    opener, closer = thoughts.opened_by(only_in_prompt)
    if opener and closer in whole[n:].partition(opener)[0]:  # 6. It continues that thought.
        return prompt, whole[n:]
    # 4, 5. The rest of the prompt leads to another answer. An empty thought leads to none.
    thought_at_end = thoughts.AT_END.search(prompt)
    n = min(n, thought_at_end.start()) if thought_at_end else n
    return prompt[:n], whole[n:]


def with_history_of(prompt: str, tokenizer, history: list[dict], tools, whole: str) -> str:
    """Returns `whole`, a history with its answer, but with the history as it is in the prompt.

    gpt-oss drops the thinking of a tool call as soon as an answer follows. Mistral writes a system
    message into the user's last message. The answer begins after the last generation prompt before
    its content, or with it: Gemma 4 writes the answer into the turn of a call.
    """
    before = render(tokenizer, history, tools)
    if whole.startswith((prompt, before)) or not prompt.startswith(before):
        return whole
    marked = render(tokenizer, [*history, MARKED], tools)
    content_at = n_common(whole, marked)
    if prompt == before and not marked[content_at:].partition(MARK)[0].strip():
        return prompt + whole.removeprefix(whole[:content_at].rstrip())
    generation_prompt = re.sub(rf"\s*({thoughts.OPENERS})\s*$", "", prompt.removeprefix(before))
    start = whole.rfind(generation_prompt, 0, content_at)
    last = history[-1]["content"] if history[-1]["role"] == "assistant" else ""
    is_merged = bool(last) and last in whole[start:content_at]  # two messages in one turn (Gemma 4)
    if start < 0 or is_merged or not generation_prompt:
        return whole
    return prompt[: prompt.rindex(generation_prompt)] + whole[start:]


def with_thinking(prompt: str, context: str, text: str, thought: str) -> tuple[str, str]:
    """Splits like `split_answer`, with the dropped thinking in place of an empty thought."""
    context = thoughts.AT_END.sub("", context)
    text = thoughts.EMPTY.sub("", text)
    content = text.lstrip()
    text = text.removesuffix(content) + thought + content
    if thoughts.CLOSED.fullmatch(prompt[len(context) :]):
        return context, text
    # The prompt may open the thought.
    return split_answer(prompt, context + text)
