"""Token ids."""

import contextlib
import json

from common.data import formats
from common.data.formats import BadRow


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
            formats.without_nulls(
                tools if isinstance(tools, str) else json.dumps(tools, default=str)
            )
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


def fingerprint(tokenizer) -> str:
    """Changes when the tokenizer would write other ids."""
    content = (
        tokenizer.backend_tokenizer.to_str()
        if tokenizer.is_fast
        else str(sorted(tokenizer.get_vocab().items()))
    )
    return "\0".join([content, str(tokenizer.chat_template), str(tokenizer.special_tokens_map)])


def stop_tokens(tokenizer, model) -> set[int]:
    """What ends a response: EOS, what the model's generation config adds, and what ends a turn of the chat template."""
    ids, own = [], model.generation_config.eos_token_id
    with contextlib.suppress(BadRow):  # no template, or one that wants other messages
        ids = encode_turns(
            tokenizer,
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            [(1, 2)],
        )[1]
    end = turn_length(tokenizer, ids)
    return {
        tokenizer.eos_token_id,
        *([own] if isinstance(own, int) else own or []),
        *ids[max(end - 1, 0) : end],
    }
