"""Turns texts and messages into token ids, as the tokenizer's own chat template writes them."""

import json
import os
from typing import NamedTuple

from common.data import templates, thoughts
from common.data.ids import (
    Beginning,
    added_tokens,
    decode,
    encode_beginning,
    encode_longer,
    encode_text,
    is_marker,
    shared_length,
)

# What is said of a data set whose template does something that a user should know.
APPENDS_EOS = "the chat template writes no end of a turn, so the EOS is appended to what is learned"
DROPS_THOUGHT = "the chat template drops the thinking of answers, so they are learned as given"


class Answer(NamedTuple):
    """An answer as a model should generate it.

    Attributes:
        prompt: ids of what the model reads at inference before it answers.
        context: ids that precede the answer in training: `prompt`, or a beginning of it where the
            template writes the answer behind another prompt.
        ids: ids of the answer, up to and including the token that ends it; empty if the template
            does not write what the user gave.
        notes: what the user should know of it, as `note` writes it.
    """

    prompt: list[int]
    context: list[int]
    ids: list[int]
    notes: list[str]


# ============================================================ ids of texts
def encode(
    tokenizer, texts: list[str], plain: bool = False, beginning: Beginning | None = None
) -> list[list[int]]:
    """Returns the token ids of consecutive pieces of one text, one list for each piece.

    The ids are those of the whole text, cut at the ends of the pieces: so they are what a model
    meets when it reads the text. Where a token spans the end of a piece, no such cut exists. Then
    the next piece is tokenised alone, and so is every later one, because the tokens of the whole
    text no longer begin with the ids so far. The ids of a piece never depend on later pieces.

    Args:
        plain: the text was not written by a chat template. It then gets the BOS that this
            tokenizer puts in front, if it puts one, and EOS at its end, unless it has them.
        beginning: the first piece, if the caller has encoded it.
    """
    if beginning is None:
        beginning = encode_beginning(tokenizer, texts[0])
    whole = beginning.ids
    pieces = [whole]
    ids_so_far = list(whole)
    text_so_far = beginning.text
    for piece in texts[1:]:
        text_so_far += piece
        whole = encode_longer(tokenizer, beginning, text_so_far)
        if whole[: len(ids_so_far)] == ids_so_far:
            ids = whole[len(ids_so_far) :]
        else:
            ids = encode_text(tokenizer, piece)
        pieces.append(ids)
        ids_so_far += ids
    if plain:
        bos = [tokenizer.bos_token_id]
        eos = [tokenizer.eos_token_id]
        puts_bos_in_front = tokenizer("").input_ids[:1] == bos
        if puts_bos_in_front and whole[:1] != bos:
            pieces[0] = bos + pieces[0]
        if pieces[-1][-1:] != eos:
            pieces[-1] = pieces[-1] + eos
    return pieces


# ============================================================ one answer
def encode_prompt(tokenizer, messages: list[dict], tools=None) -> Beginning:
    """Returns what a model reads before it answers these messages, and its token ids.

    Args:
        messages: none for an answer to nothing.
        tools: see `templates.render`.

    Raises:
        BadRow: there is no chat template, or it refuses the messages.
    """
    text = templates.render(tokenizer, messages, True, tools) if messages else ""
    return encode_beginning(tokenizer, text)


def encode_turn(
    tokenizer,
    messages: list[dict],
    start: int,
    end: int,
    tools=None,
    beginning: Beginning | None = None,
) -> Answer:
    """Returns the token ids of the answer `messages[start:end]`, and of what precedes it.

    Where the template writes the answer right behind its own generation prompt, the answer is what
    follows the prompt; where it does not, see `join`. Where it drops thinking from the answer, the
    answer is what the user gave.

    Args:
        tools: see `templates.render`.
        beginning: what `encode_prompt` returns for `messages[:start]`, if several answers share it.

    Raises:
        BadRow: there is no chat template, or it refuses the messages.
    """
    if beginning is None:
        beginning = encode_prompt(tokenizer, messages[:start], tools)
    before = beginning.text
    prompt = beginning.ids
    after = templates.render(tokenizer, messages[:end], False, tools)
    whole = encode_longer(tokenizer, beginning, after)

    shared = shared_length(prompt, whole)
    only_in_prompt = decode(tokenizer, prompt[shared:])
    written = decode(tokenizer, whole[shared:])
    unwritten = templates.why_unwritten(tokenizer, messages, start, end, after, written, tools)
    if unwritten:
        return Answer(prompt, prompt, [], [unwritten])

    notes = []
    message = messages[end - 1]
    thought = thoughts.of_message(message)
    if thought and thought not in written:
        context, ids = as_given(tokenizer, before, prompt, message, only_in_prompt, written)
        notes.append(DROPS_THOUGHT)
    else:
        context, rest = join(tokenizer, before, after, prompt, whole)
        if len(context) < len(prompt):
            notes.append(describe_other_prompt(tokenizer, only_in_prompt, rest))
        ids = up_to_end(tokenizer, rest)
    if not ends(tokenizer, ids):
        ids = [*ids, tokenizer.eos_token_id]
        notes.append(APPENDS_EOS)
    return Answer(prompt, context, ids, notes)


def join(
    tokenizer, before: str, after: str, prompt: list[int], whole: list[int]
) -> tuple[list[int], list[int]]:
    """Returns the ids of an answer's context, and of the answer with what the template adds to it.

    Args:
        before, prompt: the history with the generation prompt, and its ids.
        after, whole: the history with the answer, and its ids.
    """
    if whole[: len(prompt)] == prompt:
        return prompt, whole[len(prompt) :]
    if after.startswith(before):
        # The answer's first characters merge with the prompt's last ones. At inference the prompt
        # is tokenised alone, and so is what the model generates.
        return prompt, encode_text(tokenizer, after[len(before) :])

    shared = shared_length(prompt, whole)
    only_in_prompt = decode(tokenizer, prompt[shared:])
    if only_in_prompt.strip() and not thoughts.is_whole_thought(only_in_prompt):
        # No model would write this answer behind this prompt, such as one without thinking behind
        # an open <think>.
        return whole[:shared], whole[shared:]
    return prompt, without_white_space(tokenizer, whole[shared:], only_in_prompt)


def without_white_space(tokenizer, rest: list[int], only_in_prompt: str) -> list[int]:
    """`rest` without the white space that the prompt has written already.

    Ids differ where one newline and two are two tokens: the characters that both begin with are
    the prompt's.
    """
    white = 0
    while white < len(rest) and decode(tokenizer, rest[white : white + 1]).isspace():
        white += 1
    leading = decode(tokenizer, rest[:white])
    shared = os.path.commonprefix([leading, only_in_prompt])
    if not shared:
        return rest
    return encode_text(tokenizer, leading[len(shared) :]) + rest[white:]


def as_given(
    tokenizer, before: str, prompt: list[int], message: dict, only_in_prompt: str, written: str
) -> tuple[list[int], list[int]]:
    """Returns the ids of an answer's context, and of the answer as the user gave it, to its end.

    What opens its thinking is left out where the generation prompt has written that already.

    Args:
        before, prompt: see `join`.
        only_in_prompt: what the prompt writes and the template's answer does not continue.
        written: the answer as the template writes it, without the thinking.
    """
    given = thoughts.with_markers(tokenizer, message)
    if thoughts.is_whole_thought(only_in_prompt):
        before = before.removesuffix(only_in_prompt)
        prompt = encode_text(tokenizer, before)
    elif only_in_prompt.strip() and given.lstrip().startswith(only_in_prompt.strip()):
        given = given.lstrip()
        written_already = os.path.commonprefix([given, only_in_prompt.lstrip()])
        given = given[len(written_already) :]
    elif not only_in_prompt:
        given = lead_of(message, written) + given
    found = templates.conventions(tokenizer)
    end = [] if found.stop is None else list(found.tail[: found.stop + 1])
    return prompt, encode(tokenizer, [before, given])[1] + end


def lead_of(message: dict, written: str) -> str:
    """What the template writes between its prompt and an answer, such as a space (LLaVA)."""
    visible = thoughts.without_thought(message["content"])
    place = written.find(visible.strip())
    lead = written[: max(place, 0)]
    if any(closer in lead for _, closer in thoughts.MARKERS):
        return ""
    white_of_answer = visible[: len(visible) - len(visible.lstrip())]
    return lead.removesuffix(white_of_answer)


def describe_other_prompt(tokenizer, only_in_prompt: str, rest: list[int]) -> str:
    """A note on an answer that does not continue the generation prompt."""
    answer_text = decode(tokenizer, rest)
    way_out = "--chat_template FILE with another generation prompt"
    for name in ("enable_thinking", "thinking"):
        if name in str(tokenizer.chat_template):
            opens = any(opener in only_in_prompt for opener, _ in thoughts.MARKERS)
            value = json.dumps({name: not opens})
            way_out = f"--chat_template_kwargs '{value}'"
            break
    return note(
        "answers do not continue the generation prompt, so they are learned behind what both "
        f"share ({way_out} may align them)",
        f"the prompt ends {only_in_prompt!r}, the answer begins {answer_text[:30]!r}",
    )


def note(kind: str, example: str = "") -> str:
    """What a user should know of a row; rows of one kind are counted, and one example is shown.

    Args:
        example: without tabs and newlines.
    """
    return f"{kind}\t{example}" if example else kind


# ============================================================ where an answer ends
def up_to_end(tokenizer, ids: list[int]) -> list[int]:
    """An answer without what the template writes behind the token that ends it."""
    found = templates.conventions(tokenizer)
    tail = list(found.tail)
    has_tail = bool(tail) and ids[-len(tail) :] == tail
    if found.stop is not None and has_tail:
        return ids[: len(ids) - len(tail) + found.stop + 1]
    if found.stop is not None or not found.is_known:
        # A call of a tool may end otherwise than an answer in words.
        return ids[: turn_length(tokenizer, ids) or len(ids)]
    if has_tail and not decode(tokenizer, tail).strip():
        return ids[: len(ids) - len(tail)]
    # Between the turns the template writes white space, which has merged with the answer's end.
    last = decode(tokenizer, ids[-1:])
    if found.white_tail and last.endswith(found.white_tail):
        return ids[:-1] + encode_text(tokenizer, last.removesuffix(found.white_tail))
    return ids


def ends(tokenizer, ids: list[int]) -> bool:
    """Whether the last token of an answer ends it."""
    if ids[-1:] == [tokenizer.eos_token_id]:
        return True
    found = templates.conventions(tokenizer)
    if found.is_known and found.stop is None:
        return False
    if found.stop is not None and ids[-1:] == [found.tail[found.stop]]:
        return True
    return turn_length(tokenizer, ids) == len(ids) > 0


def turn_length(tokenizer, ids: list[int]) -> int:
    """Counts a turn's tokens up to the one that ends it; 0 if no token does.

    The last EOS ends a turn. Some templates write none (calls of tools in gpt-oss). There the
    special token at the end of the turn ends it, also where a newline follows. What follows the
    end is never generated, so it is not learned.
    """
    eos = tokenizer.eos_token_id  # a property that searches each time
    if eos in ids:
        return len(ids) - ids[::-1].index(eos)
    added_tokens_by_id = added_tokens(tokenizer)
    for length in (len(ids), len(ids) - 1):
        token = added_tokens_by_id.get(ids[length - 1]) if length > 0 else None
        if token is not None and token.special:
            return length
    return 0


# ============================================================ preferences
class Preference(NamedTuple):
    """Token ids of a prompt and two answers, each up to its end; and notes, see `note`."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    notes: list[str]


def encode_preference(tokenizer, prompt, chosen, rejected, tools=None) -> Preference:
    """Returns the token ids of a pair. An answer is empty if the chat template does not write it.

    The prompt's ids are the same for both answers. Where one of them continues less of the
    generation prompt than the other (one thinks, the other does not), the prompt is what both
    continue, and the rest of it belongs to the answer that continues it.

    Args:
        prompt, chosen, rejected: three strings, or three message lists.
        tools: see `templates.render`.
    """
    if isinstance(prompt, str):
        beginning = encode_beginning(tokenizer, prompt)
        (prompt_ids, chosen_ids), (_, rejected_ids) = (
            encode(tokenizer, [prompt, answer], plain=True, beginning=beginning)
            for answer in (chosen, rejected)
        )
        return Preference(prompt_ids, chosen_ids, rejected_ids, [])

    beginning = encode_prompt(tokenizer, prompt, tools)
    answers = [
        encode_turn(
            tokenizer,
            messages=prompt + answer,
            start=len(prompt),
            end=len(prompt) + len(answer),
            tools=tools,
            beginning=beginning,
        )
        for answer in (chosen, rejected)
    ]
    context = min((answer.context for answer in answers), key=len)
    chosen_ids, rejected_ids = (
        answer.context[len(context) :] + answer.ids if answer.ids else [] for answer in answers
    )
    notes = [text for answer in answers for text in answer.notes]
    notes += templates.unwritten_parts(tokenizer, prompt, tools)
    return Preference(context, chosen_ids, rejected_ids, notes)


# ============================================================ the tokenizer
def fingerprint(tokenizer) -> str:
    """Returns a text that changes whenever the tokenizer would write other ids."""
    if tokenizer.is_fast:
        content = tokenizer.backend_tokenizer.to_str()
    else:
        content = str(sorted(tokenizer.get_vocab().items()))
    parts = [content, str(tokenizer.chat_template), str(tokenizer.special_tokens_map)]
    if templates.prints_date(tokenizer):
        parts.append(str(getattr(tokenizer, "chat_date", None)))
    return "\0".join(parts)


def stop_tokens(tokenizer, model) -> set[int]:
    """Returns the tokens that end a response.

    They are EOS, those of the model's generation config, and what ends a turn of the chat template.
    """
    stops = {tokenizer.eos_token_id}
    own = model.generation_config.eos_token_id
    if own is not None:
        stops |= {own} if isinstance(own, int) else set(own)
    found = templates.conventions(tokenizer)
    if found.stop is not None:
        stops.add(found.tail[found.stop])
    return stops


# ============================================================ notes
def reason_of(notes: list[str]) -> str:
    """Why a row is left out, where its notes say that an answer is not written; else ""."""
    for text in notes:
        if text in (templates.DROPS_CALLS, templates.DROPS_ANSWER):
            return text
    return ""


def tokens_since(tokenizer, messages: list[dict], place: int, tools=None) -> int:
    """How many tokens of a prompt are new since the answer at `place`, its end not counted.

    They are what the prompt ends with whatever that answer is.

    Args:
        messages: the history of the prompt.
        tools: see `templates.render`.
    """
    prompts = []
    for content in ("a", "b"):
        answer = {"role": "assistant", "content": content}
        changed = [*messages[:place], answer, *messages[place + 1 :]]
        text = templates.render(tokenizer, changed, True, tools)
        prompts.append(encode_text(tokenizer, text))
    first, second = prompts
    new = shared_length(first[::-1], second[::-1])
    has_end = templates.conventions(tokenizer).stop is not None
    return new - int(has_end and is_marker(tokenizer, first[len(first) - new]))
