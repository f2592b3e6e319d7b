"""Whether a response gives the right answer."""

import functools
import re
import unicodedata
from decimal import Decimal

from preference_recipes.data import dataset, thoughts
from preference_recipes.data.rendering import QUESTION, added_tokens, encode, render

# What states the answer in a sentence: "The answer is 18.", "**Answer**: 18".
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
# A number as people write one. 007 is none, so it is compared as text.
NUMBER = re.compile(
    r"""[-+]? (?=\.?\d)
        (?: [1-9]\d{0,2}(?:,\d{3})+ | [1-9]\d* | 0 )?    # 1,200 or 1200; nothing in .5
        (?: \.\d+ )?
        (?: [eE][-+]?\d{1,3} )?                   # 1e-05, as Python writes 0.00001
    """,
    re.VERBOSE,
)
DIGIT = re.compile(r"\d")
# The unit that may directly follow a number: km, km/h, cm², the C of degrees; not x as in 3x.
UNIT = re.compile(r"(?:[CF]|/?[^\W\d_²³]{2,}(?:/[^\W\d_²³]+)?)[²³]*")
# Forms of one character: full-width ones are as far from ASCII as the first of them; quotes.
ALIKE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
ALIKE |= dict.fromkeys(map(ord, "\u2018\u2019\u02bc\u2032"), ord("'"))
ALIKE |= dict.fromkeys(map(ord, "\u201c\u201d\u201e"), ord('"'))
# Soft hyphens, zero-width spaces and joiners, marks of direction, variants of a character.
INVISIBLE = re.compile("[\u00ad\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]")
OTHER_DIGIT = re.compile(r"[^\D0-9]")
OTHER_SPACE = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
# An apostrophe, or a space of these, may separate thousands; an ordinary space does not.
THOUSANDS = re.compile(rf"(?<![\d.,])[1-9]\d{{0,2}}(?:(?:'|{OTHER_SPACE.pattern})\d{{3}})+(?!\d)")
# What people and LaTeX write around an answer, and what replaces it.
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


def decode_answers(tokenizer, answers: list[list[int]]) -> list[str]:
    """Returns the texts of answers without special tokens, but with the markers of thoughts.

    Some tokenizers have these as special tokens, too, and a thought would run into what follows it.
    Where an answer has a header (gpt-oss), its text is what follows the last one.
    """
    header = header_of(tokenizer)
    if header:
        answers = [ids[answer_start(header, ids) :] for ids in answers]
    markers = " ".join(map(" ".join, thoughts.MARKERS))
    special = {
        number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special and token.content not in markers
    }
    kept = [[token for token in ids if token not in special] for ids in answers]
    return tokenizer.batch_decode(kept, skip_special_tokens=False)


@functools.lru_cache(maxsize=16)
def header_of(tokenizer) -> list[int]:
    """Returns what a model writes between the generation prompt and an answer without thinking.

    It is `<|channel|>final<|message|>` for gpt-oss. Most templates write nothing there, or no
    special token, or an empty thought: then it is empty.
    """
    answer = {"role": "assistant", "content": QUESTION["content"]}
    try:
        prompt = render(tokenizer, [QUESTION], add_generation_prompt=True)
        whole = render(tokenizer, [QUESTION, answer])
    except Exception:  # a template raises what it likes
        return []
    before = whole.rpartition(QUESTION["content"])[0]
    header = before.removeprefix(prompt) if before.startswith(prompt) else ""
    has_thought = re.search(f"{thoughts.OPENERS}|{thoughts.CLOSERS}", header)
    is_header = added_tokens(tokenizer).search(header) and not has_thought
    return encode(tokenizer, header) if is_header else []


def answer_start(header: list[int], ids: list[int]) -> int:
    """Returns where the answer in a response begins: after the last header, else 0.

    It is the end if there are only headers of thinking: the response was cut in that.
    """
    ends = range(len(ids), len(header) - 1, -1)
    without = len(ids) if header[-1] in ids else 0
    return next((end for end in ends if ids[end - len(header) : end] == header), without)


def is_right(response: str, answer: str | float | list, prompt: str = "") -> bool:
    """Returns whether a response has the final answer of an answer; of a list, of any entry.

    If it is a number, that of the response must hold exactly one number, of the same value: 1,200
    is 1200, and 18.0, $18 and 18 dollars are 18. All else is compared as text. docs/evaluation.md
    has a table of what is read as what.

    Args:
        answer: as the data has it, or as `dataset.answer_text` keeps it.
        prompt: its end may have opened a thought: a response that was cut in it is no answer.
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
    """Returns a text in the characters that it would have on a plain keyboard."""
    if not text.isascii():
        text = INVISIBLE.sub("", text).translate(ALIKE)
        text = OTHER_DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), text)
    text = THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), text)
    return OTHER_SPACE.sub(" ", text)


def final_answer(text: str) -> str:
    r"""Returns the part of a text that states its answer, without any thinking.

    That is the last of these in the text:

        \boxed{...}, \fbox{...}  what is in the braces
        #### (GSM8K)            the rest of the line, or the next line if that is empty
        <answer>...</answer>    the final answer of what is between them

    If there is none, it is what follows the last "the answer is" or "answer:" that something
    follows, or else the whole text. What thinking is: `thoughts.outside_thoughts`.
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


# These read a text once, whatever is in it: a policy that degenerates repeats marks endlessly.
def last_box(text: str) -> tuple[int, str]:
    """Returns where the last whole `\\boxed{...}` begins, and what it holds; -1 and "" if none."""
    boxes = {box.end() - 1: box.start() for box in BOX.finditer(text)}  # by the place of the brace
    unclosed = []
    closed_at = {}  # by the place of the brace that is closed there
    for brace in BRACE.finditer(text):
        if brace[0] == "{":
            unclosed.append(brace.start())
        elif unclosed:
            closed_at[unclosed.pop()] = brace.start()
    for place, start in reversed(boxes.items()):
        if place in closed_at:
            return start, text[place + 1 : closed_at[place]]
    return -1, ""


def last_hashes(text: str) -> tuple[int, str]:
    """Returns where the last `####` is that marks an answer, and the answer; -1 and "" if none.

    If other lines follow the answer, it must be a number: otherwise `####` begins a heading.
    """
    start = len(text)
    below: list[str] = []  # the lines below that are not blank, the nearest last
    for line in reversed(text.splitlines(keepends=True)):
        start -= len(line)
        # An answer that goes on with another mark is no number, so the last of a line decides.
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
    """Returns a text in the form in which it is compared: (B) and B) become b."""
    text = " ".join(text.split())
    text = LONE_SPACE.sub("", text)  # (3, 4) is (3,4), and 1 1/2 is not 11/2
    text = text.rstrip(".").casefold()
    return text.strip("()") if re.fullmatch(r"\(?\w\)", text) else text
