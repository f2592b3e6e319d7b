#!/usr/bin/env bash
# gpt-oss' chat template, as trl 1.16.0 carries it: of several tool calls in one message the first alone is written.
#
# The good guess: a template writes all calls of a message, or refuses a message with several.
# What was seen: of two calls, each with its result, one call and both results are written. Nothing is said.
# Why it matters: data of other models, which call tools in parallel, lose calls. A model learns from a history in which
# results come from nowhere, and of such an answer it learns one call.
# Where: `message.tool_calls[0]` in trl/chat_templates/gptoss.jinja.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jinja2==3.1.6
"$folder/env/bin/pip" download -q --no-deps -d "$folder/wheel" trl==1.16.0
"$folder/env/bin/python" -m zipfile -e "$folder"/wheel/*.whl "$folder/unpacked"
"$folder/env/bin/python" - "$folder/unpacked/trl/chat_templates/gptoss.jinja" <<'PYTHON'
import datetime
import json
import sys

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
)
environment.filters["tojson"] = lambda value, **settings: json.dumps(value)
environment.globals["strftime_now"] = datetime.date(2026, 1, 31).strftime
template = environment.from_string(open(sys.argv[1], encoding="utf-8").read())


def call(town: str) -> dict:
    return {"type": "function", "function": {"name": "weather", "arguments": {"town": town}}}


messages = [
    {"role": "user", "content": "Compare."},
    {"role": "assistant", "content": "", "tool_calls": [call("Paris"), call("Rome")]},
    {"role": "tool", "name": "weather", "content": "warm"},
    {"role": "tool", "name": "weather", "content": "cold"},
]
text = template.render(messages=messages, add_generation_prompt=True)
print(text[text.index("Compare.") :])
assert [word in text for word in ("Paris", "Rome", "warm", "cold")] == [True, False, True, True]
PYTHON
echo "as described"
