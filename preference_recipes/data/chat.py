"""Prompts and answers as token ids: a prompt as a model reads it, an answer as it would write it.

One rule: an answer is what the chat template writes after the generation prompt, up to and with
the token that ends the turn. All cutting is done on texts, which are tokenised at the very end,
prompt and answer apart, as at inference. What the rule meets on its way:

    the template ...                                      so ...
    wants contents or arguments in another form           a trial finds the form, see `Style`
    writes more in the prompt than before an answer       the answer follows what both begin with,
                                                          or the prompt, see `split_answer`
    rewrites the history once an answer follows           the prompt's history is put back
    drops the thinking of the answer                      it is put back, see `with_thinking`
    drops a content or a call of the answer               the row is left out, and named
    drops a part of the history                           so it does at inference: a note says it

Of an answer of several messages only what the model writes is learned, by the mask of `targets`.
"""

import contextlib
import copy
import datetime
import functools
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.meta
import transformers.utils.chat_template_utils as template_utils

from common import in_one_line
from preference_recipes.data import thoughts
from preference_recipes.data.messages import (
    BadRow,
    is_learned,
    learned_turns,
    nested,
    without_nulls,
)

# Why an answer is left out.
DROPS_CALLS = "tool calls are not learned, because the chat template does not write them"
DROPS_ANSWER = "answers are not learned, because the chat template does not write them"
# What the run says about data whose template does something that a user should know about.
DROPS_ROLE = "messages that the chat template does not write"
DROPS_TOOLS = "tools that the chat template does not write"
DROPS_THOUGHT = "the chat template drops the thinking of answers, so it is put back in"
DROPS_EARLIER = "the chat template drops the thinking of an answer's earlier messages: not learned"
APPENDS_EOS = "the chat template writes no end of a turn, so the EOS is appended to what is learned"
CONTINUES = "prompts end with a message of the assistant, with which the model goes on"
REWRITES_TURNS = "the chat template writes the earlier turns of an answer differently later on"
FOLLOWS_LESS = (
    "answers do not continue the generation prompt, so they are learned after what both share "
    "(--chat_template or --chat_template_kwargs may align them)"
)

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

# What every template is given anyway.
GIVEN_TO_TEMPLATES = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now")
# A surrogate: JSON may write a character as two of them.
HALF_CHARACTER = re.compile("[\ud800-\udfff]")
# Splits the text of a control token, and is invisible.
ZERO_WIDTH_SPACE = "\u200b"


# ============================================================ texts and ids
def encode(tokenizer, text: str) -> list[int]:
    """Returns the token ids of a text, without the special tokens that a tokenizer puts around it.

    Raises:
        BadRow: the text holds half of a character.
    """
    backend = backend_of(tokenizer)
    try:
        if backend is None:
            return tokenizer(text, add_special_tokens=False).input_ids
        # Without offsets, which nothing reads here: in half the time.
        return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    except TypeError:  # which does not say what is wrong
        if HALF_CHARACTER.search(text):
            raise BadRow("a text holds one half of a character, without the other") from None
        raise


@functools.lru_cache(maxsize=16)
def backend_of(tokenizer):
    """Returns what encodes for a fast tokenizer; None for one in Python, or that truncates."""
    tokenizer("")  # sets the backend to neither truncate nor pad, whatever its file says
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return None if backend is None or backend.truncation or backend.padding else backend


def encode_after(tokenizer, before: str, before_ids: list[int], text: str) -> list[int]:
    """Returns the ids of a text as a model would write it after another.

    They are those of both texts together, cut between them; this counts where a tokenizer puts a
    space in front of a text's first word. If a token spans the border, no such cut exists, and the
    text is tokenised alone. Examples, with a space between tokens:

        before        text   both texts         returned
        <user> Hi     you    <user> Hi you      you
        ab            cd     a bc d             c d

    Of `before` what follows its last marker is enough: a tokenizer first cuts texts at these.
    """
    markers = [found.start() for found in added_tokens(tokenizer).finditer(before[-200:])]
    if markers:
        before = before[-200:][markers[-1] :]
        before_ids = encode_marker(tokenizer, len(tokenizer), before)
    both = encode(tokenizer, before + text)
    if both[: len(before_ids)] == before_ids:
        return both[len(before_ids) :]
    return encode(tokenizer, text)


@functools.lru_cache(maxsize=1024)
def encode_marker(tokenizer, _size: int, text: str) -> list[int]:
    """Does what `encode` does, once for each text: what follows the last marker is mostly alike."""
    return encode(tokenizer, text)


def decode(tokenizer, ids: list[int]) -> str:
    """Returns the text of token ids as it is, special tokens included."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def decode_answers(tokenizer, answers: list[list[int]]) -> list[str]:
    """Returns the texts of answers without special tokens, but with the markers of thoughts.

    Some tokenizers have markers that are special tokens. Without these, a thought would run into
    what follows it.
    """
    left_out = tokens_left_out(tokenizer, len(tokenizer))
    kept = [[token for token in ids if token not in left_out] for ids in answers]
    return tokenizer.batch_decode(kept, skip_special_tokens=False)


@functools.lru_cache(maxsize=16)
def tokens_left_out(tokenizer, _size: int) -> set[int]:
    """Returns the special tokens that are no marker of a thought."""
    markers = [marker for pair in thoughts.MARKERS for marker in pair]
    return {
        number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special and not any(marker.startswith(token.content) for marker in markers)
    }


def encode_plain(tokenizer, prompt: str, *answers: str) -> tuple[list[int], ...]:
    """Returns the ids of a prompt and of each answer, for strings without a chat template.

    The prompt gets a BOS if this tokenizer adds one to texts, and every answer an EOS at its end,
    unless they have them already.
    """
    prompt_ids = encode(tokenizer, prompt)
    answer_ids = [encode_after(tokenizer, prompt, prompt_ids, answer) for answer in answers]

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


def n_common(first, second) -> int:
    """Returns how many elements, or characters, both begin with."""
    known = 0
    most = min(len(first), len(second))
    while known < most:  # a binary search: Python compares slices faster than their elements
        middle = (known + most + 1) // 2
        if first[known:middle] == second[known:middle]:
            known = middle
        else:
            most = middle - 1
    return known


def common_end(first: str, second: str) -> str:
    """Returns what both texts end with."""
    n = n_common(first[::-1], second[::-1])
    return first[len(first) - n :]


def added_tokens(tokenizer) -> re.Pattern:
    """Returns what matches any token that was added to the vocabulary to mark something."""
    return find_added_tokens(tokenizer, len(tokenizer))


@functools.lru_cache(maxsize=16)
def find_added_tokens(tokenizer, _size: int) -> re.Pattern:
    texts = [token.content for token in tokenizer.added_tokens_decoder.values()]
    texts = sorted((text for text in texts if text.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


# ============================================================ the template itself
def read(path: str) -> str:
    """Returns the chat template in a file.

    Raises:
        SystemExit: no such file, not UTF-8, or no Jinja template.
    """
    try:
        template = Path(path).read_text(encoding="utf-8")
        template_utils.render_jinja_template([[]], chat_template=template)
    except (OSError, UnicodeDecodeError, jinja2.TemplateSyntaxError) as error:
        reason = in_one_line(error)
        sys.exit(f"--chat_template {path}: expected a file with a Jinja template: {reason}")
    except Exception:  # it is a template, though it wants messages
        pass
    return template


def set_defaults(tokenizer, text: str) -> None:
    """Gives variables of a tokenizer's chat template default values.

    They are written at the beginning of the template. So they are saved with it, and whoever loads
    the actor gets the same prompts without knowing about them.

    Args:
        text: a JSON object of names and values.

    Raises:
        SystemExit: not a JSON object, no chat template, or a variable that it does not have.
    """
    argument = f"--chat_template_kwargs {text}"
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        sys.exit(f"{argument}: expected a JSON object: {error}")
    if not isinstance(values, dict):
        sys.exit(f'{argument}: expected a JSON object, such as {{"enable_thinking": false}}')
    if tokenizer.chat_template is None:
        sys.exit(f"{argument}: the tokenizer has no chat template")
    known = variables(tokenizer)
    for name in values:
        if name not in known:
            others = ", ".join(sorted(known)) or "none"
            sys.exit(
                f"{argument}: the chat template has no variable {name!r} to set; it has: {others}"
            )

    defaults = {name: f"{name} | default({value!r})" for name, value in values.items()}
    tokenizer.chat_template = beginning_with(tokenizer, defaults)


def beginning_with(tokenizer, expressions: dict[str, str]) -> str | dict[str, str]:
    """Returns a tokenizer's chat template with values for its variables, which Jinja writes."""
    beginning = "".join(f"{{% set {name} = {text} %}}\n" for name, text in expressions.items())
    if isinstance(tokenizer.chat_template, dict):  # several, by their names
        return {name: beginning + text for name, text in tokenizer.chat_template.items()}
    return beginning + tokenizer.chat_template


def with_variables(tokenizer, values: dict | str | None):
    """Returns a tokenizer whose template has these values, of a row's column, for its variables.

    Args:
        values: by name, or a JSON text of that. Names that the template does not have do nothing.

    Raises:
        BadRow: it is no object.
    """
    if not values or tokenizer.chat_template is None:
        return tokenizer
    given = values
    if isinstance(values, str):
        with contextlib.suppress(ValueError):  # refused below
            given = json.loads(values)
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


def variables(tokenizer) -> set[str]:
    """Returns the variables that a tokenizer's chat template reads and a user may set."""
    templates = [tokenizer.chat_template]
    if isinstance(tokenizer.chat_template, dict):  # several, by their names
        templates = list(tokenizer.chat_template.values())
    found = set().union(*map(variables_of, templates))
    return found - {*GIVEN_TO_TEMPLATES, *tokenizer.special_tokens_map}


@functools.lru_cache(maxsize=16)
def variables_of(template: str) -> set[str]:
    """Returns the names that a template takes from its caller."""
    environment = template_utils._compile_jinja_template(template).environment
    names = jinja2.meta.find_undeclared_variables(environment.parse(template))
    return names - environment.globals.keys()


# ============================================================ rendering
class Style(NamedTuple):
    r"""How a chat template wants and writes messages, as found out by rendering some.

    Attributes:
        parts: whether contents must be lists of parts (LLaVA), not strings.
        argument_texts: whether the arguments of tool calls must be JSON texts (DeepSeek-V3).
        short_ids: whether calls must have ids of nine characters (Mistral).
        field: the field in which the template reads a thought; "" if it reads none.
        ending: what it writes after the last answer, whatever the answer is: `<|im_end|>\n`.
        end: the beginning of `ending` with the token that ends an answer, `<|im_end|>`; "" if there
            is none.
    """

    parts: bool = False
    argument_texts: bool = False
    short_ids: bool = False
    field: str = ""
    ending: str = ""
    end: str = ""


def render(
    tokenizer,
    messages: list[dict],
    tools: list[dict] | str | None = None,
    add_generation_prompt: bool = False,
    style: Style | None = None,
) -> str:
    """Returns messages as the chat template writes them.

    Args:
        tools: what the messages may call, as JSON schemas or as a JSON text of them.
        add_generation_prompt: end with what precedes an answer.
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
        schemas = None
        if tools:
            schemas = without_nulls(json.loads(tools) if isinstance(tools, str) else tools)
        template = tokenizer.get_chat_template(tools=schemas)  # there may be several, by names
        if getattr(tokenizer, "chat_date", None):
            template = dated(template, tokenizer.chat_date)
        return tokenizer.apply_chat_template(
            in_style(tokenizer, template, messages, style),
            schemas,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except Exception as error:  # a template raises what it likes, such as that roles must alternate
        given = "messages or tools" if tools else "messages"
        reason = in_one_line(error)
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise BadRow(
            f"the tokenizer's chat template refuses the {given}: {reason} (roles: {roles})"
        ) from None


def prints_date(tokenizer) -> bool:
    """Whether the chat template writes the date of the day."""
    return "strftime_now" in str(tokenizer.chat_template)


@functools.lru_cache(maxsize=16)
def dated(template: str, date: str) -> str:
    """Returns a template that writes a date, given as in 2026-01-31, in place of today's."""
    day = datetime.date.fromisoformat(date)
    call = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
    return call.sub(lambda found: repr(day.strftime(found[2])), template)


def in_style(tokenizer, template: str, messages: list[dict], style: Style) -> list[dict]:
    """Returns messages in the form that a template wants."""
    messages = [dict(message) for message in messages]
    for message in messages:
        if message["role"] == "assistant":
            message["content"] = without_end(tokenizer, message["content"], style)
            if style.field and not message.get(style.field) and thoughts.of_field(message):
                message[style.field] = thoughts.of_field(message)
        if style.parts:
            message["content"] = [{"type": "text", "text": message["content"]}]
        if message.get("tool_calls") and "function" in template:  # else it may read flat calls
            message["tool_calls"] = [nested(call) for call in message["tool_calls"]]
        if message.get("tool_calls") and style.argument_texts:
            message["tool_calls"] = [with_argument_text(call) for call in message["tool_calls"]]
    return with_short_ids(messages) if style.short_ids else messages


def without_end(tokenizer, content: str, style: Style) -> str:
    """Returns an answer without the token that ends it, which the template writes itself."""
    for end in (style.end, tokenizer.eos_token):
        if end and content.rstrip().endswith(end):
            return without_end(tokenizer, content.rstrip().removesuffix(end), style)
    return content


def with_argument_text(call: dict) -> dict:
    """Returns a tool call whose arguments are a JSON text."""
    function = call.get("function", {})
    if not isinstance(function.get("arguments"), dict):
        return call
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def with_short_ids(messages: list[dict]) -> list[dict]:
    """Returns messages whose calls have ids of nine characters, and so have the calls' results.

    A call with another id, or with none, gets its number. A result belongs to the call that it
    names, or else to the next one that has no result.
    """
    short: dict[str, str] = {}  # the new id of each id that the data have
    waiting: list[str] = []  # new ids of calls without a result
    n_calls = 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or []:
            old = str(call.get("id", ""))
            new = old if len(old) == 9 and old.isalnum() else f"{n_calls:09d}"
            n_calls += 1
            short[old] = new
            waiting.append(new)
            calls.append({**call, "id": new})
        if calls:
            message["tool_calls"] = calls
        if message["role"] == "tool":
            new = short.get(str(message.get("tool_call_id")), waiting[0] if waiting else "")
            message["tool_call_id"] = new
            if new in waiting:
                waiting.remove(new)
    return messages


def style_of(tokenizer) -> Style:
    """Returns what `find_style` finds, once for each tokenizer and template."""
    return find_style(tokenizer, str(tokenizer.chat_template), tokenizer.eos_token_id)


@functools.lru_cache(maxsize=16)
def find_style(tokenizer, template: str, _eos: int) -> Style:
    """Renders a few short messages, and infers from them how the template writes."""

    def write(style: Style, *messages: dict) -> str:
        try:
            return render(tokenizer, list(messages), style=style)
        except BadRow:
            return ""

    style = Style(short_ids=bool(re.search(r"length\s*!=\s*9\b", template)))
    with_parts = style._replace(parts=True)
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

    first, second = ({"role": "assistant", "content": content} for content in "ab")
    ending = common_end(write(style, QUESTION, first), write(style, QUESTION, second))
    followed = common_end(
        write(style, QUESTION, first, QUESTION), write(style, QUESTION, second, QUESTION)
    )
    return style._replace(ending=ending, end=end_in(tokenizer, ending, followed))


def end_in(tokenizer, ending: str, followed: str) -> str:
    """Returns the beginning of an ending up to and with the token that ends an answer.

    That also ends an answer that is followed: Phi-3 writes `<|end|><eos>` after the last answer,
    but `<|end|>` after others. If they have nothing in common (gpt-oss: `<|return|>`, `<|end|>`),
    the last answer's own end counts. An EOS is the end wherever it is; of other tokens the last
    one that both have (Cohere: `<|END_RESPONSE|><|END_OF_TURN_TOKEN|>`).
    """
    found = [match.span() for match in added_tokens(tokenizer).finditer(ending)]
    shared = [span for span in found if followed.startswith(ending[: span[1]])]
    for spans in (shared, found[:1] if not shared else []):
        eos = [end for start, end in spans if ending[start:end] == tokenizer.eos_token]
        ends = eos[:1] or [end for _, end in spans[-1:]]
        if ends:
            return ending[: ends[0]]
    return ""


# ============================================================ one answer
class Prompt(NamedTuple):
    """What a model reads before it answers."""

    text: str
    ids: list[int]


class Answer(NamedTuple):
    """The token ids of an answer as a model should write it, and of what precedes it.

    Attributes:
        prompt: what the model reads at inference before it answers.
        context: what precedes the answer in training: `prompt`, or only its beginning where the
            template does not write this answer after all of it.
        ids: the answer, up to and with the token that ends it; empty if the template does not write
            what the user gave.
        targets: which of `ids` the model writes itself, and should learn to.
        notes: what the user should know about it, see `note`.
    """

    prompt: list[int]
    context: list[int]
    ids: list[int]
    targets: list[bool]
    notes: list[str]


def encode_prompt(tokenizer, messages: list[dict], tools=None) -> Prompt:
    """Returns what a model reads before it answers these messages; nothing if there are none.

    If the last one is the assistant's, the model goes on with it: its turn is left open, as
    `apply_chat_template(..., continue_final_message=True)` does.

    Raises:
        BadRow: there is no chat template, or it refuses the messages; the last one is a call.
    """
    if not is_open(messages):
        return generation_prompt(tokenizer, messages, tools)
    *others, last = messages
    longer = {**last, "content": last["content"] + MARK}
    text, found, _ = render(tokenizer, [*others, longer], tools).rpartition(MARK)
    if not found or last.get("tool_calls"):
        raise BadRow("the prompt ends with a message of the assistant that cannot be continued")
    if not render(tokenizer, messages, tools).startswith(text):  # it takes off whitespace there
        text = text.rstrip()
    return Prompt(text, encode(tokenizer, text))


def generation_prompt(tokenizer, messages: list[dict], tools=None) -> Prompt:
    """Returns what a model reads before a new turn; nothing if there are no messages."""
    text = ""
    if messages:
        text = render(tokenizer, messages, tools, add_generation_prompt=True)
    return Prompt(text, encode(tokenizer, text))


def is_open(messages: list[dict]) -> bool:
    """Whether a prompt ends with a message of the assistant, with which the model goes on."""
    return bool(messages) and messages[-1]["role"] == "assistant"


def begun(
    tokenizer, history: list[dict], answer: list[dict], tools=None
) -> tuple[list[dict], list[dict], dict[int, Prompt]]:
    """Moves what begins an answer at the end of its history to the answer.

    Returns history, answer and, if anything was moved, the prompt of that turn by its number.
    """
    if not is_open(history) or not answer or answer[0]["role"] != "assistant":
        return history, answer, {}
    prompt = encode_prompt(tokenizer, history, tools)
    *history, first = history
    thinking = {field: first[field] for field in thoughts.FIELDS if field in first}
    whole = {**thinking, **answer[0], "content": first["content"] + answer[0]["content"]}
    return history, [whole, *answer[1:]], {len(history): prompt}


def encode_answer(
    tokenizer,
    history: list[dict],
    answer: list[dict],
    tools=None,
    prompt: Prompt | None = None,
) -> Answer:
    """Returns what `encode_turn` does, with the targets of an answer of several messages.

    Results of tools, messages of a user and what says that it is not learned are no targets.
    """
    if prompt is None:
        prompt = encode_prompt(tokenizer, history, tools)
    history, answer, prompts = begun(tokenizer, history, answer, tools)
    if all(message["role"] == "assistant" and is_learned(message) for message in answer):
        return encode_turn(tokenizer, history, answer, tools, prompt)

    messages = history + answer
    turns = learned_turns(messages, len(history))
    sequences, _, notes = encode_conversation(tokenizer, messages, turns, tools, prompts=prompts)
    if len(sequences) > 1 and not why_left_out(notes):
        sequences, notes = in_one_sequence(tokenizer, messages, turns, tools, prompts)
    if not sequences or why_left_out(notes):
        return Answer(prompt.ids, context=prompt.ids, ids=[], targets=[], notes=notes)
    [(ids, targets)] = sequences
    n = min(n_common(prompt.ids, ids), targets.index(True))
    return Answer(prompt.ids, ids[:n], ids[n:], targets[n:], notes)


def encode_turn(
    tokenizer,
    history: list[dict],
    answer: list[dict],
    tools=None,
    prompt: Prompt | None = None,
) -> Answer:
    r"""Returns the token ids of an answer, all to learn, and of what precedes it.

    Example, with ChatML:

        history    user: Hi
        answer     assistant: Yes
        context    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
        ids        Yes<|im_end|>

    Args:
        history, answer: messages.
        tools: see `render`.
        prompt: what the model reads before it, if that is known.

    Raises:
        BadRow: there is no chat template, or it refuses the messages.
    """
    if prompt is None:
        prompt = generation_prompt(tokenizer, history, tools)
    whole = render(tokenizer, history + answer, tools)
    written = as_read(tokenizer, prompt.text, whole, history, answer, tools)
    context, text = split_answer(prompt.text, written)
    reason = why_unwritten(tokenizer, history, answer, text, tools)
    if reason:
        return Answer(prompt.ids, context=prompt.ids, ids=[], targets=[], notes=[reason])

    messages = history + answer
    places = range(len(history), len(messages))
    drops = [drops_thought(tokenizer, messages, place, whole, tools) for place in places]
    notes = [DROPS_EARLIER] if any(drops[:-1]) else []
    if drops[-1]:
        context, text = with_thinking(tokenizer, prompt.text, history, answer, tools)
        notes.append(DROPS_THOUGHT)

    context_ids = prompt.ids
    if context != prompt.text:
        if len(context) < len(render(tokenizer, history, tools)):
            raise BadRow("the chat template writes the history differently before the answer")
        context_ids = encode(tokenizer, context)
        if not drops[-1]:
            end_of_prompt = prompt.text[len(context) :]
            example = f"the prompt ends {end_of_prompt!r}, the answer begins {text[:30]!r}"
            notes.append(note(FOLLOWS_LESS, example))
    text, is_ended = up_to_end(tokenizer, text)
    ids = encode_after(tokenizer, context, context_ids, text)
    if not is_ended:
        ids = [*ids, tokenizer.eos_token_id]
        notes.append(APPENDS_EOS)
    return Answer(prompt.ids, context_ids, ids, [True] * len(ids), notes)


def split_answer(prompt: str, whole: str, thinks: bool = False) -> tuple[str, str]:
    r"""Returns the context of an answer, and the answer with all that follows it.

    Args:
        thinks: a thought will be put in front of the answer, so it does not follow another one.

    Examples:

       prompt                  whole                   context                 answer
    1. <bot>                   <bot>Yes                <bot>                   Yes
    2. <bot><think></think>    <bot>Yes                <bot><think></think>    Yes
    3. <bot>\n\n               <bot>\nYes              <bot>\n\n               Yes
    4. <bot><think>            <bot>Yes                <bot>                   Yes
    5. <bot><think></think>    <bot><think>Why ...     <bot>                   <think>Why ...
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


def as_read(tokenizer, prompt: str, whole: str, history: list, answer: list, tools) -> str:
    """Returns `whole`, a history with its answer, with the history as the prompt has it.

    gpt-oss drops the thinking of a tool call as soon as an answer follows; Mistral writes a system
    message into the last message of the user, and not at all once that is answered. At inference
    the model reads both before it answers. Example:

        prompt      <user>Hi<bot>Think<bot>Call<tool>5<bot>
        whole       <user>Hi<bot>Call<tool>5<bot>Yes<end>
        returned    <user>Hi<bot>Think<bot>Call<tool>5<bot>Yes<end>

    The answer begins after the last generation prompt before the place of its content, which the
    rendering of another answer shows. If there is none, what ends the prompt takes its place.
    """
    if whole.startswith(prompt) or len(answer) > 1:  # of several it may rewrite the first, too
        return whole
    history_text = render(tokenizer, history, tools)
    if whole.startswith(history_text) or not prompt.startswith(history_text):
        return whole
    markers = [found.start() for found in thoughts.ANY_MARKER.finditer(prompt)]
    last_marker = markers[-1] if markers else len(prompt)
    generation_prompt = prompt.removeprefix(history_text) or prompt[last_marker:]
    generation_prompt = re.sub(rf"\s*({thoughts.OPENERS})\s*$", "", generation_prompt)
    if not generation_prompt:
        return whole
    other = render(tokenizer, [*history, MARKED], tools)
    start = whole.rfind(generation_prompt, 0, n_common(whole, other))
    kept = prompt[: prompt.rindex(generation_prompt)]
    return whole if start < 0 else kept + whole[start:]


def up_to_end(tokenizer, text: str) -> tuple[str, bool]:
    r"""Returns an answer up to and with the token that ends it, and whether there is one.

    Examples, with the ending of the template:

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
def drops_thought(tokenizer, messages: list[dict], place: int, whole: str, tools) -> bool:
    """Whether a message has thinking, and the template writes the same, `whole`, without it."""
    if not thoughts.of_message(messages[place]):
        return False
    bare = thoughts.removed(messages[place])
    return render(tokenizer, [*messages[:place], bare, *messages[place + 1 :]], tools) == whole


def with_thinking(tokenizer, prompt: str, history: list, answer: list, tools) -> tuple[str, str]:
    """Returns what `split_answer` does, with the thinking that the template drops of the answer.

    It goes where the last message begins, in place of an empty thought there or at the end of the
    prompt. Example, of DeepSeek-R1:

        given       <think>Why</think>Yes
        prompt      <bot><think>
        rendered    <bot>Yes<end>
        returned    <bot> and <think>Why</think>Yes<end>
    """
    before = [*history, *answer[:-1]]
    bare = thoughts.removed(answer[-1])
    bare["content"] = bare["content"].lstrip()  # that whitespace comes back with the thinking
    whole = render(tokenizer, [*before, bare], tools)
    read = prompt
    if len(answer) > 1:
        read = render(tokenizer, before, tools, add_generation_prompt=True)
    whole = as_read(tokenizer, read, whole, before, [bare], tools)
    context, text = split_answer(read, whole, thinks=True)
    context = thoughts.AT_END.sub("", context)
    empty = thoughts.EMPTY.match(text)
    text = text[empty.end() :] if empty else text
    rest = text.lstrip()
    space = text[: len(text) - len(rest)]
    thought = thoughts.written(answer[-1], str(tokenizer.chat_template))
    text = space + thought + rest
    only_in_prompt = prompt[len(context) :]
    if thoughts.is_closed(only_in_prompt) or thoughts.EMPTY.fullmatch(only_in_prompt):
        return context, text
    # What opens the thought may be the prompt's. And earlier messages are part of the answer, too.
    return split_answer(prompt, context + text)


def why_unwritten(tokenizer, history: list, answer: list, text: str, tools) -> str:
    """Returns why an answer cannot be learned, since the template does not write it; else "".

    Args:
        text: what the template writes for the answer. What is found there needs no trial.
    """
    for place, message in enumerate(answer, len(history)):
        content = thoughts.split(message["content"])[2].strip()
        is_left_out = functools.partial(leaves_out, tokenizer, history + answer, place, tools)
        if message["role"] != "assistant":
            continue
        if message.get("tool_calls") and is_left_out("tool_calls"):
            return DROPS_CALLS
        if content not in text and is_left_out("content"):
            return DROPS_ANSWER
    return ""


def leaves_out(tokenizer, messages: list[dict], place: int, tools, field: str) -> bool:
    """Whether the template writes the same if one message lacks a field, or the end of a content.

    A content may be left out in part: all from a marker on that is never closed.
    """

    def write(message: dict) -> str:
        changed = [*messages[:place], message, *messages[place + 1 :]]
        return render(tokenizer, changed, tools)

    without = {key: value for key, value in messages[place].items() if key != field}
    try:
        if write({"content": "", **without}) == write(messages[place]):
            return True
        longer = {**messages[place], "content": messages[place]["content"] + MARK}
        return field == "content" and MARK not in write(longer)
    except BadRow:  # it wants the field
        return False


def unwritten_parts(tokenizer, messages: list[dict], tools=None, text: str = "") -> list[str]:
    """Returns notes on messages and tools that the chat template leaves out without a word.

    At inference it leaves them out as well, so the rows are used. The user should know it.

    Args:
        text: what the template writes, if it is known. What is found there needs no trial.
    """
    if not tools and all(message["content"].strip() in text for message in messages):
        return []
    try:
        text = render(tokenizer, messages, tools)
        without_tools = render(tokenizer, messages) if tools else ""
    except BadRow:  # such as an empty prompt, or calls without tools
        return []
    notes = []
    for place, message in enumerate(messages):
        is_written = message["role"] == "assistant" or message["content"].strip() in text
        if not is_written and leaves_out(tokenizer, messages, place, tools, "content"):
            notes.append(f"{DROPS_ROLE} (role {message['role']!r})")
    return notes + ([DROPS_TOOLS] if text == without_tools else [])


def notes_on_prompt(tokenizer, messages: list[dict], tools=None, text: str = "") -> list[str]:
    """Returns what the user should know about a prompt; the arguments are the same."""
    return unwritten_parts(tokenizer, messages, tools, text) + [CONTINUES] * is_open(messages)


def why_left_out(notes: list[str]) -> str:
    """Returns the note that says an answer is not written; "" if there is none."""
    reasons = (DROPS_CALLS, DROPS_ANSWER, REWRITES_TURNS)
    return next((text for text in notes if text in reasons), "")


def note(kind: str, example: str = "") -> str:
    """Returns a note on a row for the user.

    A note is one line `kind<TAB>example`; `conversion.describe_notes` takes it apart. The run
    prints each kind once, with its number of rows and one example.

    Args:
        kind: like `example`, without tabs and newlines.
        example: what this row has; the tab is left out if there is none.
    """
    return f"{kind}\t{example}" if example else kind


# ============================================================ rows
class Sequence(NamedTuple):
    """What the model reads at once: token ids, and which of them are targets."""

    ids: list[int]
    targets: list[bool]


def encode_conversation(
    tokenizer,
    messages: list[dict],
    turns: list[int],
    tools=None,
    learn_all: bool = False,
    prompts: dict[int, Prompt] | None = None,
) -> tuple[list[Sequence], list[int], list[str]]:
    """Returns the sequences of a conversation, the ids before its last answer, and notes.

    There is one sequence, unless the template writes earlier turns differently once later ones
    follow. Then each answer has its own, with the history as the model reads it before that answer.

    Args:
        turns: which messages are answers to learn.
        learn_all: learn what precedes the answers, too, each token once.
        prompts: what precedes some turns, by their numbers, where it is known.
    """
    sequences: list[Sequence] = []
    prompt_ids: list[int] = []
    notes: list[str] = []
    previous = None  # the last answer that was learned
    for turn in turns:
        history = messages[:turn]
        prompt = (prompts or {}).get(turn)
        answer = encode_turn(tokenizer, history, [messages[turn]], tools, prompt)
        notes += answer.notes
        if not answer.ids:  # the template does not write it
            continue
        ids, targets = sequences[-1] if sequences else ([], [])
        if answer.context[: len(ids)] == ids:  # the same history: one sequence
            del sequences[-1:]
            n_new = len(answer.context) - len(ids)
        else:
            targets = []
            n_new = 0
            if learn_all:
                n_new = len(encode(tokenizer, text_since(tokenizer, history, previous, tools)))
        targets = targets or [False] * (len(answer.context) - n_new)
        targets = targets + [learn_all] * n_new + [True] * len(answer.ids)
        # Nothing predicts a sequence's first token.
        sequences.append(Sequence(answer.context + answer.ids, [False, *targets[1:]]))
        prompt_ids = answer.prompt
        previous = turn
    if turns:
        notes += unwritten_parts(tokenizer, messages[: turns[-1]], tools)
        notes += [CONTINUES] * bool(prompts)
    return sequences, prompt_ids, notes


def in_one_sequence(
    tokenizer, messages: list[dict], turns: list[int], tools, prompts: dict[int, Prompt]
) -> tuple[list[Sequence], list[str]]:
    """Returns a conversation up to its last turn as one sequence, and notes.

    Each turn is as the template writes it at last. As at inference, turns and what is between them
    are tokenised apart. There is no sequence if a turn is not found.
    """
    history = messages[: turns[-1]]
    last = encode_turn(tokenizer, history, [messages[turns[-1]]], tools)
    text = render(tokenizer, history, tools, add_generation_prompt=True)
    cuts = [0]
    try:
        for turn in turns[:-1]:
            read = prompts.get(turn) or generation_prompt(tokenizer, messages[:turn], tools)
            after = text_since(tokenizer, history, turn, tools)
            cuts += [len(text) - len(split_answer(read.text, text)[1]), len(text) - len(after)]
            if not text.endswith(after):
                return [], [REWRITES_TURNS]
    except BadRow:  # a result without its call
        return [], [REWRITES_TURNS]
    cuts.append(len(text))
    if cuts != sorted(cuts) or last.prompt[: len(last.context)] != last.context:
        return [], [REWRITES_TURNS]

    ids: list[int] = []
    targets: list[bool] = []
    for number, (start, end) in enumerate(itertools.pairwise(cuts)):
        new = encode_after(tokenizer, text[:start], ids, text[start:end])
        ids += new
        targets += [number % 2 == 1] * len(new)  # in turn: what the model reads, and writes
    kept = len(ids) - (len(last.prompt) - len(last.context))  # all that precedes the last turn
    sequence = Sequence(ids[:kept] + last.ids, targets[:kept] + last.targets)
    think = any(thoughts.of_message(messages[turn]) for turn in turns[:-1])
    return [sequence], last.notes + [DROPS_EARLIER] * think


def text_since(tokenizer, history: list[dict], place: int, tools=None) -> str:
    """Returns what a prompt has after the end of one of its answers."""
    changed = [*history[:place], MARKED, *history[place + 1 :]]
    text = render(tokenizer, changed, tools, add_generation_prompt=True).partition(MARK)[2]
    end = style_of(tokenizer).end
    if not text.startswith(end):  # it ends an earlier answer in another way (gpt-oss)
        found = added_tokens(tokenizer).match(text)
        end = found.group() if found else ""
    return text.removeprefix(end)


class Preference(NamedTuple):
    """Token ids of a prompt and two answers, each up to its end; and notes, see `note`."""

    prompt: list[int]
    chosen: Sequence
    rejected: Sequence
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
        tools: see `render`.
    """
    if isinstance(prompt, str):
        prompt_ids, *answers = encode_plain(tokenizer, prompt, chosen, rejected)
        chosen, rejected = (Sequence(ids, [True] * len(ids)) for ids in answers)
        return Preference(prompt_ids, chosen, rejected, notes=[])
    read = encode_prompt(tokenizer, prompt, tools)
    first, second = (
        encode_answer(tokenizer, prompt, answer, tools, prompt=read)
        for answer in (chosen, rejected)
    )
    n = n_common(first.context, second.context)
    chosen, rejected = (after_prompt(answer, n) for answer in (first, second))
    notes = first.notes + second.notes + notes_on_prompt(tokenizer, prompt, tools, read.text)
    return Preference(first.context[:n], chosen, rejected, notes)


def after_prompt(answer: Answer, n: int) -> Sequence:
    """Returns an answer with its context from the n-th token on, which is learned with it."""
    if not answer.ids:  # the template does not write it
        return Sequence([], [])
    rest = answer.context[n:]
    return Sequence(rest + answer.ids, [True] * len(rest) + answer.targets)


# ============================================================ between two answers
def check_turns(tokenizer, tools: list[dict] | None = None) -> None:
    """Refuses a template that cannot continue a conversation after what a model has sampled.

    A turn is never tokenised again: what comes back is appended to the ids that were sampled. So a
    template must continue a conversation by adding to what it wrote. One that does not: its
    generation prompt ends with `<bot><think>`, and it writes an earlier answer as `<bot>Yes`.

    Args:
        tools: with them, results of calls come back; without, messages of a user.

    Raises:
        BadRow: it rewrites answers, or leaves out what comes back, or the tools.
    """
    prompt = render(tokenizer, [QUESTION], add_generation_prompt=True)
    text, end_of_answer = render_beyond_answer(tokenizer, MARKED, [QUESTION], None)
    up_to_answer = text[:end_of_answer]
    # Whitespace around the answer is the model's own.
    answer = up_to_answer.removeprefix(prompt).removesuffix(style_of(tokenizer).end).strip()
    if not up_to_answer.startswith(prompt) or answer != MARK:
        raise BadRow(
            "the tokenizer's chat template writes an answer differently once it is followed: its "
            f"generation prompt ends with {prompt[-40:]!r}, an earlier answer with "
            f"{up_to_answer[-40:]!r}. So no turn can be appended to what was sampled: give another "
            "template by --chat_template FILE, or switch off thinking by --chat_template_kwargs"
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

    Example: of ChatML, after the message `Too high.` of a user, the ids of

        \n<|im_start|>user\nToo high.<|im_end|>\n<|im_start|>assistant\n

    Args:
        messages: what comes back, at least one message. It may be anything, such as what the model
            wrote itself, so control tokens that are spelled out in it are split by an invisible
            space.
        tools: JSON schemas of what the model may call.

    Raises:
        BadRow: the template refuses the messages.
    """

    def split_token(found: re.Match) -> str:
        return found[0][:1] + ZERO_WIDTH_SPACE + found[0][1:]

    harmless = [
        {**message, "content": added_tokens(tokenizer).sub(split_token, message["content"])}
        for message in messages
    ]
    answer = {**MARKED, "tool_calls": [CALL]} if messages[0]["role"] == "tool" else MARKED
    text, place = render_beyond_answer(tokenizer, answer, harmless, tools)
    before = text[:place]
    return encode_after(tokenizer, before, encode(tokenizer, before), text[place:])


def render_beyond_answer(
    tokenizer, answer: dict, messages: list[dict], tools: list[dict] | None
) -> tuple[str, int]:
    r"""Renders a conversation that goes on after an answer; also returns where the answer ends.

    Example, with ChatML. The answer is `zqzplace`, and ends with the first line:

        <|im_start|>user\nzqz<|im_end|>\n<|im_start|>assistant\nzqzplace<|im_end|>
        \n<|im_start|>user\nToo high.<|im_end|>\n<|im_start|>assistant\n

    Raises:
        BadRow: the template refuses the messages, leaves out the answer, or ends it differently
            once it is followed.
    """
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
    """Returns the tokens that end a response.

    They are EOS, those of the model's generation config, and what ends a turn of the chat template.
    """
    own = model.generation_config.eos_token_id
    own = [own] if isinstance(own, int) else own or []
    return {tokenizer.eos_token_id, *own, *encode(tokenizer, style_of(tokenizer).end)[-1:]}
