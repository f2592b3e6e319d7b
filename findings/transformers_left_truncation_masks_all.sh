#!/usr/bin/env bash
# transformers 5.23.0: where a conversation is cut on the left, the mask of its answers is all zeros.
#
# The good guess: return_assistant_tokens_mask marks the answers that are left, as it does where the right is cut.
# What was seen: three questions with three answers. Cut to 8 tokens on the right, the two first answers are marked. Cut
# to 8 on the left, the two last answers are there, and nothing is marked.
# Why it matters: truncation_side="left" keeps the last turns, and of all long conversations nothing is learned.
# Where: apply_chat_template in tokenization_utils_base.py ends its loop at the first answer that begins outside.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q transformers==5.23.0 jinja2==3.1.6
"$folder/env/bin/python" - <<'PYTHON'
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = ["user", "assistant", *"abcxyz"]
backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
template = """{% for message in messages %}{{ message.role }} {% if message.role == 'assistant' %}\
{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %} \
{% endfor %}"""
messages = [
    {"role": role, "content": content}
    for question, answer in zip("abc", "xyz")
    for role, content in (("user", question), ("assistant", answer))
]
found = {}
for side, length in (("right", None), ("right", 8), ("left", 8)):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, truncation_side=side)
    row = tokenizer.apply_chat_template(
        messages,
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
        truncation=length is not None,
        max_length=length,
    )
    tokens = tokenizer.convert_ids_to_tokens(row["input_ids"])
    marked = [token for token, mark in zip(tokens, row["assistant_masks"]) if mark]
    found[side, length] = (" ".join(tokens), marked)
print(transformers.__version__, found)
assert found == {
    ("right", None): ("user a assistant x user b assistant y user c assistant z", ["x", "y", "z"]),
    ("right", 8): ("user a assistant x user b assistant y", ["x", "y"]),
    ("left", 8): ("user b assistant y user c assistant z", []),
}
PYTHON
echo "as described"
