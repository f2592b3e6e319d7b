"""Prompts and answers as token ids: a prompt as a model reads it, an answer as it would write it.

One rule: an answer is what the chat template writes after the generation prompt, up to and with
the token that ends the turn. All cutting is done on texts, which are tokenised at the very end,
prompt and answer apart, as at inference.

`encode_turn` is the usual path: it renders the prompt, and then the prompt with its answer. The
second text begins with the first; what follows, up to the token that ends the turn, is the answer.
The exceptions have sections of their own below:

    the template ...                                      so ...
    writes more in the prompt than before an answer       the answer follows what both begin with,
                                                          or the prompt, see `split_answer`
    rewrites the history once an answer follows           the prompt's history is put back
    drops the thinking of the answer                      it is put back, see `with_thinking`
    drops a content or a call of the answer               the row is left out, and named
    drops a part of the history                           so it does at inference: a note says it
    wants contents or arguments in another form           a trial finds the form: `rendering.Style`

Of an answer of several messages only what the model writes is learned, as the flags `learned` say.
"""

import re
from typing import NamedTuple

from preference_recipes.data import thoughts
from preference_recipes.data.messages import BadRow, is_learned, learned_turns
from preference_recipes.data.rendering import (
    CALL,
    CALLED,
    MARK,
    MARKED,
    QUESTION,
    added_tokens,
    bos_of,
    decode,
    encode,
    encode_after,
    n_common,
    render,
    style_of,
)

# Why an answer is left out.
DROPS_CALLS = "tool calls are not learned, because the chat template does not write them"
DROPS_ANSWER = "answers are not learned, because the chat template does not write them"
REWRITES_TURNS = "the chat template writes the earlier turns of an answer differently later on"
# What the run says about data whose template does something that a user should know about.
DROPS_ROLE = "messages that the chat template does not write"
DROPS_THOUGHT = "the chat template drops the thinking of answers, so it is put back in"
APPENDS_EOS = "the chat template writes no end of a turn, so the EOS is appended to what is learned"
FOLLOWS_LESS = "answers do not continue the prompt: they are learned after what they share with it"


# ============================================================ prompts and answers
class Prompt(NamedTuple):
    """What a model reads before it answers, and what the user should know about it."""

    text: str
    ids: list[int]
    notes: list[str]


class Answer(NamedTuple):
    """The token ids of an answer as a model should write it, and of what precedes it.

    Attributes:
        context: the prompt, or only its beginning if the template writes this answer after that.
        ids: the answer with the token that ends it; none if the template does not write it.
        learned: which of `ids` the model writes itself, and should learn to.
        notes: what the user should know. The run prints each, with its number of rows.
    """

    context: list[int]
    ids: list[int]
    learned: list[bool]
    notes: list[str]


class Sequence(NamedTuple):
    """What the model reads at once: token ids, and which of them it should learn to write."""

    ids: list[int]
    learned: list[bool]


def encode_answers(
    tokenizer, prompt, answers: list, tools=None
) -> tuple[list[int], list[Sequence], list[str]]:
    """Returns the token ids of a prompt and of one or two answers to it, and notes.

    All are strings, or message lists. If one answer continues only a beginning of the generation
    prompt, that is the prompt of both, and the rest begins the other answer: after `<bot><think>`
    the prompt of `No` and of `<think>Why</think>Yes` is `<bot>`.
    """
    if isinstance(prompt, str):
        prompt_ids, *ids_of_answers = encode_plain(tokenizer, prompt, *answers)
        return prompt_ids, [Sequence(ids, [True] * len(ids)) for ids in ids_of_answers], []
    read = encode_prompt(tokenizer, prompt, tools)
    encoded = [encode_answer(tokenizer, prompt, answer, tools, read) for answer in answers]
    n = n_common(encoded[0].context, encoded[-1].context)
    sequences = []
    for answer in encoded:
        rest = answer.context[n:] if answer.ids else []
        sequences.append(Sequence(rest + answer.ids, [True] * len(rest) + answer.learned))
    notes = [note for answer in encoded for note in answer.notes]
    return encoded[0].context[:n], sequences, notes + read.notes


def encode_prompt(tokenizer, messages: list[dict], tools=None) -> Prompt:
    """Returns what a model reads before it answers these messages; nothing if there are none."""
    text = ""
    if messages:
        text = render(tokenizer, messages, tools, add_generation_prompt=True)
    return Prompt(text, encode(tokenizer, text), unwritten_roles(tokenizer, messages, tools, text))


def encode_answer(
    tokenizer, history: list[dict], answer: list[dict], tools=None, prompt: Prompt | None = None
) -> Answer:
    """Returns the token ids of an answer of one or several messages, see `Answer`.

    Results of tools, messages of a user and what says that it is not learned count nothing. There
    are no ids if the template rewrites one message of the answer once others follow.
    """
    prompt = prompt or encode_prompt(tokenizer, history, tools)
    if len(answer) == 1 and is_learned(answer[0]):
        return encode_turn(tokenizer, history, answer[0], tools, prompt)
    messages = history + answer
    turns = learned_turns(messages, len(history))
    sequences, _, notes = encode_conversation(tokenizer, messages, turns, tools)
    if len(sequences) > 1:
        notes = [REWRITES_TURNS]
    if not sequences or why_left_out(notes):
        return Answer(prompt.ids, ids=[], learned=[], notes=notes)
    [(ids, learned)] = sequences
    n = min(n_common(prompt.ids, ids), learned.index(True))
    return Answer(ids[:n], ids[n:], learned[n:], notes)


def encode_turn(tokenizer, history: list[dict], answer: dict, tools, prompt: Prompt) -> Answer:
    """Returns the token ids of an answer of one message, all to learn, and of what precedes it."""
    whole = render(tokenizer, [*history, answer], tools)
    context = prompt.text
    text = whole.removeprefix(prompt.text)
    context_ids = prompt.ids
    notes = []
    if not whole.startswith(prompt.text):
        written = as_read(tokenizer, prompt.text, whole, history, tools)
        context, text = split_answer(prompt.text, written)
    reason = why_unwritten(tokenizer, history, answer, text, tools)
    if reason:
        return Answer(prompt.ids, ids=[], learned=[], notes=[reason])
    if drops_thought(tokenizer, history, answer, whole, tools):
        context, text = with_thinking(tokenizer, prompt.text, history, answer, tools)
        notes.append(DROPS_THOUGHT)
    if context != prompt.text:
        if len(context) < len(render(tokenizer, history, tools)):
            raise BadRow("the chat template writes the history differently before the answer")
        context_ids = encode(tokenizer, context)
        notes = notes or [FOLLOWS_LESS]
    text, is_ended = up_to_end(tokenizer, text)
    ids = encode_after(tokenizer, context, context_ids, text)
    if not is_ended:
        ids = [*ids, tokenizer.eos_token_id]
        notes.append(APPENDS_EOS)
    return Answer(context_ids, ids, [True] * len(ids), notes)


def encode_conversation(
    tokenizer, messages: list[dict], turns: list[int], tools=None, learn_all: bool = False
) -> tuple[list[Sequence], list[int], list[str]]:
    """Returns the sequences of a conversation, the ids before its last answer, and notes.

    There is one sequence, unless the template writes earlier turns differently once later ones
    follow. Then each answer has its own, with the history as the model reads it before that answer.

    Args:
        turns: which messages are answers to learn.
        learn_all: learn what precedes the answers, too, each token once.
    """
    sequences: list[Sequence] = []
    prompt = Prompt("", [], [])
    notes: list[str] = []
    previous = None  # the last answer that was learned
    for turn in turns:
        history = messages[:turn]
        read = encode_prompt(tokenizer, history, tools)
        answer = encode_turn(tokenizer, history, messages[turn], tools, read)
        notes += answer.notes + (read.notes if turn == turns[-1] else [])
        if not answer.ids:  # the template does not write it
            continue
        ids, learned = sequences[-1] if sequences else ([], [])
        if answer.context[: len(ids)] == ids:  # the same history: one sequence
            del sequences[-1:]
            n_new = len(answer.context) - len(ids)
        else:
            learned = []
            n_new = 0
            if learn_all:
                n_new = len(encode(tokenizer, text_since(tokenizer, history, previous, tools)))
        learned = learned or [False] * (len(answer.context) - n_new)
        learned = learned + [learn_all] * n_new + [True] * len(answer.ids)
        # Nothing predicts a sequence's first token.
        sequences.append(Sequence(answer.context + answer.ids, [False, *learned[1:]]))
        prompt = read
        previous = turn
    return sequences, prompt.ids, notes


def text_since(tokenizer, history: list[dict], place: int, tools=None) -> str:
    """Returns what a prompt has after the end of one of its answers."""
    changed = [*history[:place], MARKED, *history[place + 1 :]]
    text = render(tokenizer, changed, tools, add_generation_prompt=True).partition(MARK)[2]
    end = style_of(tokenizer).end
    if not text.startswith(end):  # it ends an earlier answer in another way (gpt-oss)
        found = added_tokens(tokenizer).match(text)
        end = found.group() if found else ""
    return text.removeprefix(end)


def encode_plain(tokenizer, prompt: str, *answers: str) -> tuple[list[int], ...]:
    """Returns the ids of a prompt and of each answer, for strings without a chat template.

    The prompt gets a BOS if this tokenizer adds one, each answer an EOS, unless they have them.
    """
    prompt_ids = encode(tokenizer, prompt)
    answer_ids = [encode_after(tokenizer, prompt, prompt_ids, answer) for answer in answers]
    eos = tokenizer.eos_token_id
    # The text may begin with a BOS already. If the prompt is empty, an answer begins it.
    first = next((ids[:1] for ids in (prompt_ids, *answer_ids) if ids), None)
    if first != bos_of(tokenizer):
        prompt_ids = bos_of(tokenizer) + prompt_ids
    return prompt_ids, *(ids if ids[-1:] == [eos] else [*ids, eos] for ids in answer_ids)


# ============================================================ where an answer begins and ends
def split_answer(prompt: str, whole: str, thinks: bool = False) -> tuple[str, str]:
    r"""Returns the context of an answer, and the answer with all that follows it.

       prompt                  whole                   context                 answer
    1. <bot>                   <bot>Yes                <bot>                   Yes
    2. <bot><think></think>    <bot>Yes                <bot><think></think>    Yes
    3. <bot>\n\n               <bot>\nYes              <bot>\n\n               Yes
    4. <bot><think>            <bot>Yes                <bot>                   Yes
    5. <bot><think></think>    <bot><think>Why ...     <bot>                   <think>Why ...

    If a thought will be put in front of the answer, 2 is as 4.
    """
    if whole.startswith(prompt):  # 1.
        return prompt, whole[len(prompt) :]
    n = n_common(prompt, whole)
    inside = [found.start() for found in thoughts.ANY_MARKER.finditer(prompt) if found.end() > n]
    n = min([n, *inside])
    only_in_prompt, answer = prompt[n:], whole[n:]
    is_thought = thoughts.is_closed(only_in_prompt) and not thinks
    if is_thought or only_in_prompt.isspace():  # 2, 3. A model would give this answer after it.
        return prompt, answer
    # 4, 5. The rest of the prompt leads to another answer. An empty thought leads to none.
    ends = thoughts.AT_END.search(prompt)
    n = min(n, ends.start()) if ends else n
    return prompt[:n], whole[n:]


def as_read(tokenizer, prompt: str, whole: str, history: list, tools) -> str:
    """Returns `whole`, a history with its answer, with the history as the prompt has it.

    gpt-oss drops the thinking of a tool call as soon as an answer follows; Mistral writes a system
    message into the last message of the user, and not at all once that is answered. The answer
    begins after the last generation prompt before the place of its content, which the rendering of
    another answer shows. If there is none, what ends the prompt takes its place.
    """
    history_text = render(tokenizer, history, tools)
    if whole.startswith((prompt, history_text)) or not prompt.startswith(history_text):
        return whole
    markers = [found.start() for found in thoughts.ANY_MARKER.finditer(prompt)]
    last_marker = markers[-1] if markers else len(prompt)
    generation_prompt = prompt.removeprefix(history_text) or prompt[last_marker:]
    generation_prompt = re.sub(rf"\s*({thoughts.OPENERS})\s*$", "", generation_prompt)
    if not generation_prompt:
        return whole
    content_at = n_common(whole, render(tokenizer, [*history, MARKED], tools))
    start = whole.rfind(generation_prompt, 0, content_at)
    last = history[-1]["content"] if history[-1]["role"] == "assistant" else ""
    is_merged = bool(last) and last in whole[start:content_at]  # two messages in one turn (Gemma 4)
    kept = prompt[: prompt.rindex(generation_prompt)]
    return whole if start < 0 or is_merged else kept + whole[start:]


def up_to_end(tokenizer, text: str) -> tuple[str, bool]:
    r"""Returns an answer up to and with the token that ends it, and whether there is one.

    <end>\n     Yes<end>\n      Yes<end>
    <end>\n     call<call>\n    call<call>    a tool call may end differently
    \n\n        Yes.\n\n        Yes.          no token ends an answer
    """
    style = style_of(tokenizer)
    eos = tokenizer.eos_token
    if style.ending and text.endswith(style.ending):
        text = text.removesuffix(style.ending) + style.end
        return text, bool(style.end) or text.endswith(eos)
    ends = [found.end() for found in added_tokens(tokenizer).finditer(text)]
    if style.end and ends and not text[ends[-1] :].strip():
        return text[: ends[-1]], True
    before, found, _ = text.rpartition(eos)
    return (before + eos, True) if found else (text, False)


# ============================================================ what a template does not write
def drops_thought(tokenizer, history: list, answer: dict, whole: str, tools) -> bool:
    """Whether an answer has thinking, and the template writes the same, `whole`, without it."""
    if not thoughts.of_message(answer):
        return False
    return render(tokenizer, [*history, thoughts.removed(answer)], tools) == whole


def with_thinking(tokenizer, prompt: str, history: list, answer: dict, tools) -> tuple[str, str]:
    """Returns what `split_answer` does, with the thinking that the template drops of the answer.

    It goes where the answer begins, in place of an empty thought there or at the end of the prompt.
    Of DeepSeek-R1, `<bot>Yes<end>` after the prompt `<bot><think>` becomes `<bot>` and
    `<think>Why</think>Yes<end>`.
    """
    bare = thoughts.removed(answer)
    bare["content"] = bare["content"].lstrip()  # that whitespace comes back with the thinking
    whole = render(tokenizer, [*history, bare], tools)
    written = as_read(tokenizer, prompt, whole, history, tools)
    context, text = split_answer(prompt, written, thinks=True)
    context = thoughts.AT_END.sub("", context)
    empty = thoughts.EMPTY.match(text)
    text = text[empty.end() :] if empty else text
    space = text[: len(text) - len(text.lstrip())]
    text = space + thoughts.written(answer, str(tokenizer.chat_template)) + text.lstrip()
    only_in_prompt = prompt[len(context) :]
    if thoughts.is_closed(only_in_prompt) or thoughts.EMPTY.fullmatch(only_in_prompt):
        return context, text
    # What opens the thought may be the prompt's.
    return split_answer(prompt, context + text)


def why_unwritten(tokenizer, history: list, answer: dict, text: str, tools) -> str:
    """Returns why an answer cannot be learned, since the template does not write it; else "".

    What is found in `text`, the template's own, needs no trial.
    """
    messages = [*history, answer]
    if answer.get("tool_calls") and leaves_out(tokenizer, messages, -1, tools, "tool_calls"):
        return DROPS_CALLS
    is_written = thoughts.split(answer["content"])[2].strip() in text
    if not is_written and leaves_out(tokenizer, messages, -1, tools, "content"):
        return DROPS_ANSWER
    return ""


def leaves_out(tokenizer, messages: list[dict], place: int, tools, field: str) -> bool:
    """Whether the template writes the same if one message lacks a field, or the end of a content.

    A content may be left out from a marker on that is never closed.
    """

    def write(message: dict) -> str:
        changed = list(messages)
        changed[place] = message
        return render(tokenizer, changed, tools)

    message = messages[place]
    without = {key: value for key, value in message.items() if key != field}
    try:
        if write({"content": "", **without}) == write(message):
            return True
        longer = {**message, "content": message["content"] + MARK}
        return field == "content" and MARK not in write(longer)
    except BadRow:  # it wants the field
        return False


def unwritten_roles(tokenizer, messages: list[dict], tools, text: str) -> list[str]:
    """Returns notes on messages that the chat template leaves out without a word.

    At inference it does so as well, so the rows are used. What is found in `text`, the template's
    own, needs no trial.
    """
    return [
        f"{DROPS_ROLE} (role {message['role']!r})"
        for place, message in enumerate(messages)
        if message["role"] != "assistant" and message["content"].strip() not in text
        if leaves_out(tokenizer, messages, place, tools, "content")
    ]


def why_left_out(notes: list[str]) -> str:
    """Returns the note that says an answer is not written; "" if there is none."""
    reasons = (DROPS_CALLS, DROPS_ANSWER, REWRITES_TURNS)
    return next((text for text in notes if text in reasons), "")


# ============================================================ between two answers
def check_turns(tokenizer, tools: list[dict] | None = None) -> None:
    """Refuses a template that cannot continue a conversation after what a model has sampled.

    A turn is never tokenised again: what comes back is appended to the ids that were sampled. So a
    template must add to what it wrote. One that does not: its generation prompt ends with
    `<bot><think>`, and it writes an earlier answer as `<bot>Yes`.
    """
    prompt = render(tokenizer, [QUESTION], add_generation_prompt=True)
    text, end = render_beyond_answer(tokenizer, MARKED, [QUESTION], None)
    # Whitespace around the answer is the model's own.
    answer = text[len(prompt) : end].removesuffix(style_of(tokenizer).end).strip()
    if not text.startswith(prompt) or answer != MARK:
        raise BadRow(
            "the tokenizer's chat template writes an answer differently once it is followed, so no "
            "turn can be appended to what was sampled: --chat_template or --chat_template_kwargs "
            "may help"
        )
    prompt = render(tokenizer, [QUESTION], tools, add_generation_prompt=True)
    names = [tool["function"]["name"] for tool in tools or []]
    if not all(name in prompt for name in names):
        raise BadRow(f"the tokenizer's chat template does not write the tools {', '.join(names)}")
    role = "tool" if tools else "user"
    reply = {"role": role, "name": CALLED, "content": "zqr"}  # the name of the tool
    if "zqr" not in decode(tokenizer, ids_after_answer(tokenizer, [reply], tools)):
        raise BadRow(f"the tokenizer's chat template leaves out messages of role {role!r}")


def ids_after_answer(tokenizer, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
    r"""Returns what the template writes after an answer's last token, up to the next answer.

    Of ChatML `\n<|im_start|>user\nToo high.<|im_end|>\n<|im_start|>assistant\n`. What comes back
    may be anything, so control tokens spelled out in it are split by an invisible space.
    """
    control = added_tokens(tokenizer)
    harmless = [{**part, "content": control.sub(split_token, part["content"])} for part in messages]
    answer = {**MARKED, "tool_calls": [CALL]} if messages[0]["role"] == "tool" else MARKED
    text, place = render_beyond_answer(tokenizer, answer, harmless, tools)
    before = text[:place]
    return encode_after(tokenizer, before, encode(tokenizer, before), text[place:])


def split_token(found: re.Match) -> str:
    return found[0][:1] + "\u200b" + found[0][1:]


def render_beyond_answer(
    tokenizer, answer: dict, messages: list[dict], tools: list[dict] | None
) -> tuple[str, int]:
    """Renders a conversation that goes on after an answer; also returns where the answer ends."""
    text = render(tokenizer, [QUESTION, answer, *messages], tools, add_generation_prompt=True)
    word = MARK if MARK in text else CALLED  # a template may drop the content of a call
    end = style_of(tokenizer).end  # maybe ""
    place = text.find(end, text.find(word) + len(word)) if word in text else -1
    if place < 0:
        raise BadRow(
            "the tokenizer's chat template leaves out an answer, or ends it differently, once it "
            "is followed"
        )
    return text, place + len(end)
