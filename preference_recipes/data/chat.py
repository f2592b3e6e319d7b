"""Encodes prompts as a model reads them, and answers as it would write them, as token ids.

There is one rule: an answer is what the chat template writes after the generation prompt, up to and
including the token that ends the turn. Texts are split first and tokenised last, prompt and answer
separately, as at inference. Where a template differs, `odd_templates` finds the answer.
"""

from typing import NamedTuple

from preference_recipes.data import odd_templates, rendering, thoughts
from preference_recipes.data.messages import LeftOut, learned_turns, text_of

REWRITES_TURNS = "the chat template writes the earlier turns of an answer differently later on"
# Notes for the user about what a chat template does with the data.
DROPS_ROLE = "messages that the chat template does not write"
KEEPS_THOUGHT = "thinking that the chat template takes for a part of the answer"
APPENDS_EOS = "the chat template writes no end of a turn, so the EOS is appended to what is learned"


class Prompt(NamedTuple):
    """The text that a model reads before it answers, and notes about it for the user."""

    text: str
    ids: list[int]
    notes: list[str]


class TokenSequence(NamedTuple):
    """The token ids that a model reads at once, and which of them it learns to write."""

    ids: list[int]
    loss_mask: list[bool]


def encode_answers(
    tokenizer, prompt: list[dict], answers: list[list[dict]], tools=None, is_text: bool = False
) -> tuple[list[int], list[TokenSequence], list[str]]:
    """Returns the token ids of a conversation's prompt and of its answers, and notes.

    If the generation prompt opens a thought (`<bot><think>`), answers with and without a thought
    share the prompt `<bot>`. Raises `LeftOut` for an answer that needs several sequences.
    """
    if is_text:
        prompt_ids, *answer_ids = encode_plain(tokenizer, *map(text_of, (prompt, *answers)))
        return prompt_ids, [TokenSequence(ids, [True] * len(ids)) for ids in answer_ids], []
    rendered = encode_prompt(tokenizer, prompt, tools)
    if not answers:
        return rendered.ids, [], rendered.notes
    encoded = [encode_answer(tokenizer, rendered, prompt, answer, tools) for answer in answers]
    prefixes = [prefix for prefix, _, _ in encoded]
    n = rendering.n_common(prefixes[0], prefixes[-1])  # the ids that all answers share
    sequences = []
    for prefix, (ids, loss_mask), _ in encoded:
        rest = prefix[n:]  # the rest of the prompt becomes part of the answer
        loss_mask = [True] * len(rest) + loss_mask
        if n == 0:  # nothing predicts a first token
            loss_mask[0] = False
        sequences.append(TokenSequence(rest + ids, loss_mask))
    return prefixes[0][:n], sequences, sum((notes for *_, notes in encoded), rendered.notes)


def encode_answer(
    tokenizer, rendered: Prompt, prompt: list[dict], answer: list[dict], tools
) -> tuple[list[int], TokenSequence, list[str]]:
    """Returns the ids before an answer, the answer as one sequence, and notes."""
    messages = prompt + answer
    turns = learned_turns(messages, len(prompt))
    if turns == [len(prompt)]:
        prefix, ids, notes = encode_turn(tokenizer, rendered, prompt, answer[0], tools)
        return prefix, TokenSequence(ids, [True] * len(ids)), notes
    # The answer has several messages.
    sequences, _, notes = encode_conversation(tokenizer, messages, turns, tools, learn_each=True)
    if len(sequences) > 1:
        raise LeftOut(REWRITES_TURNS)
    [(ids, loss_mask)] = sequences
    learns_first = turns[0] == len(prompt)
    start = loss_mask.index(True) if learns_first else rendering.n_common(rendered.ids, ids)
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

    There is one sequence, unless the template rewrites earlier turns once later ones follow. Then
    each answer has its own, with the history as the model reads it before that answer. Raises
    `LeftOut` if nothing is left to learn.

    Args:
        turns: the indices of the messages that are answers to learn.
        learn_all: also learn what precedes the answers, in one sequence.
        learn_each: also raise `LeftOut` if the template omits one of several answers.
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
            prefix, ids, turn_notes = encode_turn(tokenizer, prompt, history, messages[turn], tools)
        except LeftOut as left_out:
            if learn_each or (turn == turns[-1] and not sequences):
                raise
            notes.append(str(left_out))
            continue
        notes += turn_notes
        prompt_ids = prompt.ids
        before, loss_mask = sequences[-1] if sequences else TokenSequence([], [])
        if prefix[: len(before)] == before:  # the same history: one sequence
            del sequences[-1:]
        elif learn_all:
            raise LeftOut(REWRITES_TURNS)
        else:
            loss_mask = []
        loss_mask = loss_mask + [learn_all] * (len(prefix) - len(loss_mask)) + [True] * len(ids)
        # Nothing predicts a sequence's first token.
        sequences.append(TokenSequence(prefix + ids, [False, *loss_mask[1:]]))
    return sequences, prompt_ids, notes


def encode_prompt(tokenizer, messages: list[dict], tools: list[dict] | None = None) -> Prompt:
    """Returns the prompt for an answer to messages; its notes name roles that are left out."""
    text = rendering.render(tokenizer, messages, tools, add_generation_prompt=True)
    notes = [
        f"{DROPS_ROLE} (role {message['role']!r})"
        for index, message in enumerate(messages)
        if message["role"] != "assistant"
        and message["content"].strip() not in text
        and rendering.ignores(
            tokenizer, messages, tools, index, content=message["content"] + rendering.MARK
        )
    ]
    return Prompt(text, rendering.encode(tokenizer, text), notes)


def encode_turn(
    tokenizer, prompt: Prompt, history: list[dict], answer: dict, tools
) -> tuple[list[int], list[int], list[str]]:
    """Returns the ids before an answer, those of the answer including its end, and notes."""
    answer = rendering.to_write(tokenizer, answer)
    whole = rendering.render(tokenizer, [*history, answer], tools)
    prefix = prompt.text
    if not history:
        prefix = odd_templates.find_opening(tokenizer, tools, whole)
    text = whole.removeprefix(prefix)
    notes: list[str] = []
    is_plain = not answer.get("tool_calls") and not thoughts.thinking_of(answer)
    if not (whole.startswith(prefix) and is_plain and answer["content"].strip() in text):
        prefix, text, notes = odd_templates.find_answer(
            tokenizer, prefix, history, answer, tools, whole
        )
    thought = thoughts.find_thought(answer["content"])
    if thought and rendering.is_foreign(tokenizer, thought.closer):
        notes = [*notes, KEEPS_THOUGHT]
    text, is_ended = up_to_end(tokenizer, text)
    if not text:
        raise LeftOut(odd_templates.DROPS_ANSWER)
    if not is_ended:
        text += tokenizer.eos_token
        notes = [*notes, APPENDS_EOS]
    return (
        rendering.encode(tokenizer, prefix),
        rendering.encode_after(tokenizer, prefix, text),
        notes,
    )


def up_to_end(tokenizer, text: str) -> tuple[str, bool]:
    """Returns an answer up to and including the token that ends it, and whether there is one."""
    whole, end, _ = rendering.ending_of(tokenizer)
    if text.endswith(whole):
        return text.removesuffix(whole) + end, bool(end)
    answer, eos, rest = text.rpartition(tokenizer.eos_token)
    rest = rendering.added_tokens(tokenizer).sub("", rest)
    if eos and not rest.strip():  # only the next turn's header, if anything (Command A)
        return answer + eos, True
    ends = [marker.end() for marker in rendering.added_tokens(tokenizer).finditer(text)]
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
