"""Prompts and answers as token ids: a prompt as a model reads it, an answer as it would write it.

One rule: an answer is what the chat template writes after the generation prompt, up to and with
the token that ends the turn. Cutting is done on texts. They are tokenised at the very end, prompt
and answer apart, as at inference.

The usual path is `encode_answers`, `encode_one`, `encode_turn`. The template writes the prompt,
then the prompt with its answer, and what that has more is the answer.
"""

import re
from typing import NamedTuple

from preference_recipes.data import thoughts
from preference_recipes.data.messages import Arguments, BadRow, learned_turns
from preference_recipes.data.rendering import (
    QUESTION,
    added_tokens,
    bos_of,
    encode,
    encode_after,
    ending_of,
    is_foreign,
    n_common,
    render,
    to_write,
)

# For trials, as `QUESTION`: what an answer says, and a tool that it calls. The first character, of
# private use, begins no other answer.
MARK = "\ue000zqzplace"
MARKED = {"role": "assistant", "content": MARK}
CALLED = "zqf"

# Why an answer is left out.
DROPS_CALLS = "tool calls are not learned, because the chat template does not write them"
DROPS_ANSWER = "answers are not learned, because the chat template does not write them"
REWRITES_TURNS = "the chat template writes the earlier turns of an answer differently later on"
# What the run says about data whose template does something that a user should know about.
DROPS_ROLE = "messages that the chat template does not write"
DROPS_THOUGHT = "the chat template drops the thinking of answers, so it is put back in"
KEEPS_THOUGHT = "thinking that the chat template takes for a part of the answer"
APPENDS_EOS = "the chat template writes no end of a turn, so the EOS is appended to what is learned"
FOLLOWS_LESS = "answers do not continue the prompt: they are learned after what they share with it"
# Why no turn can be appended to what a model sampled.
UNFIT = "the tokenizer's chat template (--chat_template, --chat_template_kwargs)"


class Prompt(NamedTuple):
    """What a model reads before it answers, and what the user should know about it."""

    text: str
    ids: list[int]
    notes: list[str]


class Sequence(NamedTuple):
    """What the model reads at once: token ids, and which of them it should learn to write."""

    ids: list[int]
    learned: list[bool]


NOTHING = Sequence([], [])


# ============================================================ the usual path
def encode_answers(
    tokenizer, prompt, answers: list, tools=None
) -> tuple[list[int], list[Sequence], list[str]]:
    """Returns the token ids of a prompt and of one or two answers to it, and notes.

    All are strings, or message lists. If one answer is left out, no answer has ids. What only one
    answer needs before it belongs to that answer: after `<bot><think>` the prompt of `No` and of
    `<think>Why</think>Yes` is `<bot>`.
    """
    if isinstance(prompt, str):
        prompt_ids, *ids_of_answers = encode_plain(tokenizer, prompt, *answers)
        return prompt_ids, [Sequence(ids, [True] * len(ids)) for ids in ids_of_answers], []
    read = encode_prompt(tokenizer, prompt, tools)
    notes = read.notes
    contexts = []
    sequences = []
    for answer in answers:
        context, sequence, of_answer = encode_one(tokenizer, read, prompt, answer, tools)
        notes = notes + of_answer
        if not sequence.ids:
            return read.ids, [sequence] * len(answers), notes
        contexts.append(context)
        sequences.append(sequence)
    n = n_common(contexts[0], contexts[-1])
    after_prompt = [
        Sequence(context[n:] + ids, [True] * len(context[n:]) + learned)
        for context, (ids, learned) in zip(contexts, sequences)
    ]
    if n == 0:  # nothing predicts a first token
        after_prompt = [Sequence(ids, [False, *learned[1:]]) for ids, learned in after_prompt]
    return contexts[0][:n], after_prompt, notes


def encode_one(
    tokenizer, read: Prompt, prompt: list[dict], answer: list[dict], tools
) -> tuple[list[int], Sequence, list[str]]:
    """Returns the ids before an answer, the answer, and notes; without ids if it is left out."""
    messages = prompt + answer
    turns = learned_turns(messages, len(prompt))
    if turns == [len(prompt)]:
        context, ids, notes = encode_turn(tokenizer, read, prompt, answer[0], tools)
        return context, Sequence(ids, [True] * len(ids)), notes
    # The answer has several messages.
    sequences, _, notes = encode_conversation(tokenizer, messages, turns, tools)
    if len(sequences) > 1:
        notes.append(REWRITES_TURNS)
    if len(sequences) != 1 or why_left_out(notes):
        return [], NOTHING, notes
    [(ids, learned)] = sequences
    start = learned.index(True)
    if turns[0] > len(prompt):  # it begins with what is not learned
        start = n_common(read.ids, ids)
    return ids[:start], Sequence(ids[start:], learned[start:]), notes


def encode_conversation(
    tokenizer, messages: list[dict], turns: list[int], tools=None, learn_all: bool = False
) -> tuple[list[Sequence], list[int], list[str]]:
    """Returns the sequences of a conversation, the ids before its last answer, and notes.

    There is one sequence, unless the template writes earlier turns differently once later ones
    follow. Then each answer has its own, with the history as the model reads it before that answer.

    Args:
        turns: which messages are answers to learn.
        learn_all: learn what precedes the answers, too; of several sequences none is learned.
    """
    sequences: list[Sequence] = []
    prompt_ids: list[int] = []
    notes: list[str] = []
    for turn in turns:
        history = messages[:turn]
        prompt = encode_prompt(tokenizer, history, tools)
        context, ids, of_answer = encode_turn(tokenizer, prompt, history, messages[turn], tools)
        notes += of_answer + (prompt.notes if turn == turns[-1] else [])
        if not ids:
            continue
        prompt_ids = prompt.ids
        before, learned = sequences[-1] if sequences else NOTHING
        if context[: len(before)] == before:  # the same history: one sequence
            del sequences[-1:]
        elif learn_all:
            return [], prompt_ids, [REWRITES_TURNS]
        else:
            learned = []
        learned = learned + [learn_all] * (len(context) - len(learned)) + [True] * len(ids)
        # Nothing predicts a sequence's first token.
        sequences.append(Sequence(context + ids, [False, *learned[1:]]))
    return sequences, prompt_ids, notes


def encode_prompt(tokenizer, messages: list[dict], tools=None) -> Prompt:
    """Returns what a model reads before it answers these messages; nothing if there are none.

    Notes name the roles that the template leaves out without a word, as it does at inference.
    """
    text = render(tokenizer, messages, tools, add_generation_prompt=True)
    notes = [
        f"{DROPS_ROLE} (role {message['role']!r})"
        for place, message in enumerate(messages)
        if message["role"] != "assistant" and message["content"].strip() not in text
        if drops(tokenizer, messages, tools, place, content=message["content"] + MARK)
    ]
    return Prompt(text, encode(tokenizer, text), notes)


def encode_turn(
    tokenizer, prompt: Prompt, history: list[dict], answer: dict, tools
) -> tuple[list[int], list[int], list[str]]:
    """Returns the ids before an answer, those of the answer up to and with its end, and notes.

    The answer has no ids if the template does not write it.
    """
    answer = to_write(tokenizer, answer)
    whole = render(tokenizer, [*history, answer], tools)
    context = prompt.text if history else before_first(tokenizer, tools, whole)
    if context is None:
        return [], [], [DROPS_ANSWER]
    text = whole.removeprefix(context)
    notes: list[str] = []
    is_plain = not answer.get("tool_calls") and not thoughts.of_message(answer)
    if not (whole.startswith(context) and is_plain and answer["content"].strip() in text):
        context, text, notes = find_answer(tokenizer, context, history, answer, tools, whole)
    kept = thoughts.at_start(answer["content"])
    if kept and is_foreign(tokenizer, kept.closer):
        notes = [*notes, KEEPS_THOUGHT]
    text, is_ended = up_to_end(tokenizer, text)
    if text and not is_ended:
        text += tokenizer.eos_token
        notes = [*notes, APPENDS_EOS]
    return encode(tokenizer, context), encode_after(tokenizer, context, text), notes


def before_first(tokenizer, tools, whole: str) -> str | None:
    """Returns what a model reads before an answer that begins a conversation, `whole`.

    That is what the template itself writes first, such as a system message, and the generation
    prompt. None: it takes the answer for the user's.
    """
    asked = render(tokenizer, [QUESTION], tools)
    prompt = render(tokenizer, [QUESTION], tools, add_generation_prompt=True)
    opening = prompt[n_common(asked, prompt) :]
    written = thoughts.AT_END.sub("", opening)  # a later answer may have another thought there
    if not written:
        return ""
    before, found, _ = whole.partition(written)
    return before + opening if found else None


def up_to_end(tokenizer, text: str) -> tuple[str, bool]:
    """Returns an answer up to and with the token that ends it, and whether there is one.

    A tool call may end with another token than other answers (gpt-oss).
    """
    whole, end, _ = ending_of(tokenizer)
    if text.endswith(whole):
        return text.removesuffix(whole) + end, bool(end)
    answer, eos, header = text.rpartition(tokenizer.eos_token)
    if eos and not added_tokens(tokenizer).sub("", header).strip():  # the next turn's (Command A)
        return answer + eos, True
    ends = [found.end() for found in added_tokens(tokenizer).finditer(text)]
    if end and ends and not text[ends[-1] :].strip():
        return text[: ends[-1]], True
    return text, False


def encode_plain(tokenizer, prompt: str, *answers: str) -> tuple[list[int], ...]:
    """Returns the ids of a prompt and of each answer, for strings without a chat template.

    The prompt gets a BOS if this tokenizer adds one, each answer an EOS, unless they have them.
    """
    prompt_ids = encode(tokenizer, prompt)
    answer_ids = [encode_after(tokenizer, prompt, answer) for answer in answers]
    eos = [tokenizer.eos_token_id]
    if sum(answer_ids, prompt_ids)[:1] != bos_of(tokenizer):
        prompt_ids = bos_of(tokenizer) + prompt_ids
    return prompt_ids, *(ids if ids[-1:] == eos else ids + eos for ids in answer_ids)


def why_left_out(notes: list[str]) -> str:
    """Returns the note that says an answer is not written; "" if there is none."""
    reasons = (DROPS_CALLS, DROPS_ANSWER, REWRITES_TURNS)
    return next((text for text in notes if text in reasons), "")


# ============================================================ what a template writes differently
def find_answer(
    tokenizer, prompt: str, history: list[dict], answer: dict, tools, whole: str
) -> tuple[str, str, list[str]]:
    """Returns the context of an answer, the answer with all that follows it, and notes.

    The answer is "" if the template drops its content or a call of it. Thinking that it drops is
    put back, and so is the history as the prompt has it.
    """
    messages = [*history, answer]
    calls = answer.get("tool_calls", [])
    fewer = [calls[:place] + calls[place + 1 :] for place in range(len(calls))]  # by one each
    if any(drops(tokenizer, messages, tools, -1, tool_calls=others) for others in fewer):
        return prompt, "", [DROPS_CALLS]
    thought = ""  # that the template drops
    bare = thoughts.removed(answer)
    if thoughts.of_message(answer):
        # Some templates drop the whitespace after it, too. It comes back with the thinking.
        stripped = {**bare, "content": bare["content"].lstrip()}
        rendered = [render(tokenizer, [*history, other], tools) for other in (bare, stripped)]
        if whole in rendered:
            thought = thoughts.written(answer, str(tokenizer.chat_template))
            bare = stripped
            whole = rendered[1]
    whole = as_read(tokenizer, prompt, history, tools, whole)
    context, text = split_answer(prompt, whole, thinks=bool(thought))
    longer = answer["content"] + MARK  # a template may drop all from an open marker on
    is_there = bare["content"].strip() in text
    if not is_there and drops(tokenizer, messages, tools, -1, content=longer):
        return prompt, "", [DROPS_ANSWER]
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

    If a thought will be put in front of the answer, 2 is as 4.
    """
    if whole.startswith(prompt):  # 1.
        return prompt, whole[len(prompt) :]
    n = n_common(prompt, whole)
    inside = [found.start() for found in thoughts.ANY_MARKER.finditer(prompt) if found.end() > n]
    n = min([n, *inside])
    only_in_prompt = prompt[n:]
    is_thought = thoughts.CLOSED.fullmatch(only_in_prompt) and not thinks
    if is_thought or only_in_prompt.isspace():  # 2, 3. A model would give this answer after it.
        return prompt, whole[n:]
    opener, closer = thoughts.opened_by(only_in_prompt)
    if opener and closer in whole[n:].partition(opener)[0]:  # 6. It goes on with that thought.
        return prompt, whole[n:]
    # 4, 5. The rest of the prompt leads to another answer. An empty thought leads to none.
    ends = thoughts.AT_END.search(prompt)
    n = min(n, ends.start()) if ends else n
    return prompt[:n], whole[n:]


def as_read(tokenizer, prompt: str, history: list[dict], tools, whole: str) -> str:
    """Returns `whole`, a history with its answer, with the history as the prompt has it.

    gpt-oss drops the thinking of a tool call as soon as an answer follows; Mistral writes a system
    message into the last message of the user, and not at all once that is answered. The answer
    begins after the last generation prompt before its content. Without one it begins with its
    content: after a tool's result Gemma 4 writes an answer into the turn of the call.
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
    """Returns what `split_answer` does, with the thinking that the template drops of the answer.

    It goes where the answer begins, in place of an empty thought there or at the end of the prompt.
    """
    context = thoughts.AT_END.sub("", context)
    text = thoughts.EMPTY.sub("", text)
    content = text.lstrip()
    text = text.removesuffix(content) + thought + content
    if thoughts.CLOSED.fullmatch(prompt[len(context) :]):
        return context, text
    # What opens the thought may be the prompt's.
    return split_answer(prompt, context + text)


def drops(tokenizer, messages: list[dict], tools, place: int, **changes) -> bool:
    """Whether the template writes messages as if one had these changes."""
    changed = list(messages)
    changed[place] = {**messages[place], **changes}
    try:
        return render(tokenizer, changed, tools) == render(tokenizer, messages, tools)
    except Exception:  # it wants what is missing
        return False


# ============================================================ between two answers
def check_turns(tokenizer, tools: list[dict] | None = None) -> None:
    """Refuses a template that cannot continue a conversation after what a model has sampled.

    A turn is never tokenised again, so a template must add to what it wrote.
    """
    prompt = render(tokenizer, [QUESTION], add_generation_prompt=True)
    before, _ = render_beyond_answer(tokenizer, [QUESTION])
    answer = before.removeprefix(prompt).removesuffix(ending_of(tokenizer).end)
    if answer.strip() != MARK:  # whitespace around the answer is the model's own
        raise BadRow(f"{UNFIT} writes an answer differently once it is followed")
    prompt = render(tokenizer, [QUESTION], tools, add_generation_prompt=True)
    names = [tool["function"]["name"] for tool in tools or []]
    if not all(name in prompt for name in names):
        raise BadRow(f"{UNFIT} does not write the tools {', '.join(names)}")
    role = "tool" if tools else "user"
    reply = {"role": role, "name": CALLED, "content": "zqr"}  # the name of the tool
    if "zqr" not in render_beyond_answer(tokenizer, [reply], tools)[1]:
        raise BadRow(f"{UNFIT} leaves out messages of role {role!r}")


def ids_after_answer(tokenizer, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
    r"""Returns what the template writes after an answer's last token, up to the next answer.

    Of ChatML `\n<|im_start|>user\nToo high.<|im_end|>\n<|im_start|>assistant\n`. What comes back
    may be anything, so control tokens spelled out in it are split by an invisible space.
    """
    harmless = []
    for message in messages:
        split = added_tokens(tokenizer).sub(
            lambda token: token[0][:1] + "\u200b" + token[0][1:], message["content"]
        )
        harmless.append({**message, "content": split})
    return encode_after(tokenizer, *render_beyond_answer(tokenizer, harmless, tools))


def render_beyond_answer(tokenizer, messages: list[dict], tools=None) -> tuple[str, str]:
    """Renders what follows an answer; returns the text up to the answer's end, and the rest."""
    answer: dict = {**MARKED}
    if messages[0]["role"] == "tool":
        function = {"name": CALLED, "arguments": Arguments()}
        # Mistral's templates want ids of nine characters.
        answer["tool_calls"] = [{"type": "function", "id": "000000000", "function": function}]
    text = render(tokenizer, [QUESTION, answer, *messages], tools, add_generation_prompt=True)
    word = MARK if MARK in text else CALLED  # a template may drop the content of a call
    end = ending_of(tokenizer).end  # maybe ""
    start = text.find(end, text.find(word) + len(word)) if word in text else -1
    if start < 0:
        raise BadRow(f"{UNFIT} leaves out an answer, or its end, once it is followed")
    return text[: start + len(end)], text[start + len(end) :]
