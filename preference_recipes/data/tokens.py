"""Turns prompts and answers into token ids, as the tokenizer's own chat template writes them."""

import json
from typing import NamedTuple

from preference_recipes.data import templates, thoughts
from preference_recipes.data.ids import (
    Beginning,
    added_tokens,
    decode,
    encode_after,
    encode_beginning,
    encode_longer,
    encode_text,
    is_marker,
    n_shared,
    n_shared_at_end,
)

# What the run prints about a data set whose template does something that a user should know about.
APPENDS_EOS = "the chat template writes no end of a turn, so the EOS is appended to what is learned"
DROPS_THOUGHT = "the chat template drops the thinking of answers, so it is put back in"
DROPS_EARLIER = "the chat template drops the thinking of an answer's earlier messages: not learned"

# A word that no template writes, to find the place of a content in what one writes.
MARK = "zqzplace"


# ============================================================ plain text
def encode_plain(tokenizer, prompt: str, *answers: str) -> tuple[list[int], ...]:
    """Returns the token ids of a prompt and of each answer, for texts without a chat template.

    The prompt gets a BOS if this tokenizer adds one to texts, and every answer an EOS at its end,
    unless they have them already.
    """
    beginning = encode_beginning(tokenizer, prompt)
    prompt_ids = beginning.ids
    answer_ids = [encode_after(tokenizer, beginning, answer) for answer in answers]

    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    # "" would not do: a tokenizer that appends an EOS returns that alone, and BOS and EOS may be
    # the same token.
    adds_bos = tokenizer("a").input_ids[:1] == [bos]
    # The text may begin with a BOS already. If the prompt is empty, an answer begins it.
    first_id = next((ids[0] for ids in (prompt_ids, *answer_ids) if ids), None)
    if adds_bos and first_id != bos:
        prompt_ids = [bos, *prompt_ids]
    ended = [ids if ids[-1:] == [eos] else [*ids, eos] for ids in answer_ids]
    return prompt_ids, *ended


# ============================================================ one answer
class Answer(NamedTuple):
    """The token ids of an answer as a model should generate it, and of what precedes it.

    Attributes:
        prompt: what the model reads at inference before it answers.
        context: what precedes the answer in training: `prompt`, or only its beginning where the
            template does not write this answer after all of it.
        ids: the answer up to and including the token that ends it; empty if the template does not
            write what the user gave.
        notes: what the user should know about it, see `note`.
    """

    prompt: list[int]
    context: list[int]
    ids: list[int]
    notes: list[str]


class Turn(NamedTuple):
    r"""A conversation up to an answer, rendered twice: with the generation prompt, with the answer.

    Both texts begin alike. Example, where the prompt opens a thought that the answer does not have:

        prompt.text         <user>Hi<bot><think>\n
        text_with_answer    <user>Hi<bot>Hello.<end>
        only_in_prompt      <think>\n
        only_in_answer      Hello.<end>

    Attributes:
        prompt: the history with the generation prompt, which the model reads at inference.
        text_with_answer, ids_with_answer: the history with the answer, as the template writes it.
        n_shared: how many token ids both begin with.
        only_in_prompt, only_in_answer: the text of the other ids of each.
    """

    prompt: Beginning
    text_with_answer: str
    ids_with_answer: list[int]
    n_shared: int
    only_in_prompt: str
    only_in_answer: str

    @property
    def continues_prompt(self) -> bool:
        """Whether the answer follows the whole prompt, token by token."""
        return self.n_shared == len(self.prompt.ids)


def encode_prompt(tokenizer, messages: list[dict], tools=None) -> Beginning:
    """Returns what a model reads before it answers these messages, and its token ids.

    Args:
        messages: the history; if there is none, the prompt is empty.
        tools: see `templates.render`.

    Raises:
        BadRow: there is no chat template, or it refuses the messages.
    """
    text = ""
    if messages:
        text = templates.render(tokenizer, messages, tools, add_generation_prompt=True)
    return encode_beginning(tokenizer, text)


def encode_answer(
    tokenizer,
    history: list[dict],
    answer: list[dict],
    tools=None,
    prompt: Beginning | None = None,
) -> Answer:
    r"""Returns the token ids of an answer, and of what precedes it.

    How they are found depends on what the template does:

        1. It leaves the answer out: there are no ids, and a note says why.
        2. It writes the answer's last message whole, as is usual: see `split_turn`.
        3. It drops the thinking of the last message, which has others before it: see
           `encode_last_alone`.
        4. It drops the thinking of the only message: see `encode_with_thinking`.

    In 2 and 4 an end token is added where the template writes none. Example, with ChatML:

        history    user: Hi
        answer     assistant: Yes
        prompt     <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
        context    the same
        ids        Yes<|im_end|>

    Args:
        history, answer: messages.
        tools: see `templates.render`.
        prompt: what `encode_prompt` returns for the history, if several answers share it.

    Raises:
        BadRow: there is no chat template, or it refuses the messages.
    """
    if prompt is None:
        prompt = encode_prompt(tokenizer, history, tools)
    conversation = templates.Conversation(tokenizer, history + answer, tools)
    turn = compare_with_prompt(tokenizer, prompt, conversation.text)

    reason = templates.why_unwritten(conversation, len(history), turn.only_in_answer)
    if reason:  # 1.
        return Answer(prompt.ids, context=prompt.ids, ids=[], notes=[reason])

    places = range(len(history), len(history) + len(answer))
    drops_thought = [conversation.leaves_out_thought(place) for place in places]
    notes = [DROPS_EARLIER] if any(drops_thought[:-1]) else []
    if not drops_thought[-1]:  # 2.
        if len(answer) == 1:  # of several messages the template may rewrite the first, too
            turn = with_history_as_read(tokenizer, turn, conversation)
        context, answer_and_rest = split_turn(tokenizer, turn)
        ids = up_to_end(tokenizer, answer_and_rest)
        if context != prompt.ids:  # the answer follows only the prompt's beginning
            notes.append(note_on_mismatch(tokenizer, turn))
    elif len(answer) > 1:  # 3.
        return encode_last_alone(tokenizer, prompt, history, answer, tools=tools, notes=notes)
    else:  # 4.
        context, ids = encode_with_thinking(tokenizer, prompt, conversation)
        notes.append(DROPS_THOUGHT)

    # The template may write no token that ends the answer.
    if not has_end(tokenizer, ids):
        ids = [*ids, tokenizer.eos_token_id]
        notes.append(APPENDS_EOS)
    return Answer(prompt.ids, context, ids, notes)


def compare_with_prompt(tokenizer, prompt: Beginning, text_with_answer: str) -> Turn:
    """Finds where a history with an answer diverges from the one with the generation prompt."""
    ids_with_answer = encode_longer(tokenizer, prompt, text_with_answer)
    n_alike = n_shared(prompt.ids, ids_with_answer)
    return Turn(
        prompt=prompt,
        text_with_answer=text_with_answer,
        ids_with_answer=ids_with_answer,
        n_shared=n_alike,
        only_in_prompt=decode(tokenizer, prompt.ids[n_alike:]),
        only_in_answer=decode(tokenizer, ids_with_answer[n_alike:]),
    )


def with_history_as_read(tokenizer, turn: Turn, conversation: templates.Conversation) -> Turn:
    r"""Returns a turn whose answer follows the prompt, even if the template rewrites the history.

    gpt-oss drops the thinking before a tool call as soon as an answer follows. Then the two texts
    differ from that thinking on, and the tool's result would be learned as a part of the answer. So
    the answer's own text is cut out and put after the prompt. Any other turn is returned as it is.
    Example:

        prompt.text         <user>Hi<bot>Think<bot>Call<tool>5<bot>
        text_with_answer    <user>Hi<bot>Call<tool>5<bot>Yes<end>
        returned            <user>Hi<bot>Think<bot>Call<tool>5<bot>Yes<end>

    Args:
        conversation: it ends with the answer, which is one message.
    """
    if turn.continues_prompt:
        return turn
    history_text = templates.render(tokenizer, conversation.messages[:-1], conversation.tools)
    if not turn.prompt.text.startswith(history_text):
        return turn  # the generation prompt is not known
    generation_prompt = turn.prompt.text.removeprefix(history_text)
    # The generation prompt ends the prompt. If more than that differs, so does the history.
    history_differs = len(turn.only_in_prompt) > len(generation_prompt)
    if generation_prompt == "" or not history_differs:
        return turn
    start = start_of_answer(tokenizer, turn, conversation, generation_prompt)
    if start is None:
        return turn
    answer_text = turn.text_with_answer[start:]
    return compare_with_prompt(tokenizer, turn.prompt, turn.prompt.text + answer_text)


def start_of_answer(
    tokenizer, turn: Turn, conversation: templates.Conversation, generation_prompt: str
) -> int | None:
    """Returns the place in `text_with_answer` where the answer begins; None if it is not found.

    It begins after a generation prompt, but not always after the last one: gpt-oss writes another
    within an answer, between thinking and content. So the conversation is rendered with another
    answer, too. The last generation prompt that both texts share is the right one. Example, with
    the generation prompt `<bot>`:

        text_with_answer    <user>Hi<bot>Think<bot>Yes<end>
        with_other          <user>Hi<bot>MARK<end>
        shared              <user>Hi<bot>
    """
    *history, answer = conversation.messages
    other_answer = {**thoughts.removed(answer), "content": MARK}
    other_answer.pop("tool_calls", None)
    with_other = templates.render(tokenizer, [*history, other_answer], conversation.tools)
    end_of_shared = n_shared(turn.text_with_answer, with_other)
    place = turn.text_with_answer.rfind(generation_prompt, 0, end_of_shared)
    return None if place < 0 else place + len(generation_prompt)


def split_turn(tokenizer, turn: Turn) -> tuple[list[int], list[int]]:
    r"""Returns the token ids of an answer's context, and of the answer and what follows it.

    Examples, with a space between tokens (`ab` is one token):

           prompt                    with answer    context                   answer
        1. <bot>                     <bot> Yes      <bot>                     Yes
        2. <bot> a                   <bot> ab c     <bot> a                   b c
        3. <bot> <think> </think>    <bot> Yes      <bot> <think> </think>    Yes
        4. <bot> \n\n                <bot> \n Yes   <bot> \n\n                Yes
        5. <bot> <think>             <bot> Yes      <bot>                     Yes
    """
    prompt_ids = turn.prompt.ids
    answer_ids = turn.ids_with_answer[turn.n_shared :]
    if turn.continues_prompt:  # 1.
        return prompt_ids, answer_ids
    if turn.text_with_answer.startswith(turn.prompt.text):
        # 2. A token spans the border. At inference the prompt is tokenised alone, and so is what
        # the model generates.
        return prompt_ids, encode_text(tokenizer, turn.text_with_answer[len(turn.prompt.text) :])
    is_whitespace = turn.only_in_prompt.strip() == ""
    if is_whitespace or thoughts.is_whole_thought(turn.only_in_prompt):
        # 3 and 4. A model would give this answer after the whole prompt.
        return prompt_ids, without_whitespace(tokenizer, answer_ids, turn.only_in_prompt)
    # 5. The rest of the prompt, such as an open thought, leads to another answer. It is left out.
    return turn.ids_with_answer[: turn.n_shared], answer_ids


def without_whitespace(tokenizer, ids: list[int], only_in_prompt: str) -> list[int]:
    r"""Returns an answer without the whitespace at its start that the prompt has written already.

    The same whitespace may be other tokens in the prompt, such as one for two newlines, so texts
    are compared. Examples, with a space between tokens:

        answer      only_in_prompt     returned
        \n Yes      \n\n               Yes
        \n\n Yes    \n                 \n Yes
        \n Yes      <think></think>    \n Yes
    """
    n_space = 0  # tokens of whitespace at the start of the answer
    while n_space < len(ids) and decode(tokenizer, [ids[n_space]]).isspace():
        n_space += 1
    space = decode(tokenizer, ids[:n_space])
    n_written = n_shared(space, only_in_prompt)  # characters that the prompt has already
    if n_written == 0:
        return ids
    return encode_text(tokenizer, space[n_written:]) + ids[n_space:]


# ============================================================ an answer whose thinking is dropped
def encode_last_alone(
    tokenizer,
    prompt: Beginning,
    history: list[dict],
    answer: list[dict],
    *,
    tools,
    notes: list[str],
) -> Answer:
    """Returns an answer of several messages, where the template drops the last one's thinking.

    The last message is encoded alone, as an answer to all messages before it. That puts its
    thinking back in. The answer's earlier messages, such as a call and its result, are then in the
    context, and are moved from there to the front of the ids. Example:

        prompt             <user>Hi<bot>
        context of last    <user>Hi<bot>Call<end><tool>5<end><bot>
        ids of last        <think>Why</think>Yes<end>
        returned ids       Call<end><tool>5<end><bot><think>Why</think>Yes<end>

    Args:
        prompt: what `encode_prompt` returns for the history.
        notes: on the messages before the last one.
    """
    *earlier, last_message = answer
    # One message, whose thinking is dropped: case 4 of `encode_answer`.
    last = encode_answer(tokenizer, history + earlier, [last_message], tools)
    # How much of the prompt its context begins with; usually all.
    n_context = n_shared(prompt.ids, last.context)
    return Answer(
        prompt.ids,
        context=last.context[:n_context],
        ids=ids_after(last, n_context),  # with the earlier messages
        notes=notes + last.notes,
    )


def encode_with_thinking(
    tokenizer, prompt: Beginning, conversation: templates.Conversation
) -> tuple[list[int], list[int]]:
    """Returns the token ids of an answer's context, and of the answer with its thinking.

    Example, by the steps below:

        prompt    <user>Hi<bot><think></think>
        1.        <user>Hi<bot>MARKYes<end>
        2.        <think>Why</think>Yes<end>
        3.        context <user>Hi<bot>, answer <think>Why</think>Yes<end>

    Args:
        prompt: what `encode_prompt` returns for the messages before the last one.
        conversation: it ends with the answer, whose thinking the template drops.
    """
    thinking, content = thoughts.thinking_and_content(tokenizer, conversation.messages[-1])
    # 1. Where does the template write the content? A mark shows it.
    marked_turn = turn_with_mark(tokenizer, prompt, conversation, content)
    before_content, content_and_rest = split_at_content(marked_turn.only_in_answer)
    # 2. The thinking goes in front of it.
    with_thinking = thinking + content_and_rest
    # 3. How much of the prompt does that follow?
    context_text, answer = follow_prompt(
        prompt.text,
        only_in_prompt=marked_turn.only_in_prompt,
        before_content=before_content,
        answer=with_thinking,
    )
    # 4. Both become token ids.
    context = encode_beginning(tokenizer, context_text)
    ids = encode_after(tokenizer, context, answer)
    return context.ids, up_to_end(tokenizer, ids)


def follow_prompt(
    prompt: str, *, only_in_prompt: str, before_content: str, answer: str
) -> tuple[str, str]:
    r"""Returns the part of a prompt that an answer with thinking follows, and what is learned then.

        1. The prompt ends with a whole thought: it is cut off.
        2. It opens a thought, as the answer does: the answer does not open it again.
        3. The template writes all of the prompt before any answer: so all stays.
        4. It ends with something else: all stays.

    Examples with `<think>Why</think>Yes`:

           prompt                  only_in_prompt     context           learned
        1. <bot><think></think>    <think></think>    <bot>             <think>Why</think>Yes
        2. <bot><think>\n          <think>\n          <bot><think>\n    Why</think>Yes
        3. <bot>                   nothing            <bot>             <think>Why</think>Yes
        4. <bot>Sure,              Sure,              <bot>Sure,        <think>Why</think>Yes

    Args:
        only_in_prompt: the end of the prompt that the template does not write before an answer
            without thinking; "" if it writes the whole prompt.
        before_content: what the template writes between the prompt and the content, such as a
            space. In 3 it comes first; elsewhere the answer follows another text.
        answer: the thinking, the content, and what the template writes after it.
    """
    prompt_before_thought = without_closed_thought(prompt, only_in_prompt)
    if prompt_before_thought != prompt:  # 1.
        return prompt_before_thought, answer
    # What opens a thought: one of `MARKERS`, or a marker that this template alone has.
    opening = thoughts.end_that_opens(prompt) or only_in_prompt.lstrip()
    after_opening = without_opening(answer, opening)
    if after_opening is not None:  # 2.
        return prompt, after_opening
    if only_in_prompt == "":  # 3.
        return prompt, before_content + answer
    return prompt, answer  # 4.


def without_closed_thought(prompt: str, only_in_prompt: str) -> str:
    """Returns a prompt without the whole thought that ends it; the same prompt if none does.

    The thought is `only_in_prompt`, with whatever markers, if the template leaves it out before
    answers. If it writes the thought there, too, `MARKERS` tell.
    """
    if thoughts.is_whole_thought(only_in_prompt):
        return prompt.removesuffix(only_in_prompt)
    return thoughts.without_thought_at_end(prompt)


def without_opening(answer: str, opening: str) -> str | None:
    """Returns an answer without the opening marker that the prompt ends with.

    Returns None if the answer does not begin with that marker. The whitespace after it may differ
    between the two, so only what they share is left out.
    """
    marker = opening.strip()
    text = answer.lstrip()
    if not marker or not text.startswith(marker):
        return None
    return text[n_shared(text, opening) :]


def turn_with_mark(
    tokenizer, prompt: Beginning, conversation: templates.Conversation, content: str
) -> Turn:
    """Returns the turn of the conversation with its last message changed.

    The message has lost its thinking, and has `MARK` in front of its content. The mark shows
    `split_at_content` where the template writes the content: after a space, an empty thought, or
    nothing.

    Args:
        prompt, conversation: see `encode_with_thinking`.
        content: of the last message, without its thinking. An empty one gets no mark, because a
            template may ask whether there is content.
    """
    *others, message = conversation.messages
    marked = {**thoughts.removed(message), "content": (MARK + content) if content else ""}
    text = templates.render(tokenizer, [*others, marked], conversation.tools)
    return compare_with_prompt(tokenizer, prompt, text)


def split_at_content(written: str) -> tuple[str, str]:
    """Returns what a template writes before an answer's content, and the rest from there on.

    Examples, with _ for a space:

        written                        before     rest
        MARKYes<end>                   nothing    Yes<end>
        _MARKYes<end>                  _          Yes<end>
        <think></think>MARKYes<end>    nothing    Yes<end>    (an empty thought is left out)
        _<call>                        _          <call>      (no content is written)

    Args:
        written: the answer in `turn_with_mark`.
    """
    written = thoughts.without_empty_thought(written)
    before_content, mark, rest = written.partition(MARK)
    if mark:
        return before_content, rest
    rest = written.lstrip()
    return written.removesuffix(rest), rest


# ============================================================ where an answer ends
# The fields of `templates.Conventions` that this section reads, for two templates:
#
#                     ChatML: Yes<|im_end|>\n    no token ends an answer: Yes\n\n
#     ending          <|im_end|> \n              \n\n
#     stop            0                          None
#     end_of_answer   <|im_end|>                 nothing
#     white_ending    \n                         \n\n
#     writes_no_stop  false                      true


def up_to_end(tokenizer, ids: list[int]) -> list[int]:
    r"""Returns an answer without what the template writes after the token that ends it.

    Examples, with a space between tokens:

        ending of the template    answer           returned
        <end> \n                  Yes <end> \n     Yes <end>
        <end> \n                  call <call> \n   call <call>  (a tool call may end differently)
        \n\n                      Yes \n\n         Yes          (no token ends an answer)
        \n\n                      Yes .\n\n        Yes .        (a token of text and whitespace)
    """
    conventions = templates.conventions(tokenizer)
    if conventions.writes_no_stop:
        return without_trailing_space(tokenizer, ids)
    ending = list(conventions.ending)
    if ends_with(ids, ending):  # `ending` begins with `end_of_answer`, which stays
        return ids[: -len(ending)] + conventions.end_of_answer
    # A tool call, which may end differently, or a template whose ending is not known.
    length = turn_length(tokenizer, ids)
    return ids[:length] if length else ids


def ends_with(ids: list[int], ending: list[int]) -> bool:
    return bool(ending) and ids[-len(ending) :] == ending


def without_trailing_space(tokenizer, ids: list[int]) -> list[int]:
    r"""Returns an answer without the whitespace that the template writes after every answer.

    Examples where that is `\n\n`, with a space between tokens:

        Yes \n \n     ->  Yes
        Yes .\n\n     ->  Yes .    a token ends with it, so the rest is tokenised again
    """
    white = templates.conventions(tokenizer).white_ending
    for n_tokens in range(1, len(white) + 1):  # no more tokens than characters
        end = decode(tokenizer, ids[-n_tokens:])
        if end.endswith(white):
            return ids[:-n_tokens] + encode_text(tokenizer, end.removesuffix(white))
    return ids


def has_end(tokenizer, ids: list[int]) -> bool:
    """Whether the last token of an answer ends it."""
    if not ids:
        return False
    if ids[-1] == tokenizer.eos_token_id:
        return True
    conventions = templates.conventions(tokenizer)
    if conventions.writes_no_stop:
        return False
    if ids[-1:] == conventions.end_of_answer[-1:]:
        return True
    # Another special token, as after a tool call.
    return turn_length(tokenizer, ids) == len(ids)


def turn_length(tokenizer, ids: list[int]) -> int:
    r"""Returns how many tokens a turn has, up to and including its end token; 0 if it has none.

    The end token is the last EOS. If there is none, as in a tool call of gpt-oss, it is a special
    token, at the end or with one token after it, such as a newline. What follows the end is never
    generated, so it is not learned. Examples, with a space between tokens:

        Yes <eos> \n          2
        call <call> \n        2
        Yes                   0
    """
    eos = tokenizer.eos_token_id
    if eos in ids:
        n_after_eos = ids[::-1].index(eos)
        return len(ids) - n_after_eos
    special = {number for number, token in added_tokens(tokenizer).items() if token.special}
    for length in (len(ids), len(ids) - 1):
        if length > 0 and ids[length - 1] in special:
            return length
    return 0


def tokens_since(tokenizer, messages: list[dict], place: int, tools=None) -> int:
    """Returns how many tokens a prompt has after the end of one of its answers.

    The prompt is rendered with two different answers in that place. After these, both are alike.
    The answer's end token is not counted. Example, with three tokens after it:

        <user> One <bot> a <end> <user> Two <bot>
        <user> One <bot> b <end> <user> Two <bot>

    For `--loss_on all` where the template rewrites earlier turns. Each answer then has a sequence
    of its own, in which only these tokens and the answer are new.

    Args:
        messages: the history of the prompt.
        place: the index of the answer among the messages.
        tools: see `templates.render`.
    """
    prompts = []
    for content in ("a", "b"):
        answer = {"role": "assistant", "content": content}
        changed = [*messages[:place], answer, *messages[place + 1 :]]
        text = templates.render(tokenizer, changed, tools, add_generation_prompt=True)
        prompts.append(encode_text(tokenizer, text))
    first, second = prompts
    n_after_text = n_shared_at_end(first, second)
    after_text = first[len(first) - n_after_text :]
    return n_after_text - length_of_end(tokenizer, after_text)


def length_of_end(tokenizer, after_text: list[int]) -> int:
    """Returns how many of the tokens after an answer's text end it."""
    end_of_answer = templates.conventions(tokenizer).end_of_answer
    if after_text[: len(end_of_answer)] == end_of_answer:
        return len(end_of_answer)
    # The conventions know how a last answer ends. An earlier one may end with another marker.
    return 1 if after_text and is_marker(tokenizer, after_text[0]) else 0


# ============================================================ preferences
class Preference(NamedTuple):
    """Token ids of a prompt and two answers, each up to its end; and notes, see `note`."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    notes: list[str]


def encode_preference(tokenizer, prompt, chosen, rejected, tools=None) -> Preference:
    """Returns the token ids of a pair. An answer is empty if the chat template does not write it.

    The prompt's ids are the same for both answers. If one answer continues only a beginning of the
    generation prompt, that beginning is the prompt of both, and the rest is put at the start of the
    other answer. Example, where the generation prompt ends with `<think>`:

        chosen    <think>Why</think>Yes
        rejected  No
        returned  prompt <bot>, chosen <think>Why</think>Yes<end>, rejected No<end>

    Args:
        prompt, chosen, rejected: three strings, or three message lists.
        tools: see `templates.render`.
    """
    if isinstance(prompt, str):
        prompt_ids, chosen_ids, rejected_ids = encode_plain(tokenizer, prompt, chosen, rejected)
        return Preference(prompt_ids, chosen_ids, rejected_ids, [])

    encoded_prompt = encode_prompt(tokenizer, prompt, tools)
    chosen_answer = encode_answer(tokenizer, prompt, chosen, tools, prompt=encoded_prompt)
    rejected_answer = encode_answer(tokenizer, prompt, rejected, tools, prompt=encoded_prompt)
    n_context = n_shared(chosen_answer.context, rejected_answer.context)
    notes = chosen_answer.notes + rejected_answer.notes
    notes += templates.unwritten_parts(tokenizer, prompt, tools)
    return Preference(
        prompt=chosen_answer.context[:n_context],
        chosen=ids_after(chosen_answer, n_context),
        rejected=ids_after(rejected_answer, n_context),
        notes=notes,
    )


def ids_after(answer: Answer, n_context: int) -> list[int]:
    """Returns an answer's ids after the first `n_context` of its context; empty if unwritten."""
    if not answer.ids:
        return []
    return answer.context[n_context:] + answer.ids


# ============================================================ the tokenizer
def fingerprint(tokenizer) -> str:
    """Returns a text that changes whenever the tokenizer would produce different ids."""
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
    return stops | set(templates.conventions(tokenizer).end_of_answer[-1:])


# ============================================================ notes
def note(kind: str, example: str = "") -> str:
    """Returns a note on a row for the user.

    A note is one line `kind<TAB>example`; `conversion.describe_notes` takes it apart. The run
    prints each kind once, with its number of rows and one example.

    Args:
        kind: like `example`, without tabs and newlines.
        example: what this row has; the tab is left out if there is none.
    """
    return f"{kind}\t{example}" if example else kind


def note_on_mismatch(tokenizer, turn: Turn) -> str:
    """Returns a note on an answer that does not continue the generation prompt."""
    end_of_prompt = repr(turn.only_in_prompt)
    start_of_answer = repr(turn.only_in_answer[:30])
    return note(
        "answers do not continue the generation prompt, so they are learned after what both "
        f"share ({way_to_align(tokenizer, turn)} may align them)",
        example=f"the prompt ends {end_of_prompt}, the answer begins {start_of_answer}",
    )


def way_to_align(tokenizer, turn: Turn) -> str:
    """Returns the argument that may make the generation prompt end as the answers begin.

    Example: `--chat_template_kwargs '{"enable_thinking": false}'` if the prompt opens a thought
    that the answer does not have, and the template knows this switch.
    """
    opens_thought = any(opener in turn.only_in_prompt for opener, _ in thoughts.MARKERS)
    for switch in ("enable_thinking", "thinking"):
        if switch in templates.variables(tokenizer):
            return f"--chat_template_kwargs '{json.dumps({switch: not opens_thought})}'"
    return "--chat_template FILE with another generation prompt"


def why_left_out(notes: list[str]) -> str:
    """Returns the note that says an answer is not written; "" if there is none."""
    for text in notes:
        if text in (templates.DROPS_CALLS, templates.DROPS_ANSWER):
            return text
    return ""
