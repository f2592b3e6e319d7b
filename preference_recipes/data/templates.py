"""Renders messages by a chat template, and finds out what the template does with them."""

import contextlib
import datetime
import functools
import json
import sys
from pathlib import Path
from typing import NamedTuple

import jinja2
import jinja2.meta
import transformers.utils.chat_template_utils as template_utils

from common import in_one_line, replaced
from preference_recipes.data import ids, thoughts
from preference_recipes.data.messages import BadRow, nested, without_nulls

# What the run prints about a data set whose messages the template does not write.
DROPS_CALLS = "tool calls are not learned, because the chat template does not write them"
DROPS_ANSWER = "answers are not learned, because the chat template does not write them"
DROPS_ROLE = "messages that the chat template does not write"
DROPS_TOOLS = "tools that the chat template does not write"

# What every template is given anyway.
GIVEN_TO_TEMPLATES = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now")


class Conventions(NamedTuple):
    r"""How a chat template writes messages, as found out by rendering some.

    Example: ChatML writes an answer as `Yes<|im_end|>\n`, so its `ending` is the ids of
    `<|im_end|>` and a newline, `stop` is 0, `white_ending` the newline.

    Attributes:
        wants_parts: whether contents must be lists of parts (LLaVA), not strings.
        wants_argument_texts: whether the arguments of tool calls must be JSON texts (DeepSeek-V3).
        is_known: whether the rest could be found out. Some templates refuse two short messages.
        ending: ids of what follows the last answer, whatever the answer is.
        stop: the place in `ending` of the token that ends an answer; None if no token does.
        white_ending: the whitespace at the very end of the text of `ending`.
    """

    wants_parts: bool = False
    wants_argument_texts: bool = False
    is_known: bool = False
    ending: tuple[int, ...] = ()
    stop: int | None = None
    white_ending: str = ""

    @property
    def end_of_answer(self) -> list[int]:
        """The ids that follow an answer up to the token that ends it; empty if no token does."""
        return [] if self.stop is None else list(self.ending[: self.stop + 1])

    @property
    def writes_no_stop(self) -> bool:
        """Whether it is known that no token ends an answer."""
        return self.is_known and self.stop is None


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

    # Jinja reads constants as Python writes them.
    lines = [
        f"{{% set {name} = {name} | default({value!r}) %}}\n" for name, value in values.items()
    ]
    beginning = "".join(lines)
    if isinstance(tokenizer.chat_template, dict):  # several, by their names
        tokenizer.chat_template = {
            name: beginning + template for name, template in tokenizer.chat_template.items()
        }
    else:
        tokenizer.chat_template = beginning + tokenizer.chat_template


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
def render(
    tokenizer,
    messages: list[dict],
    tools: list[dict] | str | None = None,
    add_generation_prompt: bool = False,
) -> str:
    """Returns messages as the chat template writes them.

    Args:
        tools: what the messages may call, as JSON schemas or as a JSON text of them.
        add_generation_prompt: end with what precedes an answer.

    Raises:
        BadRow: there is no chat template, or it refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise BadRow(
            "messages, but the tokenizer has no chat template: give one by --chat_template FILE, "
            "or plain strings in place of messages"
        )
    try:
        schemas = None
        if tools:
            schemas = without_nulls(json.loads(tools) if isinstance(tools, str) else tools)
        known = conventions(tokenizer)
        if "function" in str(tokenizer.chat_template):  # else it may read calls that are flat
            messages = [with_nested_calls(message) for message in messages]
        if known.wants_argument_texts:
            messages = [with_argument_texts(message) for message in messages]
        if known.wants_parts:
            messages = [with_parts(message) for message in messages]
        return apply_template(tokenizer, messages, schemas, add_generation_prompt)
    except Exception as error:  # a template raises what it likes, such as that roles must alternate
        given = "messages or tools" if tools else "messages"
        reason = in_one_line(error)
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise BadRow(
            f"the tokenizer's chat template refuses the {given}: {reason} (roles: {roles})"
        ) from None


def apply_template(
    tokenizer,
    messages: list[dict],
    schemas: list | None = None,
    add_generation_prompt: bool = False,
) -> str:
    """Returns what `apply_chat_template` writes; a date that it prints is that of the run."""
    with clock_at(getattr(tokenizer, "chat_date", None)):
        return tokenizer.apply_chat_template(
            messages,
            schemas,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )


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
    with replaced((template_utils, "datetime", Clock)):
        yield


def prints_date(tokenizer) -> bool:
    """Whether the chat template writes the date of the day."""
    return "strftime_now" in str(tokenizer.chat_template)


def with_parts(message: dict) -> dict:
    """Returns a message whose content is a list of parts, as templates of vision models want it."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def with_nested_calls(message: dict) -> dict:
    """Returns a message in which name and arguments of each tool call are under `function`."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [nested(call) for call in message["tool_calls"]]}


def with_argument_texts(message: dict) -> dict:
    """Returns a message in which the arguments of tool calls are JSON texts."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", {})
        if isinstance(function.get("arguments"), dict):
            text = json.dumps(function["arguments"], ensure_ascii=False)
            call = {**call, "function": {**function, "arguments": text}}
        calls.append(call)
    return {**message, "tool_calls": calls}


# ============================================================ what a template does
def conventions(tokenizer) -> Conventions:
    """Returns what `find_conventions` finds; once for each tokenizer and template."""
    return find_conventions(
        tokenizer,
        str(tokenizer.chat_template),
        tokenizer.eos_token_id,
        getattr(tokenizer, "chat_date", None),
    )


@functools.lru_cache(maxsize=16)
def find_conventions(tokenizer, template: str, eos: int, date: str | None) -> Conventions:
    """Renders two short answers, and infers from what both have how the template writes.

    Args:
        template, eos, date: those of the tokenizer, for the cache alone.
    """
    wants_parts = takes_only_parts(tokenizer)
    wants_argument_texts = takes_only_argument_texts(tokenizer)
    question = [{"role": "user", "content": "zqz"}]
    try:
        ending, text = find_ending(tokenizer, question, [], wants_parts)
        earlier_ending, _ = find_ending(tokenizer, question, question, wants_parts)
    except Exception:  # no template, or one that wants other messages
        return Conventions(wants_parts, wants_argument_texts)
    return Conventions(
        wants_parts,
        wants_argument_texts,
        is_known=True,
        ending=tuple(ending),
        stop=place_of_stop(tokenizer, ending, earlier_ending),
        white_ending=text[len(text.rstrip()) :],
    )


def takes_only_parts(tokenizer) -> bool:
    """Whether the template writes a content that is a list of parts, and none that is a string."""
    message = {"role": "user", "content": "zqz"}

    def writes(message: dict) -> bool:
        with contextlib.suppress(Exception):
            return "zqz" in apply_template(tokenizer, [message], add_generation_prompt=True)
        return False

    return writes(with_parts(message)) and not writes(message)


def takes_only_argument_texts(tokenizer) -> bool:
    """Whether the template writes the arguments of a tool call as JSON only if they are a text.

    It refuses an object then (DeepSeek-V3), or writes it as Python does: `{'a': True}`.
    """
    function = {"name": "zqz", "arguments": {"a": True}}
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "0", "function": function}],
    }

    def written(message: dict) -> str:
        with contextlib.suppress(Exception):
            return apply_template(tokenizer, [{"role": "user", "content": "a"}, message])
        return ""

    with_object = written(call)
    is_refused = with_object == ""
    is_python = "'a': True" in with_object
    return (is_refused or is_python) and '"a": true' in written(with_argument_texts(call))


def find_ending(
    tokenizer, before: list[dict], after: list[dict], wants_parts: bool
) -> tuple[list[int], str]:
    r"""Returns ids and text of what follows an answer, whatever the answer is.

    Example: what these two end with, `<|im_end|>` and a newline.

        <|im_start|>user\nzqz<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n
        <|im_start|>user\nzqz<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n

    Args:
        before, after: the other messages of the conversation.
    """
    texts = []
    for content in ("a", "b"):
        messages = [*before, {"role": "assistant", "content": content}, *after]
        if wants_parts:
            messages = [with_parts(message) for message in messages]
        texts.append(apply_template(tokenizer, messages))
    first, second = (ids.encode_text(tokenizer, text) for text in texts)
    n_ids = ids.n_shared_at_end(first, second)
    n_characters = ids.n_shared_at_end(*texts)
    return first[len(first) - n_ids :], texts[0][len(texts[0]) - n_characters :]


def place_of_stop(tokenizer, ending: list[int], earlier_ending: list[int]) -> int | None:
    """Returns the place in `ending` of the token that ends an answer; None if no token does.

    The template may also write what follows the end: Phi-3 an EOS after the last turn only,
    Command A the header of the next turn. So the end is a token that also follows an earlier
    answer. Only where nothing follows both (gpt-oss) does the last answer's own end count.
    Examples:

        ending               earlier_ending      the end
        <|end|><eos>         <|end|><|user|>     <|end|>       Phi-3
        <|return|>           <|end|>             <|return|>    gpt-oss

    Args:
        ending, earlier_ending: ids that follow the last answer, and an earlier one.
    """
    shared = ending[: ids.n_shared(ending, earlier_ending)]
    for part in (shared, ending):
        if tokenizer.eos_token_id in part:
            return part.index(tokenizer.eos_token_id)
        markers = [place for place, token in enumerate(part) if ids.is_marker(tokenizer, token)]
        if markers:
            # Several that end the text end the turn together (<|END_RESPONSE|><|END_OF_TURN|>).
            return markers[-1] if part == ending == shared else markers[0]
    return None


# ============================================================ what a template does not write
class Conversation:
    """Messages, and the text that the chat template writes for them.

    Attributes:
        messages, tools: see `render`.
        text: what the template writes, without a generation prompt.
    """

    def __init__(self, tokenizer, messages: list[dict], tools: list[dict] | str | None = None):
        """
        Raises:
            BadRow: there is no chat template, or it refuses the messages.
        """
        self.tokenizer = tokenizer
        self.messages = messages
        self.tools = tools
        self.text = render(tokenizer, messages, tools)

    def leaves_out(self, place: int, field: str) -> bool:
        """Whether the template writes the same if one message lacks a field."""
        message = {key: value for key, value in self.messages[place].items() if key != field}
        changed = [*self.messages[:place], {"content": "", **message}, *self.messages[place + 1 :]]
        return self._is_text_of(changed, self.tools)

    def leaves_out_thought(self, place: int) -> bool:
        """Whether a message has thinking, and the template writes the same without it."""
        message = self.messages[place]
        if not thoughts.of_message(message):
            return False
        changed = [*self.messages[:place], thoughts.removed(message), *self.messages[place + 1 :]]
        return self._is_text_of(changed, self.tools)

    def leaves_out_tools(self) -> bool:
        """Whether there are tools, and the template writes the same without them."""
        return bool(self.tools) and self._is_text_of(self.messages, None)

    def _is_text_of(self, messages: list[dict], tools: list[dict] | str | None) -> bool:
        try:
            return render(self.tokenizer, messages, tools) == self.text
        except BadRow:
            return False


def why_unwritten(conversation: Conversation, start: int, answer_text: str) -> str:
    """Returns why an answer cannot be learned, since the template does not write it; else "".

    Args:
        start: the place of the answer's first message. Its last one ends the conversation.
        answer_text: what the template writes for the answer, and after it.
    """
    for place, message in enumerate(conversation.messages):
        if place < start or message["role"] != "assistant":
            continue
        if message.get("tool_calls") and conversation.leaves_out(place, "tool_calls"):
            return DROPS_CALLS
        text = thoughts.without_thought(message["content"]).strip()
        is_written = not text or text in answer_text
        if not is_written and conversation.leaves_out(place, "content"):
            return DROPS_ANSWER
    return ""


def unwritten_parts(
    tokenizer, messages: list[dict], tools: list[dict] | str | None = None
) -> list[str]:
    """Returns notes on messages and tools that the chat template leaves out without a word.

    At inference it leaves them out as well, so the rows are used. The user should know it.
    """
    try:
        conversation = Conversation(tokenizer, messages, tools)
    except BadRow:  # such as an empty prompt
        return []
    notes = []
    for place, message in enumerate(messages):
        text = message["content"].strip()
        is_written = not text or text in conversation.text
        if message["role"] == "assistant" or is_written:
            continue
        if conversation.leaves_out(place, "content"):
            notes.append(f"{DROPS_ROLE} (role {message['role']!r})")
    if conversation.leaves_out_tools():
        notes.append(DROPS_TOOLS)
    return notes
