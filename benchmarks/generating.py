"""Generation in this tree beside another one, such as a worktree of an older commit: time, memory, tokens.

    python benchmarks/generating.py ../older [--shape body|grouped|wide] [--prompt_tokens 512] [--group 8]
        [--rows 64] [--new_tokens 128] [--ragged] [--rounds 8]

Each tree has a process with one thread and the same random model: `body` of peers.py; `grouped`, the same
with 14 heads that share 2 heads of keys; `wide`, 896 wide with these heads. Both draw the same responses,
in turn, `--rounds` times: `--rows` of them, `--group` to each prompt. With `--ragged` prompts are of unlike
length, and rows end at random. Printed are CPU seconds, each round of tokens at its fastest, since others
on the machine only add time; the bytes of keys and values; the share of tokens that is equal up to the
first that differs in its row, and by how much their log-probs differ.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

OURS = Path(__file__).resolve().parents[1]
BODY = dict(vocab_size=4096, hidden_size=256, intermediate_size=672, num_hidden_layers=8)
BODY |= dict(num_attention_heads=4, num_key_value_heads=4, head_dim=64)
HEADS = dict(num_attention_heads=14, num_key_value_heads=2)
SHAPES = {
    "body": ("llama", BODY),
    "grouped": ("qwen3", {**BODY, **HEADS}),
    "wide": ("llama", {**BODY, **HEADS, "hidden_size": 896, "intermediate_size": 2384}),
}


def parsed():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="body")
    parser.add_argument("--prompt_tokens", type=int, default=512)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--new_tokens", type=int, default=128)
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--draw", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


# ============================================================ the process of a tree
def draw_on_request(args) -> None:
    """Draws all responses for each line of standard input, and prints what it took and found."""
    from accelerate import Accelerator
    from transformers import AutoConfig, AutoModelForCausalLM

    from preference_recipes.models import onednn
    from preference_recipes.rollouts import generation

    torch.set_num_threads(1)
    torch.manual_seed(0)
    onednn.use_onednn()
    architecture, sizes = SHAPES[args.shape]
    config = AutoConfig.for_model(architecture, max_position_embeddings=2**15, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.lm_head.weight.data.mul_(10)  # else all tokens are about equally likely
    wrapper = torch.nn.Module()
    wrapper.model = model
    wrapper.config = config
    wrapper.vocab_size = config.vocab_size
    wrapper.vocabulary = config.vocab_size  # its name in trees like d2db8f09
    settings = SimpleNamespace(generate_batch_size=args.rows)
    tokenizer = SimpleNamespace(pad_token_id=0)
    try:
        from preference_recipes.rollouts.context import SamplingContext
    except ImportError:  # a tree like d2db8f09
        from preference_recipes.rollouts.sampler import Sampler

        context = Sampler(Accelerator(cpu=True), settings, tokenizer, wrapper)
    else:
        run = SimpleNamespace(accelerator=Accelerator(cpu=True), args=settings)
        context = SamplingContext(run, wrapper, tokenizer)
    context.stop_tokens = lambda: set(range(1, 40)) if args.ragged else {1}
    random = np.random.default_rng(0)
    prompts = []
    for _ in range(args.rows // args.group):
        length = random.integers(args.prompt_tokens // 2, args.prompt_tokens) if args.ragged else 0
        prompt = random.integers(40, config.vocab_size, length or args.prompt_tokens).tolist()
        prompts += [prompt] * args.group
    uniforms = random.random((args.rows, args.new_tokens))
    marks = []  # CPU seconds at the end of each round of tokens
    n_bytes = []
    begin = generation.begin

    def watched(*given):
        batch = begin(*given)
        advance = batch.advance
        n_bytes.append(bytes_of(batch))

        def advance_and_mark(n_tokens):
            marks.append(time.process_time())
            return advance(n_tokens)

        batch.advance = advance_and_mark
        return batch

    generation.begin = watched
    for _ in sys.stdin:
        marks[:] = [time.process_time()]
        draws = dict(temperature=1.0, uniforms=uniforms)
        responses = generation.generate(context, prompts, args.new_tokens, **draws)
        marks.append(time.process_time())
        found = {"seconds": np.diff(marks).tolist(), "bytes": n_bytes[-1], "drawn": responses}
        print(json.dumps(found), flush=True)


def bytes_of(batch) -> int:
    """Returns the bytes of the keys and values of a batch."""
    cache = batch.step.cache if hasattr(batch, "step") else batch.cache
    tensors = [value for layer in cache.layers for value in vars(layer).values()]
    tensors = [value for value in tensors if isinstance(value, torch.Tensor)]
    return sum({value.data_ptr(): value.untyped_storage().nbytes() for value in tensors}.values())


# ============================================================ both in turn
def main() -> None:
    args = parsed()
    if args.draw:
        draw_on_request(args)
        return
    sys.path.insert(0, str(OURS))
    from recording import compare

    sides = {}
    for name, tree in (("ours", OURS), ("other", args.other.resolve())):
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, *sys.argv[1:], "--draw"]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        sides[name] = subprocess.Popen(command, cwd=tree, env=environment, **pipes)
    found = {name: [] for name in sides}
    for _ in range(args.rounds + 1):
        for name, side in sides.items():
            side.stdin.write("draw\n")
            side.stdin.flush()
            found[name].append(json.loads(side.stdout.readline()))
    for side in sides.values():
        side.stdin.close()
        side.wait()
    # The first round of a process is slower.
    ours, other = (
        sum(map(min, zip(*(one["seconds"] for one in rounds[1:])))) for rounds in found.values()
    )
    whole = [
        sum(one["seconds"]) / sum(two["seconds"])
        for one, two in list(zip(found["ours"], found["other"]))[1:]
    ]
    print(f"CPU seconds: ours {ours:.3f}, other {other:.3f}, ratio {ours / other:.3f}")
    print(f"ratios of whole rounds: {', '.join(f'{ratio:.2f}' for ratio in sorted(whole))}")
    one, two = found["ours"][0], found["other"][0]
    print(
        f"MiB of keys and values: ours {one['bytes'] / 2**20:.1f}, other {two['bytes'] / 2**20:.1f}, "
        f"ratio {one['bytes'] / two['bytes']:.3f}"
    )
    drawn = [
        [SimpleNamespace(ids=ids, logps=logps) for ids, logps in each["drawn"]]
        for each in (one, two)
    ]
    print(compare(*drawn))


if __name__ == "__main__":
    main()
