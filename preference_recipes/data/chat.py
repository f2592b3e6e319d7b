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
    wants contents or arguments in another form           a trial finds the form, see `Style`

Of an answer of several messages only what the model writes is learned, as the flags `learned` say.
"""

import copy
import datetime
import functools
import json
import os
import re
import sys
from typing import Any, NamedTuple

import jinja2.meta
import transformers.utils.chat_template_utils as template_utils

from common import in_one_line
from preference_recipes.data import thoughts
from preference_recipes.data.messages import (
    BadRow,
    from_json,
    is_learned,
    learned_turns,
    without_nulls,
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

# Messages for trials. No template and no data write these words by themselves.
MARK = "zqzplace"
CALLED = "zqf"
QUESTION: dict[str, Any] = {"role": "user", "content": "zqz"}
MARKED: dict[str, Any] = {"role": "assistant", "content": MARK}
CALL: dict[str, Any] = {
    "type": "function",
    "id": "000000000",  # Mistral's templates want nine characters
    "function": {"name": CALLED, "arguments": {}},
}


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


# ============================================================ texts and ids
def encode(tokenizer, text: str) -> list[int]:
    """Returns the token ids of a text, without what a tokenizer puts around every text."""
    backend = backend_of(tokenizer)
    if backend is None:
        return tokenizer(text, add_special_tokens=False).input_ids
    # Without offsets, which nothing reads here: in half the time.
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


@functools.lru_cache(maxsize=16)
def backend_of(tokenizer):
    """Returns what encodes for a fast tokenizer; None for one in Python."""
    tokenizer("")  # sets the backend to neither truncate nor pad, whatever its file says
    return getattr(tokenizer, "backend_tokenizer", None)


def encode_after(tokenizer, before: str, before_ids: list[int], text: str) -> list[int]:
    """Returns the ids of a text as a model would write it after another.

    They are those of both texts together, cut between them: a tokenizer may put a space in front of
    a first word. If a token spans the border, the text is tokenised alone. Of `before` what follows
    its last marker is enough, since a tokenizer first cuts texts at these.
    """
    markers = [found.start() for found in added_tokens(tokenizer).finditer(before[-200:])]
    if markers:
        before = before[-200:][markers[-1] :]
        before_ids = encode(tokenizer, before)
    both = encode(tokenizer, before + text)
    if both[: len(before_ids)] == before_ids:
        return both[len(before_ids) :]
    return encode(tokenizer, text)


def decode(tokenizer, ids: list[int]) -> str:
    """Returns the text of token ids as it is, special tokens included."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def decode_answers(tokenizer, answers: list[list[int]]) -> list[str]:
    """Returns the texts of answers without special tokens, but with the markers of thoughts.

    Of some tokenizers these are special, too, and a thought would run into what follows it.
    """
    markers = [marker for pair in thoughts.MARKERS for marker in pair]
    left_out = {
        number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special and not any(marker.startswith(token.content) for marker in markers)
    }
    kept = [[token for token in ids if token not in left_out] for ids in answers]
    return tokenizer.batch_decode(kept, skip_special_tokens=False)


@functools.lru_cache(maxsize=16)
def bos_of(tokenizer) -> list[int]:
    """Returns the BOS that the tokenizer puts before a text, or nothing."""
    # "" would not do: a tokenizer that appends an EOS returns that alone, and BOS and EOS may be
    # the same token.
    first = tokenizer("a").input_ids[:1]
    return first if first == [tokenizer.bos_token_id] else []


@functools.lru_cache(maxsize=16)
def added_tokens(tokenizer) -> re.Pattern:
    """Returns what matches any token that was added to the vocabulary to mark something."""
    texts = [token.content for token in tokenizer.added_tokens_decoder.values()]
    texts = sorted((text for text in texts if text.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def n_common(first, second) -> int:
    """Returns how many elements, or characters, both begin with."""
    differ = (place for place, (one, other) in enumerate(zip(first, second)) if one != other)
    return next(differ, min(len(first), len(second)))


# ============================================================ rendering
class Style(NamedTuple):
    r"""How a chat template wants and writes messages, as found out by rendering some.

    Attributes:
        parts: whether contents must be lists of parts (LLaVA), not strings.
        argument_texts: whether the arguments of tool calls must be JSON texts (DeepSeek-V3).
        field: the field in which the template reads a thought; "" if it reads none.
        ending: what it writes after the last answer, whatever the answer is: `<|im_end|>\n`.
        end: the beginning of `ending` with the token that ends an answer, `<|im_end|>`; "" if there
            is none.
    """

    parts: bool = False
    argument_texts: bool = False
    field: str = ""
    ending: str = ""
    end: str = ""


def render(
    tokenizer,
    messages: list[dict],
    tools: list[dict] | None = None,
    add_generation_prompt: bool = False,
    style: Style | None = None,
) -> str:
    """Returns messages as the chat template writes them.

    Args:
        tools: JSON schemas of what the messages may call.
        style: how the template wants messages; found by trial if not given.

    Raises:
        BadRow: there is no chat template, or it refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise BadRow(
            "messages, but the tokenizer has no chat template: give one by --chat_template FILE, "
            "or plain strings in place of messages"
        )
    style = style or style_of(tokenizer)
    try:
        template = tokenizer.get_chat_template(tools=tools)  # there may be several, by names
        if getattr(tokenizer, "chat_date", None):
            template = dated(template, tokenizer.chat_date)
        return tokenizer.apply_chat_template(
            [in_style(tokenizer, message, style) for message in messages],
            tools,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except Exception as error:  # a template raises what it likes, such as that roles must alternate
        given = "messages or tools" if tools else "messages"
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise BadRow(
            f"the tokenizer's chat template refuses the {given}: {in_one_line(error)} "
            f"(roles: {roles})"
        ) from None


def in_style(tokenizer, message: dict, style: Style) -> dict:
    """Returns a message in the form that a template wants."""
    message = dict(message)
    if message["role"] == "assistant":
        message["content"] = without_end(tokenizer, message["content"], style)
        if style.field and not message.get(style.field) and thoughts.of_field(message):
            message[style.field] = thoughts.of_field(message)
    if style.parts:
        message["content"] = [{"type": "text", "text": message["content"]}]
    if style.argument_texts and message.get("tool_calls"):
        message["tool_calls"] = [with_argument_text(call) for call in message["tool_calls"]]
    return message


def without_end(tokenizer, content: str, style: Style) -> str:
    """Returns an answer without the token that ends it, which the template writes itself."""
    for end in (style.end, tokenizer.eos_token):
        if end and content.rstrip().endswith(end):
            return without_end(tokenizer, content.rstrip().removesuffix(end), style)
    return content


def with_argument_text(call: dict) -> dict:
    """Returns a tool call whose arguments are a JSON text."""
    text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def style_of(tokenizer) -> Style:
    """Returns what `find_style` finds, once for each tokenizer and template."""
    return find_style(tokenizer, str(tokenizer.chat_template), tokenizer.eos_token_id)


@functools.lru_cache(maxsize=16)
def find_style(tokenizer, _template: str, _eos: int) -> Style:
    """Renders a few short messages, and infers from them how the template writes."""

    def write(style: Style, *messages: dict) -> str:
        try:
            return render(tokenizer, list(messages), style=style)
        except BadRow:
            return ""

    style = Style()
    with_parts = Style(parts=True)
    user = {"role": "user", "content": MARK}
    if MARK in write(with_parts, user) and MARK not in write(style, user):
        style = with_parts

    with_texts = style._replace(argument_texts=True)
    call = {**CALL, "function": {"name": CALLED, "arguments": {"a": True}}}
    with_call = {"role": "assistant", "content": "", "tool_calls": [call]}
    by_object = write(style, QUESTION, with_call)
    by_text = write(with_texts, QUESTION, with_call)
    if ("'a': True" in by_object or not by_object) and '"a": true' in by_text:
        style = with_texts

    for field in thoughts.FIELDS:
        thinks = {"role": "assistant", "content": "a", field: MARK}
        if not style.field and MARK in write(style, QUESTION, thinks):
            style = style._replace(field=field)

    def end_of(*following: dict) -> str:
        texts = [
            write(style, QUESTION, {"role": "assistant", "content": content}, *following)[::-1]
            for content in "ab"
        ]
        return os.path.commonprefix(texts)[::-1]

    ending = end_of()
    return style._replace(ending=ending, end=end_in(tokenizer, ending, end_of(QUESTION)))


def end_in(tokenizer, ending: str, followed: str) -> str:
    """Returns the beginning of an ending up to and with the token that ends an answer.

    That also ends an answer that is followed: Phi-3 writes `<|end|><eos>` after the last one, but
    `<|end|>` after others. If they have nothing in common (gpt-oss), the last answer's own counts.
    An EOS is the end wherever it is; of other tokens the last one that both have (Cohere).
    """
    found = [match.span() for match in added_tokens(tokenizer).finditer(ending)]
    shared = [span for span in found if followed.startswith(ending[: span[1]])]
    spans = shared or found[:1]
    eos = [span for span in spans if ending[slice(*span)] == tokenizer.eos_token]
    ends = [end for _, end in eos[:1] or spans[-1:]]
    return ending[: ends[0]] if ends else ""


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


# ============================================================ variables and date of a template
def set_defaults(tokenizer, text: str) -> None:
    """Gives variables of a tokenizer's chat template default values, which are saved with it.

    Raises:
        SystemExit: a variable that the template does not have, and so would ignore.
    """
    values = json.loads(text)
    known = variables(tokenizer)
    for name in values:
        if name not in known:
            sys.exit(
                f"--chat_template_kwargs {text}: the chat template has no variable {name!r} to "
                f"set; it has: {', '.join(sorted(known)) or 'none'}"
            )
    defaults = {name: f"{name} | default({value!r})" for name, value in values.items()}
    tokenizer.chat_template = beginning_with(tokenizer, defaults)


def with_variables(tokenizer, values: dict | str | None):
    """Returns a tokenizer whose template has the values of a row's column for its variables.

    They are an object or its JSON. Names that the template does not have do nothing.
    """
    if not values or tokenizer.chat_template is None:
        return tokenizer
    given = from_json(values)
    if not isinstance(given, dict):
        raise BadRow(f"column 'chat_template_kwargs': expected an object, found {values!r:.80}")
    return tokenizer_with(tokenizer, json.dumps(without_nulls(given), sort_keys=True))


@functools.lru_cache(maxsize=16)
def tokenizer_with(tokenizer, text: str):
    known = variables(tokenizer)
    # Jinja reads constants as Python writes them.
    constants = {name: repr(value) for name, value in json.loads(text).items() if name in known}
    changed = copy.copy(tokenizer)
    changed.chat_template = beginning_with(tokenizer, constants)
    return changed


def beginning_with(tokenizer, expressions: dict[str, str]) -> str | dict[str, str]:
    """Returns a tokenizer's chat template with values for its variables, which Jinja writes."""
    beginning = "".join(f"{{% set {name} = {text} %}}\n" for name, text in expressions.items())
    if isinstance(tokenizer.chat_template, dict):  # several, by their names
        return {name: beginning + text for name, text in tokenizer.chat_template.items()}
    return beginning + tokenizer.chat_template


def variables(tokenizer) -> set[str]:
    """Returns the variables that a tokenizer's chat template reads and a user may set."""
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several, by their names
        template = "".join(template.values())
    environment = template_utils._compile_jinja_template(template).environment
    names = jinja2.meta.find_undeclared_variables(environment.parse(template))
    given = {"messages", "tools", "documents", "add_generation_prompt", "strftime_now"}
    return names - environment.globals.keys() - given - tokenizer.special_tokens_map.keys()


def prints_date(tokenizer) -> bool:
    """Whether the chat template writes the date of the day."""
    return "strftime_now" in str(tokenizer.chat_template)


@functools.lru_cache(maxsize=16)
def dated(template: str, date: str) -> str:
    """Returns a template that writes a date, given as in 2026-01-31, in place of today's."""
    day = datetime.date.fromisoformat(date)
    call = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
    return call.sub(lambda found: repr(day.strftime(found[2])), template)


# ============================================================ the tokenizer
def fingerprint(tokenizer) -> str:
    """Returns a text that changes whenever the tokenizer would produce different ids."""
    if tokenizer.is_fast:
        content = tokenizer.backend_tokenizer.to_str()
    else:
        content = str(sorted(tokenizer.get_vocab().items()))
    parts = [content, str(tokenizer.chat_template), str(tokenizer.special_tokens_map)]
    if prints_date(tokenizer):
        parts.append(str(getattr(tokenizer, "chat_date", None)))
    return "\0".join(parts)


def stop_tokens(tokenizer, model) -> set[int]:
    """Returns what ends a response: EOS, the end of a turn, what the generation config says."""
    own = model.generation_config.eos_token_id
    own = [own] if isinstance(own, int) else own or []
    return {tokenizer.eos_token_id, *own, *encode(tokenizer, style_of(tokenizer).end)[-1:]}
