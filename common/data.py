"""Data sets in the ecosystem's formats, turned into token ids once and cached on disk by `datasets`."""

import collections
import gzip
import hashlib
import json
import os
import sys
from pathlib import Path

import datasets
import numpy as np

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
HH_MARKER = "\n\nAssistant:"  # hh-rlhf transcripts: the prompt ends with the last one both answers share
CACHE_VERSION = 1  # raise it when the tokenised columns change


class BadRow(Exception):
    """A row that does not fit any format: which column, and what was expected."""


def load_rows(name: str, split: str) -> datasets.Dataset:
    """Loads a hub data set (`owner/name` or `owner/name:config`), a local file, or a folder of files.

    Files are `.jsonl .json .parquet .csv`, also gzipped. Local files have the split `train`.

    Raises:
        SystemExit: nothing there, malformed JSON (with the line), no rows.
    """
    path = Path(name)
    files = sorted(file for file in path.rglob("*") if reader_of(file)) if path.is_dir() else [path]
    try:
        if reader_of(path) or (path.is_dir() and files):
            for file in files:
                if not file.is_file():
                    sys.exit(f"data file {name!r} does not exist (looked in {Path.cwd()})")
            kinds = {reader_of(file) for file in files}
            if len(kinds) > 1:
                sys.exit(f"{name} mixes {sorted(kinds)} files: give a folder of one kind")
            if all(file.stat().st_size == 0 for file in files):
                sys.exit(f"data set {name!r} holds no rows")
            rows = datasets.load_dataset(kinds.pop(), data_files=[str(file) for file in files], split=split)
        else:
            hub_name, _, config = name.partition(":")
            rows = datasets.load_dataset(hub_name, config or None, split=split)
    except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:
        for file in files:
            if reader_of(file) == "json" and ".jsonl" in file.suffixes:
                find_malformed_line(file)
        sys.exit(f"data set {name!r}, split {split!r}, could not be read: {error.__cause__ or error}")
    if len(rows) == 0:
        sys.exit(f"data set {name!r}, split {split!r}, holds no rows")
    return rows


def reader_of(path: Path) -> str | None:
    """The `datasets` builder for a file name; None if it is not a data file."""
    return READERS.get(Path(path.stem).suffix if path.suffix == ".gz" else path.suffix)


def find_malformed_line(path: Path) -> None:
    """Exits with the first line of a JSON-lines file that is not a JSON object; returns if there is none."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                if line.strip() and not isinstance(json.loads(line), dict):
                    sys.exit(f"{path}, row {number}: expected a JSON object, found {line.strip()[:60]!r}")
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                sys.exit(f"{path}, row {number}: malformed JSON: {error}")


# ---------------------------------------------------------------------------------------------- formats


def column_names(pairs: list[str] | None) -> dict[str, str]:
    """`["prompt=question"]` -> `{"prompt": "question"}`: where a format's column stands in the user's file."""
    for pair in pairs or []:
        if pair.count("=") != 1:
            sys.exit(f"--columns {pair!r}: expected FORMAT_COLUMN=YOUR_COLUMN, such as prompt=question")
    return dict(pair.split("=") for pair in pairs or [])


def is_messages(value) -> bool:
    """Whether a value is a list of `{"role": ..., "content": ...}`."""
    return isinstance(value, list) and all(isinstance(m, dict) and "role" in m and "content" in m for m in value)


def check_kind(row: dict, *columns: str) -> None:
    """Every column is a string or a list of messages."""
    for column in columns:
        value = row[column]
        if not (isinstance(value, str) or is_messages(value)):
            raise BadRow(f"column {column!r}: expected a string or a list of messages with role and content, found {value!r:.80}")  # fmt: skip


def as_messages(value: str | list, role: str) -> list[dict]:
    """A string becomes one message of that role."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def conversation(row: dict) -> tuple[list[dict] | str, list[dict] | str]:
    """An SFT row as (prompt, completion), both strings or both message lists; `messages` has an empty prompt."""
    if row.get("messages") is not None:
        if not is_messages(row["messages"]):
            raise BadRow(f"column 'messages': expected a list of messages with role and content, found {row['messages']!r:.80}")  # fmt: skip
        return [], row["messages"]
    if isinstance(row.get("text"), str):
        return "", row["text"]
    if row.get("prompt") is None or row.get("completion") is None:
        raise BadRow(f"expected a column 'messages', or 'prompt' and 'completion', or 'text'; found {sorted(k for k in row if row[k] is not None)}")  # fmt: skip
    check_kind(row, "prompt", "completion")
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt, completion
    return as_messages(prompt, "user"), as_messages(completion, "assistant")


def preference(row: dict) -> tuple[list[dict] | str, list[dict] | str, list[dict] | str]:
    """A preference row as (prompt, chosen, rejected), all strings or all message lists, the prompt stated once."""
    for column in ("chosen", "rejected"):
        if row.get(column) is None:
            raise BadRow(f"expected a column {column!r} (and 'chosen', 'rejected', optionally 'prompt'); found {sorted(k for k in row if row[k] is not None)}")  # fmt: skip
    check_kind(row, "chosen", "rejected", *(["prompt"] if row.get("prompt") is not None else []))
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str):
        if isinstance(prompt, str):
            return prompt, chosen, rejected
        if prompt is None:
            shared = os.path.commonprefix([chosen, rejected])
            if HH_MARKER not in shared:
                raise BadRow(f"no column 'prompt', and 'chosen' and 'rejected' do not share a transcript that holds {HH_MARKER!r}")  # fmt: skip
            cut = shared.rindex(HH_MARKER) + len(HH_MARKER)
            return shared[:cut], chosen[cut:], rejected[cut:]
    chosen, rejected = as_messages(chosen, "assistant"), as_messages(rejected, "assistant")
    prompt = [] if prompt is None else as_messages(prompt, "user")
    if not prompt or (chosen[: len(prompt)] == prompt and rejected[: len(prompt)] == prompt):
        # The prompt stands inside both (UltraFeedback repeats it): it is what they share up to the last answer.
        same = [a == b for a, b in zip(chosen[:-1], rejected[:-1])]
        cut = same.index(False) if False in same else len(same)
        if cut == 0:
            raise BadRow("'chosen' and 'rejected' share no first message, and there is no column 'prompt'")
        prompt, chosen, rejected = chosen[:cut], chosen[cut:], rejected[cut:]
    return prompt, chosen, rejected


# ---------------------------------------------------------------------------------------------- token ids


def render(tokenizer, messages: list[dict], add_generation_prompt: bool = False) -> str:
    """Messages as the chat template writes them."""
    if tokenizer.chat_template is None:
        raise BadRow("the row is a list of messages, but the tokenizer has no chat template: set tokenizer.chat_template "
                     "and save it, or give plain strings")  # fmt: skip
    if not messages:
        return ""
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)


def encode(tokenizer, texts: list[str], bos: bool, eos: bool) -> list[list[int]]:
    """Token ids of consecutive pieces of one text, each piece's ids its own.

    The pieces are cut where the whole text's tokens allow it, so that ids are those a model meets when it reads the text;
    a piece that would merge with the one before it is tokenised alone. The ids of a piece never depend on later pieces.

    Args:
        bos: plain text gets the BOS this tokenizer puts in front, if it does; a chat template writes its own.
        eos: end the last piece with EOS.
    """
    special = tokenizer("").input_ids if bos else []
    pieces, text = [], ""
    for piece in texts:
        text += piece
        seen = [token for part in pieces for token in part]
        whole = tokenizer(text, add_special_tokens=False).input_ids
        merges = whole[: len(seen)] != seen
        pieces.append(tokenizer(piece, add_special_tokens=False).input_ids if merges else whole[len(seen) :])
    if special[:1] == [tokenizer.bos_token_id]:
        pieces[0] = special[:1] + pieces[0]
    if eos:
        pieces[-1] = pieces[-1] + [tokenizer.eos_token_id]
    return pieces


def turn_length(tokenizer, ids: list[int]) -> int:
    """Tokens of a turn up to its EOS: what a template writes after it is never generated, so it is not learned."""
    return len(ids) - ids[::-1].index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else len(ids)


def encode_conversation(tokenizer, prompt, completion, loss_on: str) -> tuple[list[int], list[bool]]:
    """Ids of an SFT row and which of them are targets.

    Args:
        loss_on: `assistant` (every assistant turn; of prompt and completion the completion), `completion` (the last
            turn only) or `all`.
    """
    if isinstance(completion, str):
        if not completion:
            return [], []
        texts, flags = [prompt, completion], [False, True]
        pieces = encode(tokenizer, texts, bos=True, eos=True)
    else:
        messages, texts, flags, done = prompt + completion, [], [], ""
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m["content"] and i >= len(prompt)]
        for i in turns[-1:] if loss_on == "completion" else turns:
            before, after = render(tokenizer, messages[:i], True), render(tokenizer, messages[: i + 1])
            if not before.startswith(done) or not after.startswith(before):
                raise BadRow("this chat template rewrites earlier turns when later ones follow, so the turns have no fixed "
                             "tokens: use --loss_on completion, or a template that does not")  # fmt: skip
            texts += [before[len(done) :], after[len(before) :]]
            flags += [False, True]
            done = after
        if not texts:
            return [], []
        pieces = encode(tokenizer, texts, bos=False, eos=False)
    pieces[-1] = pieces[-1][: turn_length(tokenizer, pieces[-1])]
    ids = [token for piece in pieces for token in piece]
    ends = [turn_length(tokenizer, piece) if flag else 0 for flag, piece in zip(flags, pieces)]
    targets = [loss_on == "all" or i < end for end, piece in zip(ends, pieces) for i in range(len(piece))]
    return ids, [index > 0 and target for index, target in enumerate(targets)]  # nothing predicts the first token


def encode_preference(tokenizer, prompt, chosen, rejected) -> tuple[list[int], list[int], list[int]]:
    """Ids of prompt, chosen and rejected; the prompt's are the same for both."""
    if isinstance(prompt, str):
        pairs = [encode(tokenizer, [prompt, answer], bos=True, eos=True) for answer in (chosen, rejected)]
    else:
        before = render(tokenizer, prompt, True)
        afters = [render(tokenizer, prompt + answer) for answer in (chosen, rejected)]
        if not all(after.startswith(before) for after in afters):
            raise BadRow("this chat template does not begin the answer with its own generation prompt")
        pairs = [encode(tokenizer, [before, after[len(before) :]], bos=False, eos=False) for after in afters]
    (prompt_ids, chosen_ids), (_, rejected_ids) = pairs
    return prompt_ids, *(ids[: turn_length(tokenizer, ids)] for ids in (chosen_ids, rejected_ids))


def sft_row(row: dict, tokenizer, max_length: int, loss_on: str) -> dict:
    """`input_ids targets length n_targets reason truncated prompt_ids` of one SFT row."""
    prompt, completion = conversation(row)
    ids, targets = encode_conversation(tokenizer, prompt, completion, loss_on)
    reason = "no answer" if not ids else "" if any(targets[:max_length]) else "nothing to learn within max_length"
    first = targets.index(True) if loss_on != "all" and any(targets) else 0
    return {
        "input_ids": ids[:max_length],
        "targets": targets[:max_length],
        "prompt_ids": ids[:first],
        "length": min(len(ids), max_length),
        "n_targets": sum(targets[:max_length]),
        "truncated": len(ids) > max_length,
        "reason": reason,
    }


def preference_row(row: dict, tokenizer, max_length: int) -> dict:
    """`prompt_ids chosen_ids rejected_ids length reason truncated` of one pair; length is of both sequences together."""
    texts = prompt, chosen, rejected = preference(row)
    ids, chosen_ids, rejected_ids = encode_preference(tokenizer, *texts) if all(texts) else ([], [], [])
    room = max(max_length - len(ids), 0)
    longest = len(ids) + max(len(chosen_ids), len(rejected_ids))
    if not prompt or not ids:
        reason = "empty prompt"
    elif not chosen or not rejected:
        reason = "empty answer"
    elif not room:
        reason = "prompt fills max_length"
    else:
        reason = "chosen equal to rejected" if chosen_ids[:room] == rejected_ids[:room] else ""
    chosen_ids, rejected_ids = chosen_ids[:room], rejected_ids[:room]
    return {
        "prompt_ids": ids[:max_length],
        "chosen_ids": chosen_ids,
        "rejected_ids": rejected_ids,
        "length": 2 * min(len(ids), max_length) + len(chosen_ids) + len(rejected_ids),
        "truncated": longest > max_length,
        "reason": reason,
    }


def tokenizer_fingerprint(tokenizer) -> str:
    """Changes when the tokenizer would write other ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    parts = [content, str(tokenizer.chat_template), str(tokenizer.special_tokens_map)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def load_tokenized(accelerator, name: str, split: str, function, tokenizer, columns: dict[str, str], **settings) -> datasets.Dataset:
    """Loads a data set and applies a row function such as `sft_row` once: the result is cached on disk by its content.

    Rows that cannot be used are left out before any permutation, counted and printed by reason. The result keeps the
    row's number in the file (`row`, from 1) and, where the data has one, its `answer` as text.

    Args:
        columns: see `column_names`.
        settings: passed to `function`; part of the cache's key.

    Raises:
        SystemExit: a row that fits no format (row number, column, expectation), or nothing usable left.
    """

    def convert(row, index):
        row = {**row, **{role: row[column] for role, column in columns.items()}}
        try:
            answer = {"answer": str(row["answer"])} if row.get("answer") is not None else {}
            return {"row": index + 1, **answer, **function(row, tokenizer=tokenizer, **settings)}
        except BadRow as error:
            sys.exit(f"data set {name!r}, row {index + 1}: {error}")

    with accelerator.local_main_process_first():
        rows = load_rows(name, split)
        missing = [column for column in columns.values() if column not in rows.column_names]
        if missing:
            sys.exit(f"--columns: data set {name!r} has no column {missing[0]!r}; it has {rows.column_names}")
        key = [CACHE_VERSION, rows._fingerprint, function.__name__, tokenizer_fingerprint(tokenizer), columns, settings]
        fingerprint = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        result = rows.map(convert, with_indices=True, remove_columns=rows.column_names, new_fingerprint=fingerprint)
    reasons = np.array(result["reason"])
    left_out = collections.Counter(reasons[reasons != ""].tolist())
    truncated = int(np.sum(np.array(result["truncated"])[reasons == ""]))
    notes = [f"{count} left out ({reason})" for reason, count in left_out.most_common()]
    notes += [f"{truncated} truncated"] if truncated else []
    if len(result) == left_out.total():
        sys.exit(f"data set {name!r}: no usable row: {'; '.join(notes)}")
    accelerator.print(f"data {name}: {len(result)} rows" + "".join(f"; {note}" for note in notes))
    return result.select(np.flatnonzero(reasons == "")) if left_out else result


def load_evaluation_sets(accelerator, names: list[str] | None, *rest, **settings) -> dict[str, datasets.Dataset]:
    """`load_tokenized` of each held-out set, by the prefix of its tags: `eval/`, or `eval/<name>/` where there are several."""
    names = names or []
    stems = [Path(name.partition(":")[0]).name.split(".")[0] for name in names]
    if len(set(stems)) < len(stems):
        sys.exit(f"--eval_dataset_name {names}: two sets would log under the same name")
    prefixes = [f"eval/{stem}/" if len(names) > 1 else "eval/" for stem in stems]
    return {p: load_tokenized(accelerator, name, *rest, **settings) for p, name in zip(prefixes, names)}
