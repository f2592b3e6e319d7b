"""Whether a response gives the right answer."""

import functools
import re
import unicodedata
from decimal import Decimal

from preference_recipes.data import dataset, thoughts
from preference_recipes.data.rendering import QUESTION, added_tokens, encode, render

# Sentences that state the answer: "The answer is 18.", "**Answer**: 18".
STATEMENT = re.compile(
    r"""\banswer\b \*{0,2}
        # "answer to 1.5 + 1 is", "answer:". What follows another "answer" is found from there.
        (?: (?:(?!\banswer\b)[^.\n:=]|\.(?=\d)){0,200}? \bis\b | \s*[:=] )
        \s* :? (?:\s|\*|(?<=\n)[-\u2022]\s)*       # the end of bold type, a line's end, a bullet
        (.*?)                                      # the answer itself, up to
        (?: \.(?=\s|$) | \n | $ )                  # a full stop (not that in 1.5), or a line's end
    """,
    re.IGNORECASE | re.VERBOSE,
)
BOX = re.compile(r"\\(?:boxed|fbox) *\{")
HASHES = "####"
BRACE = re.compile("[{}]")
ENCLOSED = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL | re.IGNORECASE)
# A number as people write it. 007 is not one, so it is compared as text.
NUMBER = re.compile(
    r"""[-+]? (?=\.?\d)
        (?: [1-9]\d{0,2}(?:,\d{3})+ | [1-9]\d* | 0 )?    # 1,200 or 1200; nothing in .5
        (?: \.\d+ )?
        (?: [eE][-+]?\d{1,3} )?                   # 1e-05, as Python writes 0.00001
    """,
    re.VERBOSE,
)
DIGIT = re.compile(r"\d")
# Units that may directly follow a number: km, km/h, cm², the C of degrees; not x as in 3x.
UNIT = re.compile(r"(?:[CF]|/?[^\W\d_²³]{2,}(?:/[^\W\d_²³]+)?)[²³]*")
# Other forms of ASCII characters: full-width ones, at a fixed distance from ASCII, and quotes.
ALIKE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
ALIKE |= dict.fromkeys(map(ord, "\u2018\u2019\u02bc\u2032"), ord("'"))
ALIKE |= dict.fromkeys(map(ord, "\u201c\u201d\u201e"), ord('"'))
# Soft hyphens, zero-width spaces and joiners, marks of direction, variants of a character.
INVISIBLE = re.compile("[\u00ad\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]")
OTHER_DIGIT = re.compile(r"[^\D0-9]")
OTHER_SPACE = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
# Apostrophes and these special spaces may separate thousands; an ordinary space does not.
THOUSANDS = re.compile(rf"(?<![\d.,])[1-9]\d{{0,2}}(?:(?:'|{OTHER_SPACE.pattern})\d{{3}})+(?!\d)")
# Notation of people and of LaTeX around an answer, with its replacement.
TEXT = r"\\(?:text|textbf|mathrm|mbox) *\{"
PLAIN_FORMS = [
    # A unit in LaTeX: 5\,\mathrm{m/s} is 5 m/s.
    (re.compile(rf"(?<=\d)(?:\\[,;: ]|~) *(?={TEXT})|(?<=\d)(?={TEXT}[^\W\d_]+/)"), " "),
    (re.compile(rf"{TEXT}([^{{}}]*)\}}"), r"\1"),  # \text{x}: x
    (re.compile(r"\\[cdt]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\frac *\{([^{}]*)\} *\{([^{}]*)\}"), r"\1/\2"),  # \frac{1}{2}: 1/2
    (re.compile(r"\\frac *(\d) *(\d)"), r"\1/\2"),  # \frac12: 1/2
    (re.compile(r"\{,\}"), ","),  # 1{,}000: 1,000
    (re.compile(r"(?<=[a-zA-Z])\^ *(?:2|\{2\})"), "²"),  # cm^2: cm²
    (re.compile(r"(?<=[a-zA-Z])\^ *(?:3|\{3\})"), "³"),
    # Spaces and sizes of LaTeX, Markdown, currencies and per cent: nothing.
    (re.compile(r"\\[!,;: ()\[\]]|\\(?:left|right)\b|\*\*|`|\\?[$%]|[€£¥]"), ""),
    # Degrees: the C or F after the sign, or nothing.
    (re.compile(r" ?(?:\u00b0|\^ *(?:\{ *)?\\circ *\}?)(?: ?([CF])\b)?"), r"\1"),
    (re.compile("\u2212"), "-"),  # a minus sign
    (re.compile(r"[-\u2013] *(?=[\d.])"), "-"),  # a dash before a number, and spaces after it
]
# A space that is not between two words.
LONE_SPACE = re.compile(r"(?<!\w)[ ]|[ ](?!\w)")


def decode_responses(tokenizer, responses: list[list[int]]) -> list[str]:
    """Returns the texts of responses without special tokens, but with the markers of thoughts.

    Some tokenizers have these markers as special tokens, and without them a thought would run into
    the answer. Where responses have headers (gpt-oss), a text begins after the last header.
    """
    header = header_of(tokenizer)
    if header:
        responses = [ids[answer_start(header, ids) :] for ids in responses]
    markers = " ".join(map(" ".join, thoughts.MARKERS))
    special = {
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and token.content not in markers
    }
    kept = [[token for token in ids if token not in special] for ids in responses]
    return tokenizer.batch_decode(kept, skip_special_tokens=False)


@functools.lru_cache(maxsize=16)
def header_of(tokenizer) -> list[int]:
    """Returns the header that a model writes between the generation prompt and a plain answer.

    For gpt-oss it is `<|channel|>final<|message|>`. It is empty for most templates, which write
    nothing there, or no special token, or an empty thought.
    """
    answer = {"role": "assistant", "content": QUESTION["content"]}
    try:
        prompt = render(tokenizer, [QUESTION], add_generation_prompt=True)
        whole = render(tokenizer, [QUESTION, answer])
    except Exception:  # a template may raise anything
        return []
    before = whole.rpartition(QUESTION["content"])[0]
    header = before.removeprefix(prompt) if before.startswith(prompt) else ""
    has_thought = re.search(f"{thoughts.OPENERS}|{thoughts.CLOSERS}", header)
    is_header = added_tokens(tokenizer).search(header) and not has_thought
    return encode(tokenizer, header) if is_header else []


def answer_start(header: list[int], ids: list[int]) -> int:
    """Returns where the answer in a response begins: after the last header, else 0.

    A response that has only headers of thinking was cut off; the answer would begin at its end.
    """
    ends = range(len(ids), len(header) - 1, -1)
    without_header = len(ids) if header[-1] in ids else 0
    return next((end for end in ends if ids[end - len(header) : end] == header), without_header)


def is_right(response: str, answer: str | float | list, prompt: str = "") -> bool:
    """Whether a response has the same final answer as `answer`, or as one entry of a list.

    If the right answer is a number, the response's must hold exactly one number, of the same value:
    1,200 is 1200; 18.0, $18 and 18 dollars are 18. All else is text, see docs/evaluation.md.

    Args:
        answer: as in the data, or as `dataset.answer_text` keeps it.
        prompt: it may end by opening a thought. A response cut off within that has no answer.
    """
    opener, _ = thoughts.opened_by(prompt)
    stated = plain(final_answer(usual_characters(opener + response)))
    stated_number = number_in(stated)
    stated_text = as_text(stated)
    for entry in dataset.answer_text(answer).split(dataset.ANSWER_SEPARATOR):
        right = plain(final_answer(usual_characters(entry))).rstrip(".")
        if NUMBER.fullmatch(right):
            if stated_number == number_in(right):
                return True
        elif stated_text == as_text(right):
            return True
    return False


def usual_characters(text: str) -> str:
    """Returns a text in the characters of a plain keyboard."""
    if not text.isascii():
        text = INVISIBLE.sub("", text).translate(ALIKE)
        text = OTHER_DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), text)
    text = THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), text)
    return OTHER_SPACE.sub(" ", text)


def final_answer(text: str) -> str:
    r"""Returns the part of a text that states its answer, without any thinking.

    That is the last of these in the text:

        \boxed{...}, \fbox{...}  the content of the braces
        #### (GSM8K)            the rest of the line, or the next line if that is empty
        <answer>...</answer>    the final answer of the text between them

    If there is none, it is the text after the last "the answer is" or "answer:" that is followed by
    something, else the whole text. `thoughts.outside_thoughts` removes the thinking.
    """
    answer = thoughts.outside_thoughts(text)
    box_at, boxed = last_box(answer)
    hashes_at, line = last_hashes(answer)
    enclosed = None
    for match in ENCLOSED.finditer(answer):
        enclosed = match if match[1].strip() else enclosed
    if enclosed and enclosed.end() > max(box_at, hashes_at):
        return final_answer(enclosed[1])
    if hashes_at > box_at:
        return line
    if box_at >= 0:
        return boxed
    statements = [stated for stated in STATEMENT.findall(answer) if stated.strip()]
    return statements[-1] if statements else answer


# These read a text only once: a degenerate policy repeats marks endlessly.
def last_box(text: str) -> tuple[int, str]:
    """Returns the start of the last whole `\\boxed{...}` and its content; -1 and "" if none."""
    boxes = {box.end() - 1: box.start() for box in BOX.finditer(text)}  # by the opening brace
    unclosed = []
    closed_at = {}  # positions of closing braces by those of their opening braces
    for brace in BRACE.finditer(text):
        if brace[0] == "{":
            unclosed.append(brace.start())
        elif unclosed:
            closed_at[unclosed.pop()] = brace.start()
    for brace_at, start in reversed(boxes.items()):
        if brace_at in closed_at:
            return start, text[brace_at + 1 : closed_at[brace_at]]
    return -1, ""


def last_hashes(text: str) -> tuple[int, str]:
    """Returns the position of the last `####` that marks an answer, and the answer; else -1, "".

    If other lines follow the answer, it must be a number: otherwise `####` begins a heading.
    """
    start = len(text)
    below: list[str] = []  # the lines below that are not blank, the nearest last
    for line in reversed(text.splitlines(keepends=True)):
        start -= len(line)
        # A number is not followed by another mark, so the last mark of a line decides.
        before, mark, answer = line.rpartition(HASHES)
        if mark:
            n_following = len(below)
            if not answer.strip() and below:
                answer = below[-1]
                n_following -= 1
            is_number = DIGIT.search(answer) and NUMBER.fullmatch(plain(answer))
            if is_number or not n_following:
                return start + len(before), answer.strip()
        if line.strip():
            below.append(line)
    return -1, ""


def plain(text: str) -> str:
    """Returns a text without currency and per cent signs, LaTeX's spaces and the like."""
    for pattern, replacement in PLAIN_FORMS:
        text = pattern.sub(replacement, text)
    return text.strip()


def number_in(text: str) -> Decimal | None:
    """Returns the only number in a text; None if there is none, or several, as in 1/2 or 9:30."""
    name, equals, value = text.partition("=")
    if equals and not DIGIT.search(name):
        text = value  # x = 18, but not 3 + 4 = 7
    words = [word for word in text.split() if DIGIT.search(word)]
    if len(words) != 1:
        return None
    word = words[0].lstrip("(['\"").rstrip(")]'\".,;:!?")
    number = NUMBER.match(word)
    if number is None:
        return None
    rest = word[number.end() :]
    if rest and not UNIT.fullmatch(rest):
        return None
    return Decimal(number[0].replace(",", ""))


def as_text(text: str) -> str:
    """Returns a text in the form used for comparison: (B) and B) become b."""
    text = " ".join(text.split())
    text = LONE_SPACE.sub("", text)  # (3, 4) is (3,4), and 1 1/2 is not 11/2
    text = text.rstrip(".").casefold()
    return text.strip("()") if re.fullmatch(r"\(?\w\)", text) else text
