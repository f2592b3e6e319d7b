"""Prompts and answers as token ids: a prompt as a model reads it, an answer as it would write it.

One rule: an answer is what the chat template writes after the generation prompt, up to and
including the token that ends the turn. Texts are cut, and tokenised at the very end, prompt and
answer apart, as at inference. Where a template does otherwise, `odd_templates` finds the answer.
"""

from typing import NamedTuple

from preference_recipes.data import odd_templates, rendering, thoughts
from preference_recipes.data.messages import LeftOut, learned_turns, text_of

REWRITES_TURNS = "the chat template writes the earlier turns of an answer differently later on"
# What the run says about data whose template does something that a user should know about.
DROPS_ROLE = "messages that the chat template does not write"
KEEPS_THOUGHT = "thinking that the chat template takes for a part of the answer"
APPENDS_EOS = "the chat template writes no end of a turn, so the EOS is appended to what is learned"


class Prompt(NamedTuple):
    """What a model reads before it answers, and what the user should know about it."""

    text: str
    ids: list[int]
    notes: list[str]


class TokenSequence(NamedTuple):
    """What the model reads at once: token ids, and which of them it should learn to write."""

    ids: list[int]
    loss_mask: list[bool]


def encode_answers(
    tokenizer, prompt: list[dict], answers: list[list[dict]], tools=None, is_text: bool = False
) -> tuple[list[int], list[TokenSequence], list[str]]:
    """Returns the token ids of a conversation's prompt and of its answers, and notes.

    If the generation prompt opens a thought (`<bot><think>`), answers with a thought and without
    one share the prompt `<bot>`. Raises `LeftOut` for an answer that is not in one sequence.
    """
    if is_text:
        prompt_ids, *answer_ids = encode_plain(tokenizer, *map(text_of, (prompt, *answers)))
        return prompt_ids, [TokenSequence(ids, [True] * len(ids)) for ids in answer_ids], []
    asked = encode_prompt(tokenizer, prompt, tools)
    if not answers:
        return asked.ids, [], asked.notes
    encoded = [encode_answer(tokenizer, asked, prompt, answer, tools) for answer in answers]
    contexts = [context for context, _, _ in encoded]
    n = rendering.n_common(contexts[0], contexts[-1])  # all answers share these
    sequences = []
    for context, (ids, loss_mask), _ in encoded:
        prefix = context[n:]  # the rest of its prompt becomes a part of the answer
        loss_mask = [True] * len(prefix) + loss_mask
        if n == 0:  # nothing predicts a first token
            loss_mask[0] = False
        sequences.append(TokenSequence(prefix + ids, loss_mask))
    return contexts[0][:n], sequences, sum((notes for *_, notes in encoded), asked.notes)


def encode_answer(
    tokenizer, asked: Prompt, prompt: list[dict], answer: list[dict], tools
) -> tuple[list[int], TokenSequence, list[str]]:
    """Returns the ids before an answer, the answer as one sequence, and notes."""
    messages = prompt + answer
    turns = learned_turns(messages, len(prompt))
    if turns == [len(prompt)]:
        context, ids, notes = encode_turn(tokenizer, asked, prompt, answer[0], tools)
        return context, TokenSequence(ids, [True] * len(ids)), notes
    # The answer has several messages.
    sequences, _, notes = encode_conversation(tokenizer, messages, turns, tools, learn_each=True)
    if len(sequences) > 1:
        raise LeftOut(REWRITES_TURNS)
    [(ids, loss_mask)] = sequences
    begins_learned = turns[0] == len(prompt)
    start = loss_mask.index(True) if begins_learned else rendering.n_common(asked.ids, ids)
    return ids[:start], TokenSequence(ids[start:], loss_mask[start:]), notes


def encode_conversation(
    tokenizer,
    messages: list[dict],
    turns: list[int],
    tools: list[dict] | None = None,
    learn_all: bool = False,
    learn_each: bool = False,
) -> tuple[list[TokenSequence], list[int], list[str]]:
    """Returns the sequences of a conversation, the ids before its last answer, and notes.

    There is one sequence, unless the template writes earlier turns differently once later ones
    follow. Then each answer has its own, with the history as the model reads it before that answer.
    Raises `LeftOut` if nothing is left to learn.

    Args:
        turns: which messages are answers to learn.
        learn_all: learn what precedes the answers, too, in one sequence.
        learn_each: raise `LeftOut` also if the template does not write one of several answers.
    """
    sequences: list[TokenSequence] = []
    prompt_ids: list[int] = []
    notes: list[str] = []
    for turn in turns:
        history = messages[:turn]
        prompt = encode_prompt(tokenizer, history, tools)
        if turn == turns[-1]:
            notes += prompt.notes
        try:
            context, ids, turn_notes = encode_turn(
                tokenizer, prompt, history, messages[turn], tools
            )
        except LeftOut as why:
            if learn_each or (turn == turns[-1] and not sequences):
                raise
            notes.append(str(why))
            continue
        notes += turn_notes
        prompt_ids = prompt.ids
        before, loss_mask = sequences[-1] if sequences else TokenSequence([], [])
        if context[: len(before)] == before:  # the same history: one sequence
            del sequences[-1:]
        elif learn_all:
            raise LeftOut(REWRITES_TURNS)
        else:
            loss_mask = []
        loss_mask = loss_mask + [learn_all] * (len(context) - len(loss_mask)) + [True] * len(ids)
        # Nothing predicts a sequence's first token.
        sequences.append(TokenSequence(context + ids, [False, *loss_mask[1:]]))
    return sequences, prompt_ids, notes


def encode_prompt(tokenizer, messages: list[dict], tools: list[dict] | None = None) -> Prompt:
    """Returns what a model reads before it answers messages; notes name roles that are left out."""
    text = rendering.render(tokenizer, messages, tools, add_generation_prompt=True)
    notes = [
        f"{DROPS_ROLE} (role {message['role']!r})"
        for place, message in enumerate(messages)
        if message["role"] != "assistant"
        and message["content"].strip() not in text
        and rendering.ignores(
            tokenizer, messages, tools, place, content=message["content"] + rendering.MARK
        )
    ]
    return Prompt(text, rendering.encode(tokenizer, text), notes)


def encode_turn(
    tokenizer, prompt: Prompt, history: list[dict], answer: dict, tools
) -> tuple[list[int], list[int], list[str]]:
    """Returns the ids before an answer, those of the answer including its end, and notes."""
    answer = rendering.to_write(tokenizer, answer)
    whole = rendering.render(tokenizer, [*history, answer], tools)
    context = prompt.text
    if not history:
        context = odd_templates.find_opening(tokenizer, tools, whole)
    text = whole.removeprefix(context)
    notes: list[str] = []
    is_plain = not answer.get("tool_calls") and not thoughts.thinking_of(answer)
    if not (whole.startswith(context) and is_plain and answer["content"].strip() in text):
        context, text, notes = odd_templates.find_answer(
            tokenizer, context, history, answer, tools, whole
        )
    kept = thoughts.find_thought(answer["content"])
    if kept and rendering.is_foreign(tokenizer, kept.closer):
        notes = [*notes, KEEPS_THOUGHT]
    text, is_ended = up_to_end(tokenizer, text)
    if not text:
        raise LeftOut(odd_templates.DROPS_ANSWER)
    if not is_ended:
        text += tokenizer.eos_token
        notes = [*notes, APPENDS_EOS]
    return (
        rendering.encode(tokenizer, context),
        rendering.encode_after(tokenizer, context, text),
        notes,
    )


def up_to_end(tokenizer, text: str) -> tuple[str, bool]:
    """Returns an answer up to and including the token that ends it, and whether there is one."""
    whole, end, _ = rendering.ending_of(tokenizer)
    if text.endswith(whole):
        return text.removesuffix(whole) + end, bool(end)
    answer, eos, rest = text.rpartition(tokenizer.eos_token)
    rest = rendering.added_tokens(tokenizer).sub("", rest)
    if eos and not rest.strip():  # at most the next turn's header (Command A)
        return answer + eos, True
    ends = [found.end() for found in rendering.added_tokens(tokenizer).finditer(text)]
    if end and ends and not text[ends[-1] :].strip():  # such as a tool call's (gpt-oss)
        return text[: ends[-1]], True
    return text, False


def encode_plain(tokenizer, prompt: str, *answers: str) -> tuple[list[int], ...]:
    """Returns the ids of a prompt, with the tokenizer's BOS, and of each answer, with an EOS."""
    prompt_ids = rendering.encode(tokenizer, prompt)
    answer_ids = [rendering.encode_after(tokenizer, prompt, answer) for answer in answers]
    eos = [tokenizer.eos_token_id]
    if sum(answer_ids, prompt_ids)[:1] != rendering.bos_of(tokenizer):
        prompt_ids = rendering.bos_of(tokenizer) + prompt_ids
    return prompt_ids, *(ids if ids[-1:] == eos else ids + eos for ids in answer_ids)
