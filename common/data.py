"""Data sets in the ecosystem's formats, turned into token ids once and cached on disk by `datasets`."""

import gzip
import inspect
import json
import os
import sys
import zlib
from pathlib import Path

import datasets
import numpy as np
import pandas

from .launch import all_or_none

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
HH_MARKER = (
    "\n\nAssistant:"  # hh-rlhf transcripts: the prompt ends with the last one both answers share
)
FORMAT_COLUMNS = (
    "messages",
    "prompt",
    "completion",
    "text",
    "chosen",
    "rejected",
    "answer",
    "margin",
)


class BadRow(Exception):
    """A row that does not fit any format: which column, and what was expected."""


def load_rows(name: str, split: str) -> datasets.Dataset:
    """Loads a hub data set (`owner/name` or `owner/name:config`), a local file, or a folder of files.

    Files are `.jsonl .json .parquet .csv`, also gzipped. A file is the split `train`; the files of a folder are the splits
    that their names say (`train*`, `test*` ...), or all of them `train`, as on the hub. The cells of a CSV are text.

    Raises:
        SystemExit: nothing there, malformed JSON (with the row), no rows.
    """
    path, options = Path(name), {}
    ignored = datasets.data_files.FILES_TO_IGNORE  # dataset_infos.json and the like
    files = [
        file
        for file in (path.rglob("*") if path.is_dir() else [path])
        if reader_of(file) and file.name not in ignored
    ]
    kinds = {reader_of(file) for file in files}
    if not path.is_dir() and path.is_file() != bool(files):
        why = (
            f"does not exist (looked in {Path.cwd()})"
            if files
            else f"must end in {' '.join(READERS)}, or one of them and .gz"
        )
        sys.exit(f"data file {name!r} {why}")
    if len(kinds) > 1:
        sys.exit(f"folder {name!r} mixes {sorted(kinds)} files: give a folder of one kind")
    try:
        if kinds == {"csv"}:  # else "42" would be a number, and "None" nothing
            first = pandas.read_csv(files[0], nrows=1)
            if not isinstance(
                first.index, pandas.RangeIndex
            ):  # else the columns would shift in silence
                raise ValueError(
                    "row 1 has more cells than the header: quote cells that hold commas"
                )
            options = {
                "features": datasets.Features(dict.fromkeys(first, datasets.Value("string"))),
                "keep_default_na": False,
            }
        if path.is_file():
            return datasets.load_dataset(*kinds, data_files=name, split=split, **options)
        hub_name, _, config = (name, "", "") if path.is_dir() else name.partition(":")
        return datasets.load_dataset(hub_name, config or None, split=split, **options)
    except Exception as error:  # each reader raises what its library does
        why = " ".join(str(error.__cause__ or error).split())[:300]
        empty = (
            isinstance(error, (StopIteration, pandas.errors.EmptyDataError))
            or "corresponds to no data" in why
        )
        for file in files if kinds == {"json"} and not empty else []:
            find_malformed_json(file)
        sys.exit(
            f"data set {name!r}, split {split!r}, "
            + ("holds no rows" if empty else f"could not be read: {why}")
        )


def reader_of(path: Path) -> str | None:
    """The `datasets` builder for a file name; None if it is not a data file."""
    return READERS.get(Path(path.stem).suffix if path.suffix == ".gz" else path.suffix)


def find_malformed_json(path: Path) -> None:
    """Exits with the first row of a JSON or JSON-lines file that is not a JSON object; returns if there is none."""
    where = f"{path}"
    try:
        text = (gzip.open if path.suffix == ".gz" else open)(path, "rb").read()
        array = ".jsonl" not in path.suffixes and text.lstrip()[:1] == b"["
        for number, row in enumerate(json.loads(text) if array else text.splitlines(), 1):
            where = f"{path}, row {number}"
            if not isinstance(value := row if array else json.loads(row.strip() or b"{}"), dict):
                sys.exit(f"{where}: expected a JSON object, found {json.dumps(value)[:60]}")
    except Exception as error:  # gzip and json raise a dozen kinds
        sys.exit(f"{where}: malformed JSON: {str(error).replace('line 1 ', '')}")


# ---------------------------------------------------------------------------------------------- formats


def column_names(pairs: list[str] | None) -> dict[str, str]:
    """`["prompt=question"]` -> `{"prompt": "question"}`: where a format's column stands in the user's file."""
    columns = dict(pair.partition("=")[::2] for pair in pairs or [])
    if (
        len(columns) < len(pairs or [])
        or not all(columns.values())
        or columns.keys() - FORMAT_COLUMNS
    ):
        sys.exit(
            f"--columns {' '.join(pairs)}: expected {'|'.join(FORMAT_COLUMNS)}=YOUR_COLUMN, each once, such as prompt=question"
        )
    return columns


def check(fits: bool, row: dict, column: str, expected: str) -> None:
    if not fits:
        raise BadRow(f"column {column!r}: expected {expected}, found {row[column]!r:.80}")


def is_messages(value) -> bool:
    """Whether a value is a list of `{"role": ..., "content": ...}`, both strings; a turn that calls tools needs no content."""
    fits = lambda m: (
        isinstance(m.get("role"), str)
        and isinstance(m.get("content"), str | None if m.get("tool_calls") else str)
    )
    return isinstance(value, list) and all(isinstance(m, dict) and fits(m) for m in value)


def as_messages(value: str | list[dict], role: str) -> list[dict]:
    """A string becomes one message of that role."""
    messages = [{"role": role, "content": value}] if isinstance(value, str) else value
    return [
        {"content": "", **message} for message in without_nulls(json.dumps(messages, default=str))
    ]


def without_nulls(text: str):
    """The value of a JSON text without the keys, at any depth, that are null: in a parquet file each row has the keys of all."""
    return json.loads(
        text,
        object_hook=lambda parts: {key: part for key, part in parts.items() if part is not None},
    )


def has_text(value: str | list[dict]) -> bool:
    return (
        any(message["content"] or message.get("tool_calls") for message in value)
        if isinstance(value, list)
        else bool(value)
    )


def require(row: dict, *columns: str, expected: str) -> None:
    """Every column is there, a string or a list of messages."""
    for column in columns:
        if row.get(column) is None:
            found = sorted(name for name in row if row[name] is not None)
            raise BadRow(
                f"no {column!r}: expected columns {expected}; found {found} (--columns {column}=YOURS names another)"
            )
        check(
            isinstance(row[column], str) or is_messages(row[column]),
            row,
            column,
            "a string or a list of messages with role and content",
        )


def preference(row: dict) -> tuple[list[dict] | str, list[dict] | str, list[dict] | str]:
    """A preference row as (prompt, chosen, rejected), all strings or all message lists, the prompt stated once."""
    prompt, chosen, rejected = (row.get(column) for column in ("prompt", "chosen", "rejected"))
    stated = [] if prompt is None else ["prompt"]
    require(
        row,
        "chosen",
        "rejected",
        *stated,
        expected="'chosen' and 'rejected', and 'prompt' unless it is in both",
    )
    if isinstance(chosen, str) and isinstance(rejected, str) and not isinstance(prompt, list):
        if stated:
            return prompt, chosen, rejected
        shared = os.path.commonprefix([chosen, rejected])
        if HH_MARKER not in shared:
            raise BadRow(
                f"no column 'prompt', and 'chosen' and 'rejected' do not share a transcript that holds {HH_MARKER!r}"
            )
        cut = shared.rindex(HH_MARKER) + len(HH_MARKER)
        return shared[:cut], chosen[cut:], rejected[cut:]
    chosen, rejected = as_messages(chosen, "assistant"), as_messages(rejected, "assistant")
    if stated and (not chosen or chosen[0]["role"] == "assistant"):
        return as_messages(prompt, "user"), chosen, rejected
    # The prompt stands inside both (UltraFeedback repeats it): it is what they share, up to an answer.
    cut = next(
        (i for i, (a, b) in enumerate(zip(chosen[:-1], rejected[:-1])) if a != b),
        min(len(chosen), len(rejected)) - 1,
    )
    while cut > 0 and not chosen[cut]["role"] == rejected[cut]["role"] == "assistant":
        cut -= 1
    inside = [message["content"].strip() for message in chosen[: max(cut, 0)]]
    if not inside or (prompt and as_messages(prompt, "user")[-1]["content"].strip() not in inside):
        raise BadRow(
            "'chosen' and 'rejected' do not begin with the same prompt, that of column 'prompt' if there is one"
        )
    return chosen[:cut], chosen[cut:], rejected[cut:]


# ---------------------------------------------------------------------------------------------- token ids


def render(
    tokenizer,
    messages: list[dict],
    add_generation_prompt: bool = False,
    tools: list[dict] | str | None = None,
) -> str:
    """Messages as the chat template writes them, and the tools they may call: JSON schemas, or a JSON text of them."""
    if tokenizer.chat_template is None:
        raise BadRow(
            "messages, but the tokenizer has no chat template: set tokenizer.chat_template and save it, or give plain strings"
        )
    try:
        tools = (
            without_nulls(tools if isinstance(tools, str) else json.dumps(tools, default=str))
            if tools
            else None
        )
        return tokenizer.apply_chat_template(
            messages, tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:  # a template raises what it likes, such as that roles must alternate
        raise BadRow(
            f"the tokenizer's chat template refuses the messages{' or tools' * bool(tools)}: {error}"
        ) from None


def encode(tokenizer, texts: list[str], plain: bool = False) -> list[list[int]]:
    """Token ids of consecutive pieces of one text, each piece's ids its own.

    The pieces are cut where the whole text's tokens allow it, so that ids are those a model meets when it reads the text;
    a piece that would merge with the one before it is tokenised alone. The ids of a piece never depend on later pieces.

    Args:
        plain: no chat template wrote the text: it gets the BOS that this tokenizer puts in front, if it does, and EOS at
            the end, unless it has them.
    """
    pieces, text, whole = [], "", []
    for piece in texts:
        text += piece
        seen, whole = (
            [token for part in pieces for token in part],
            tokenizer(text, add_special_tokens=False).input_ids,
        )
        pieces.append(
            whole[len(seen) :]
            if whole[: len(seen)] == seen
            else tokenizer(piece, add_special_tokens=False).input_ids
        )
    if plain and tokenizer("").input_ids[:1] == [tokenizer.bos_token_id] != whole[:1]:
        pieces[0] = [tokenizer.bos_token_id, *pieces[0]]
    if plain and pieces[-1][-1:] != [tokenizer.eos_token_id]:
        pieces[-1] = [*pieces[-1], tokenizer.eos_token_id]
    return pieces


def encode_turns(
    tokenizer, messages: list[dict], spans: list[tuple[int, int]], tools=None
) -> list[list[int]]:
    """Token ids of a conversation up to its last answer, in pieces: what precedes an answer, the answer, and so on.

    Args:
        spans: for each answer its first message, and the one after its last.
        tools: see `render`.
    """
    texts, done = [], ""
    for start, end in spans:
        before, after = (
            render(tokenizer, messages[:start], True, tools) if start else "",
            render(tokenizer, messages[:end], False, tools),
        )
        if not before.startswith(done):
            raise BadRow(
                "this chat template rewrites earlier turns when later ones follow: use --loss_on completion, or another template"
            )
        if not after.startswith(before):
            raise BadRow(
                "this chat template does not begin an answer with its own generation prompt: use another template"
            )
        texts += [before[len(done) :], after[len(before) :]]
        done = after
    return encode(tokenizer, texts)


def turn_length(tokenizer, ids: list[int]) -> int:
    """Tokens of a turn up to its EOS, or where the template writes none (Gemma, base models of Qwen) to the special token at its end; 0 if
    it has neither. What follows is never generated, so it is not learned."""
    eos = (
        tokenizer.eos_token_id
    )  # once: transformers searches for it each time, and a turn has hundreds of tokens
    last = (
        {}
        if eos in ids
        else {n: tokenizer.added_tokens_decoder.get(i) for n, i in list(enumerate(ids, 1))[-2:]}
    )
    return max(
        (n for n, i in enumerate(ids, 1) if i == eos or getattr(last.get(n), "special", False)),
        default=0,
    )


def encode_preference(
    tokenizer, prompt, chosen, rejected, tools=None
) -> tuple[list[int], list[int], list[int]]:
    """Ids of prompt, chosen and rejected; the prompt's are the same for both. `tools`: see `render`."""
    if isinstance(prompt, str):
        pairs = [encode(tokenizer, [prompt, answer], plain=True) for answer in (chosen, rejected)]
    else:
        pairs = [
            encode_turns(tokenizer, prompt + a, [(len(prompt), len(prompt + a))], tools)
            for a in (chosen, rejected)
        ]
    return pairs[0][0], *(answer[: turn_length(tokenizer, answer) or None] for _, answer in pairs)


def tokenizer_fingerprint(tokenizer) -> str:
    """Changes when the tokenizer would write other ids."""
    content = (
        tokenizer.backend_tokenizer.to_str()
        if tokenizer.is_fast
        else str(sorted(tokenizer.get_vocab().items()))
    )
    return "\0".join([content, str(tokenizer.chat_template), str(tokenizer.special_tokens_map)])


def load_tokenized(
    accelerator, name: str, split: str, function, tokenizer, columns: dict[str, str], **settings
) -> datasets.Dataset:
    """Loads a data set and applies a row function such as `preference_row` once: the result is cached on disk by its content.

    Rows that cannot be used are left out before any permutation, counted and printed by reason. The result keeps the
    row's number in the file (`row`, from 1) and, where the data has one, its `answer` as text ("" where a row has none).

    Args:
        columns: see `column_names`.
        settings: passed to `function`, and part of the cache's key, as is the function's source.

    Raises:
        SystemExit: a row that fits no format (row number, column, expectation), or nothing usable left. On all ranks.
    """
    task = name, split, function, tokenizer, columns, settings
    # One process of each machine fills the cache, then the others read it.
    turns = [
        all_or_none(accelerator, turn == accelerator.is_local_main_process, tokenized, *task)
        for turn in (True, False)
    ]
    result, notes = next(filter(None, turns))
    accelerator.print("; ".join([f"data {name}: {len(result)} usable rows", *notes]))
    return result


def tokenized(
    name: str, split: str, function, tokenizer, columns: dict, settings: dict
) -> tuple[datasets.Dataset, list[str]]:
    """`load_tokenized` on one process: the usable rows, and what is to be said of the others."""

    def convert(row, index):
        # What the user names goes before what is there, too.
        hidden = (
            ["messages", "text"]
            if {"prompt", "completion"} & columns.keys()
            else ["messages"]
            if "text" in columns
            else []
        )
        row = {k: v for k, v in row.items() if k not in hidden} | {
            name: row[own] for name, own in columns.items() if own in row
        }
        try:
            values = function(row, tokenizer=tokenizer, **settings)
            # Nothing is asked where there is no prompt.
            answer = {
                n: "" if row[n] is None or values.get("prompt_ids") == [] else str(row[n])
                for n in {"answer"} & row.keys()
            }
            values |= {"row": index + 1, **answer, "crc": zlib.crc32(repr(values).encode())}
            # Typed, as the first thousand rows, from which `datasets` takes the types, may all be left out, with empty lists.
            return {
                k: np.array(v, bool if k == "targets" else int) if isinstance(v, list) else v
                for k, v in values.items()
            }
        except BadRow as error:
            sys.exit(f"data set {name!r}, row {index + 1}: {error}")

    if settings["max_length"] < 2:
        sys.exit(
            f"--max_length {settings['max_length']}: expected at least 2, a token of the prompt and one of the answer"
        )
    rows = load_rows(name, split)
    if missing := [
        own for name, own in columns.items() if own not in rows.column_names and name != "answer"
    ]:  # held-out sets have that
        sys.exit(
            f"--columns: data set {name!r} has no column {missing[0]!r}; it has {rows.column_names}"
        )
    key = [
        rows._fingerprint,
        Path(__file__).read_text("utf-8"),
        source_of(function),
        tokenizer_fingerprint(tokenizer),
        columns,
        settings,
    ]
    try:
        done = rows.map(
            convert,
            with_indices=True,
            remove_columns=rows.column_names,
            new_fingerprint=datasets.fingerprint.Hasher.hash(key),
        )
    except UnicodeDecodeError as error:
        sys.exit(f"data set {name!r} is not UTF-8: {error}")
    # Named by its content: the same rows from another path, or written at another time, are the same data.
    reasons, content = (
        column(done, "reason"),
        datasets.fingerprint.Hasher.hash_bytes(column(done, "crc").tobytes()),
    )
    usable = done.select(np.flatnonzero(reasons == ""), new_fingerprint=content)
    left_out, truncated = (
        np.unique(reasons[reasons != ""], return_counts=True),
        int((column(done, "truncated") & (reasons == "")).sum()),
    )
    notes = [f"{count} left out ({reason})" for reason, count in zip(*left_out)] + [
        f"{truncated} truncated"
    ] * (truncated > 0)
    if len(usable) == 0:
        sys.exit(f"data set {name!r}: no usable row: {'; '.join(notes)}")
    unanswered = "answer" in usable.column_names and not any(
        usable["answer"]
    )  # read until one is found
    return usable.remove_columns(["crc"] + ["answer"] * unanswered), notes


def column(dataset: datasets.Dataset, name: str) -> np.ndarray:
    """A column of numbers or words, read in parts: read at once it would take half a kilobyte a row."""
    return np.concatenate([part[name] for part in dataset.select_columns(name).iter(10_000)])


def source_of(function) -> str:
    """The source of a function and of those of its module that it calls: what else changes in a recipe changes no tokens."""
    values = (function.__globals__.get(name) for name in function.__code__.co_names)
    called = [
        value
        for value in values
        if inspect.isfunction(value)
        and value.__module__ == function.__module__
        and value is not function
    ]
    return "".join([inspect.getsource(function), *map(source_of, called)])


def load_evaluation_sets(
    accelerator, names: list[str] | None, *rest, **settings
) -> dict[str, datasets.Dataset]:
    """`load_tokenized` of each held-out set, by the prefix of its tags: `eval/`, or `eval/<name>/` where there are several."""
    stems = [Path(name.partition(":")[0]).name.split(".")[0] for name in names or []]
    if len(set(stems)) < len(stems):
        sys.exit(f"--eval_dataset_name {names}: two sets would log under the same name")
    prefixes = [f"eval/{stem}/" for stem in stems] if len(stems) > 1 else ["eval/"]
    return {
        p: load_tokenized(accelerator, name, *rest, **settings)
        for p, name in zip(prefixes, names or [])
    }
