"""Renders messages by a chat template, and finds out what the template does with them."""

import contextlib
import datetime
import functools
import json
import os
import re
import resource
import signal
import sys
from pathlib import Path
from typing import NamedTuple, NoReturn

import jinja2
import transformers.utils.chat_template_utils as template_utils

from common import in_one_line
from common.data import formats, ids, thoughts
from common.data.formats import BadRow

# What is said of a data set whose messages the template does not write.
DROPS_CALLS = "tool calls are not learned, because the chat template does not write them"
DROPS_ANSWER = "answers are not learned, because the chat template does not write them"
DROPS_ROLE = "messages that the chat template does not write"
DROPS_TOOLS = "tools that the chat template does not write"


# What a template may take for one conversation. Those that people use take less than a thousandth.
MOST_SECONDS = 5
MOST_BYTES = 2**30

# What every template is given anyway.
GIVEN_TO_TEMPLATES = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now")


class TooMuch(SystemExit):
    """A chat template takes too much time or memory; the message says so.

    It is no `Exception`, because the template did not refuse what it was given.
    """


class Conventions(NamedTuple):
    """How a chat template writes messages, as found out by rendering some.

    Attributes:
        wants_parts: whether contents must be lists of parts (LLaVA), not strings.
        is_known: whether it could be found out. Some templates refuse two short messages.
        tail: ids of what follows the last answer, whatever the answer is.
        stop: the place in `tail` of the token that ends an answer; None if no token does.
        white_tail: the white space at the very end of `tail`.
    """

    wants_parts: bool = False
    is_known: bool = False
    tail: tuple[int, ...] = ()
    stop: int | None = None
    white_tail: str = ""


# ============================================================ the template itself
def read(path: str) -> str:
    """The chat template in a file.

    Raises:
        SystemExit: no such file, not UTF-8, no Jinja template, or one that computes without end.
    """
    try:
        template = Path(path).read_text(encoding="utf-8")
        with time_limit(), memory_limit():
            template_utils.render_jinja_template([[]], chat_template=template)
    except (OSError, UnicodeDecodeError, jinja2.TemplateSyntaxError) as error:
        reason = in_one_line(error)
        sys.exit(f"--chat_template {path}: expected a file with a Jinja template: {reason}")
    except TooMuch as error:
        sys.exit(f"--chat_template {path}: {error}")
    except Exception:  # it is a template, though it wants messages
        pass
    return template


def set_defaults(tokenizer, text: str) -> None:
    """Gives variables of a tokenizer's chat template default values.

    They are written at the beginning of the template. So they are saved with it, and whoever loads
    the actor gets the same prompts without knowing of them.

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
    for name in values:
        is_used = re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template))
        if not name.isidentifier() or name in GIVEN_TO_TEMPLATES or not is_used:
            sys.exit(f"{argument}: the chat template has no variable {name!r}")

    lines = [
        f"{{% set {name} = {name} | default({as_jinja(value)}) %}}\n"
        for name, value in values.items()
    ]
    beginning = "".join(lines)
    if isinstance(tokenizer.chat_template, dict):  # several, by their names
        tokenizer.chat_template = {
            name: beginning + template for name, template in tokenizer.chat_template.items()
        }
    else:
        tokenizer.chat_template = beginning + tokenizer.chat_template


def as_jinja(value) -> str:
    """A JSON value as Jinja writes it: null is `none`, all else is as in JSON."""
    if isinstance(value, dict):
        pairs = (f"{as_jinja(name)}: {as_jinja(part)}" for name, part in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(as_jinja(part) for part in value) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


# ============================================================ rendering
def render(
    tokenizer,
    messages: list[dict],
    add_generation_prompt: bool = False,
    tools: list[dict] | str | None = None,
) -> str:
    """Messages as the chat template writes them.

    Args:
        tools: what the messages may call, as JSON schemas or as a JSON text of them.

    Raises:
        BadRow: there is no chat template, or it refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise BadRow(
            "messages, but the tokenizer has no chat template: "
            "set tokenizer.chat_template and save it, or give plain strings"
        )
    try:
        schemas = None
        if tools:
            text = tools if isinstance(tools, str) else json.dumps(tools, default=str)
            schemas = formats.without_nulls(text)
        if conventions(tokenizer).wants_parts:
            messages = [with_parts(message) for message in messages]
        return apply_template(tokenizer, messages, add_generation_prompt, schemas)
    except Exception as error:  # a template raises what it likes, such as that roles must alternate
        given = "messages or tools" if tools else "messages"
        reason = in_one_line(error)
        raise BadRow(f"the tokenizer's chat template refuses the {given}: {reason}") from None


def apply_template(
    tokenizer, messages: list[dict], add_generation_prompt: bool, schemas: list | None = None
) -> str:
    """What `apply_chat_template` writes; a date that it prints is that of the run.

    Raises:
        TooMuch: see `time_limit`.
    """
    with clock_at(getattr(tokenizer, "chat_date", None)), time_limit():
        return tokenizer.apply_chat_template(
            messages,
            schemas,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )


@contextlib.contextmanager
def time_limit():
    """Limits what a template may compute: it is a program, and anyone may have written it.

    The time is that of the CPU, so a machine that is busy or asleep changes nothing. The block must
    run in the main thread, which alone takes signals.

    Raises:
        TooMuch: the block takes more than `MOST_SECONDS`.
    """
    take_alarms()
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


@functools.cache
def take_alarms() -> None:
    """Lets the alarm of `time_limit` interrupt this process. No library of ours uses that one."""
    signal.signal(signal.SIGVTALRM, interrupt)


def interrupt(*_) -> NoReturn:
    raise TooMuch(f"the chat template computes for more than {MOST_SECONDS} seconds")


@contextlib.contextmanager
def memory_limit():
    """Limits what a template may hold, on Linux. That takes as long as to render, so it is rare.

    Raises:
        TooMuch: the block takes more than `MOST_BYTES`.
    """
    counted = Path("/proc/self/statm")
    if not counted.exists():
        yield
        return
    held = int(counted.read_text().split()[5]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = held + MOST_BYTES
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    except MemoryError:
        raise TooMuch(
            f"the chat template takes more than {MOST_BYTES >> 20} MiB of memory"
        ) from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextlib.contextmanager
def clock_at(date: str | None):
    """Makes templates print a date, given as in 2026-01-31; None leaves them today's."""
    if date is None:
        yield
        return
    day = datetime.datetime.fromisoformat(date)

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return day

    # A template gets today's date by a function that transformers gives it, and that no argument
    # of `apply_chat_template` replaces.
    real = template_utils.datetime
    template_utils.datetime = Clock
    try:
        yield
    finally:
        template_utils.datetime = real


def prints_date(tokenizer) -> bool:
    """Whether the chat template writes the date of the day."""
    return "strftime_now" in str(tokenizer.chat_template)


def with_parts(message: dict) -> dict:
    """A message whose content is a list of parts, as the templates of vision models want it."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


# ============================================================ what a template does
def conventions(tokenizer) -> Conventions:
    """What `find_conventions` finds; once for each tokenizer and template."""
    return find_conventions(
        tokenizer,
        str(tokenizer.chat_template),
        tokenizer.eos_token_id,
        getattr(tokenizer, "chat_date", None),
    )


@functools.lru_cache(maxsize=16)
def find_conventions(tokenizer, template: str, eos: int, date: str | None) -> Conventions:
    """Renders two short answers, and tells from what is common to them how the template writes.

    Args:
        template, eos, date: of the tokenizer, for the cache alone.
    """
    user = {"role": "user", "content": "zqz"}

    def rendered(messages: list[dict], add_generation_prompt: bool) -> str:
        with memory_limit():
            return apply_template(tokenizer, messages, add_generation_prompt)

    wants_parts = False
    with contextlib.suppress(Exception):
        wants_parts = user["content"] in rendered([with_parts(user)], True)
    with contextlib.suppress(Exception):
        takes_string = user["content"] in rendered([user], True)
        wants_parts = wants_parts and not takes_string

    def behind_answers(following: list[dict]) -> tuple[list[int], str]:
        """Ids and text that follow an answer, whatever the answer is."""
        texts = []
        for content in ("a", "b"):
            messages = [user, {"role": "assistant", "content": content}, *following]
            if wants_parts:
                messages = [with_parts(message) for message in messages]
            texts.append(rendered(messages, False))
        first, second = (ids.encode_text(tokenizer, text) for text in texts)
        reversed_texts = [text[::-1] for text in texts]
        return (
            first[len(first) - ids.shared_length(first[::-1], second[::-1]) :],
            os.path.commonprefix(reversed_texts)[::-1],
        )

    try:
        tail, text = behind_answers([])
        earlier_tail, _ = behind_answers([user])
    except Exception:  # no template, or one that wants other messages
        return Conventions(wants_parts)
    white_tail = text[len(text.rstrip()) :]
    return Conventions(
        wants_parts,
        is_known=True,
        tail=tuple(tail),
        stop=place_of_stop(tokenizer, tail, earlier_tail),
        white_tail=white_tail,
    )


def place_of_stop(tokenizer, tail: list[int], earlier_tail: list[int]) -> int | None:
    """The place in `tail` of the token that ends an answer; None if no token does.

    What the template writes behind an answer may also hold what follows the end: Phi-3 writes an
    EOS behind the last turn only, Command A the header of the next turn. So the end is looked for
    in what an earlier answer is followed by, too. Only where that has none (gpt-oss) does the
    last answer's own end count.

    Args:
        tail, earlier_tail: ids that follow the last answer, and an earlier one.
    """
    shared = tail[: ids.shared_length(tail, earlier_tail)]
    for part in (shared, tail):
        if tokenizer.eos_token_id in part:
            return part.index(tokenizer.eos_token_id)
        markers = [place for place, token in enumerate(part) if ids.is_marker(tokenizer, token)]
        if markers:
            # Several that end the tail end the turn together (<|END_RESPONSE|><|END_OF_TURN|>).
            return markers[-1] if part == tail == shared else markers[0]
    return None


# ============================================================ what a template does not write
def why_unwritten(
    tokenizer, messages: list[dict], start: int, end: int, after: str, written: str, tools
) -> str:
    """Why an answer cannot be learned, since the template does not write it; "" if it does.

    Args:
        after: the conversation as the template writes it.
        written: what of it is the answer, and what follows.
    """
    for place in range(start, end):
        message = messages[place]
        if message["role"] != "assistant":
            continue
        if message.get("tool_calls") and is_same_without(
            tokenizer, messages[:end], place, "tool_calls", after, tools
        ):
            return DROPS_CALLS
        text = thoughts.without_thought(message["content"]).strip()
        if (
            text
            and text not in written
            and is_same_without(tokenizer, messages[:end], place, "content", after, tools)
        ):
            return DROPS_ANSWER
    return ""


def is_same_without(
    tokenizer, messages: list[dict], place: int, field: str, after: str, tools
) -> bool:
    """Whether the template writes the same if one message lacks a field."""
    message = {key: value for key, value in messages[place].items() if key != field}
    changed = [*messages[:place], {"content": "", **message}, *messages[place + 1 :]]
    try:
        return render(tokenizer, changed, False, tools) == after
    except BadRow:
        return False


def unwritten_parts(tokenizer, messages: list[dict], tools=None) -> list[str]:
    """Notes on messages and tools that the chat template leaves out without a word.

    At inference it leaves them out as well, so the rows are used. The user should know it.
    """
    try:
        written = render(tokenizer, messages, False, tools)
    except BadRow:  # such as an empty prompt
        return []
    notes = []
    for place, message in enumerate(messages):
        text = message["content"].strip()
        if message["role"] == "assistant" or not text or text in written:
            continue
        if is_same_without(tokenizer, messages, place, "content", written, tools):
            notes.append(f"{DROPS_ROLE} (role {message['role']!r})")
    if tools and is_same_without_tools(tokenizer, messages, written):
        notes.append(DROPS_TOOLS)
    return notes


def is_same_without_tools(tokenizer, messages: list[dict], written: str) -> bool:
    """Whether the template writes the same if there are no tools."""
    try:
        return render(tokenizer, messages, False) == written
    except BadRow:
        return False
