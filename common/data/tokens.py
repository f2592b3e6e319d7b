"""Turns texts and messages into token ids, as the tokenizer's own chat template writes them."""

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
    """Returns messages as the chat template writes them.

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
        return tokenizer.apply_chat_template(
            messages,
            schemas,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except Exception as error:  # a template raises what it likes, such as that roles must alternate
        given = "messages or tools" if tools else "messages"
        raise BadRow(f"the tokenizer's chat template refuses the {given}: {error}") from None


def encode(tokenizer, texts: list[str], plain: bool = False) -> list[list[int]]:
    """Returns the token ids of consecutive pieces of one text, one list for each piece.

    The ids are those of the whole text, cut at the ends of the pieces: so they are what a model
    meets when it reads the text. Where a token spans the end of a piece, no such cut exists. Then
    the next piece is tokenised alone, and so is every later one, because the tokens of the whole
    text no longer begin with the ids so far. The ids of a piece never depend on later pieces.

    Args:
        plain: the text was not written by a chat template. It then gets the BOS that this
            tokenizer puts in front, if it puts one, and EOS at its end, unless it has them.
    """
    pieces = []
    ids_so_far = []
    text_so_far = ""
    whole = []
    for piece in texts:
        text_so_far += piece
        whole = encode_text(tokenizer, text_so_far)
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


def encode_text(tokenizer, text: str) -> list[int]:
    """Returns a text's token ids, without the special tokens that the tokenizer puts around it."""
    return tokenizer(text, add_special_tokens=False).input_ids


def encode_turns(
    tokenizer, messages: list[dict], spans: list[tuple[int, int]], tools=None
) -> list[list[int]]:
    """Returns the token ids of a conversation up to its last answer, in pieces.

    The pieces are what precedes the first answer, the first answer, what precedes the second, ...
    PPO's prompts have no answer yet: see `prompt_row` in recipes/ppo.py.

    Args:
        spans: for each answer its first message, and the one after its last.
        tools: see `render`.

    Raises:
        BadRow: the template does not write each answer as it stands when it is generated.
    """
    texts = []
    written = ""  # the conversation up to the last answer so far
    for start, end in spans:
        # A conversation may begin with an answer.
        before = render(tokenizer, messages[:start], True, tools) if start else ""
        after = render(tokenizer, messages[:end], False, tools)
        if not before.startswith(written):
            raise BadRow(
                "this chat template rewrites earlier turns when later ones follow: "
                "use --loss_on completion, or another template"
            )
        if not after.startswith(before):
            raise BadRow(
                "this chat template does not write an answer right after its generation prompt, "
                "or rewrites earlier turns: use another template"
            )
        context = before[len(written) :]
        answer = after[len(before) :]
        texts += [context, answer]
        written = after
    return encode(tokenizer, texts)


def turn_length(tokenizer, ids: list[int]) -> int:
    """Counts a turn's tokens up to the one that ends it; 0 if no token does.

    The last EOS ends a turn. Some templates write none (Gemma, base models of Qwen). There the
    special token at the end of the turn ends it, also where a newline follows. What follows the
    end is never generated, so it is not learned.
    """
    eos = tokenizer.eos_token_id  # a property that searches each time
    if eos in ids:
        return len(ids) - ids[::-1].index(eos)
    added_tokens = tokenizer.added_tokens_decoder
    for length in (len(ids), len(ids) - 1):
        token = added_tokens.get(ids[length - 1]) if length > 0 else None
        if token is not None and token.special:
            return length
    return 0


def encode_preference(
    tokenizer, prompt, chosen, rejected, tools=None
) -> tuple[list[int], list[int], list[int]]:
    """Returns the ids of prompt, chosen and rejected, each answer up to its end.

    The end is found by `turn_length`. The prompt's ids are the same for both answers. `tools`: see
    `render`.
    """
    prompt_ids, chosen_ids = encode_answer(tokenizer, prompt, chosen, tools)
    _, rejected_ids = encode_answer(tokenizer, prompt, rejected, tools)
    return prompt_ids, chosen_ids, rejected_ids


def encode_answer(tokenizer, prompt, answer, tools) -> tuple[list[int], list[int]]:
    """Returns the token ids of a prompt and an answer, both strings or both message lists."""
    if isinstance(prompt, str):
        prompt_ids, ids = encode(tokenizer, [prompt, answer], plain=True)
    else:
        messages = prompt + answer
        span = (len(prompt), len(messages))
        prompt_ids, ids = encode_turns(tokenizer, messages, [span], tools)
    # Without an end token the whole answer is kept.
    length = turn_length(tokenizer, ids) or len(ids)
    return prompt_ids, ids[:length]


def fingerprint(tokenizer) -> str:
    """Returns a text that changes whenever the tokenizer would write other ids."""
    if tokenizer.is_fast:
        content = tokenizer.backend_tokenizer.to_str()
    else:
        content = str(sorted(tokenizer.get_vocab().items()))
    return "\0".join([content, str(tokenizer.chat_template), str(tokenizer.special_tokens_map)])


def stop_tokens(tokenizer, model) -> set[int]:
    """Returns the tokens that end a response.

    They are EOS, those of the model's generation config, and what ends a turn of the chat template.
    """
    stops = {tokenizer.eos_token_id}
    own = model.generation_config.eos_token_id
    if own is not None:
        stops |= {own} if isinstance(own, int) else set(own)
    with contextlib.suppress(BadRow):  # no template, or one that wants other messages
        question = {"role": "user", "content": "a"}
        answer = {"role": "assistant", "content": "b"}
        _, ids = encode_turns(tokenizer, [question, answer], [(1, 2)])
        length = turn_length(tokenizer, ids)
        if length:
            stops.add(ids[length - 1])
    return stops
