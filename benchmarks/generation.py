"""Ways to generate one response to each of some prompts with transformers: seconds, and whether the tokens are the same.

    python benchmarks/generation.py MODEL --data prompts.jsonl [--prompts 64] [--max_new_tokens 128] [--batch 16 32 64] [--runs 3]

The file has a column `prompt`. Printed for each way and batch, in turns: the median seconds, the least and the most.

- `recipes`: `common.rollout.generation.generate`: prompts sorted by length, ended responses dropped every 16 tokens
- `plain`: transformers' `generate` on the same sorted batches, each until its last response ends
- `static`: the same with a static cache, not compiled
- `compiled`: the same, compiled (torch.compile, its default mode; the first run, which compiles, is not counted)
- `continuous`: `generate_batch`, transformers' continuous batching; it samples by numbers of its own, so other tokens and lengths
"""

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CompileConfig,
    GenerationConfig,
    logging,
)

from common import batches
from common.rollout import generation
from common.rollout.generation import SampleByUniform


def ours(*arguments):
    """Responses by this repository's own generation."""
    return [response.ids for response in generation.generate(*arguments)]


def plain(
    model, tokenizer, prompts: list[list[int]], uniforms: np.ndarray, batch: int, **settings
) -> list[list[int]]:
    """Responses up to and including EOS, by transformers' `generate` alone."""
    order, responses = sorted(range(len(prompts)), key=lambda row: -len(prompts[row])), {}
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        ids = batches.pad(
            [prompts[row] for row in rows], tokenizer.pad_token_id, model.device, left=True
        )
        mask = batches.pad([[1] * len(prompts[row]) for row in rows], 0, model.device, left=True)
        draw = SampleByUniform(torch.from_numpy(uniforms[rows]).to(model.device), ids.shape[1], 1.0)
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=uniforms.shape[1],
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **settings,
        )
        out = model.generate(
            ids, attention_mask=mask, generation_config=config, logits_processor=[draw]
        )
        for row, response in zip(rows, out[:, ids.shape[1] :].tolist()):
            end = (
                response.index(tokenizer.eos_token_id) + 1
                if tokenizer.eos_token_id in response
                else None
            )
            responses[row] = response[:end]
    return [responses[row] for row in range(len(prompts))]


def continuous(model, tokenizer, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    config = GenerationConfig(
        do_sample=True,
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return [
        output.generated_tokens
        for output in model.generate_batch(
            prompts, generation_config=config, progress_bar=False
        ).values()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    accelerator, tokenizer = Accelerator(), AutoTokenizer.from_pretrained(args.model)
    load = lambda **how: (
        AutoModelForCausalLM.from_pretrained(args.model, **how).to(accelerator.device).eval()
    )
    model, paged = load(), load(attn_implementation="paged|sdpa")
    with open(args.data, encoding="utf-8") as lines:
        prompts = [
            tokenizer(json.loads(line)["prompt"]).input_ids
            for _, line in zip(range(args.prompts), lines)
        ]
    size = args.max_new_tokens
    uniforms = np.random.default_rng(0).random((len(prompts), size))
    settings = CompileConfig(fullgraph=False, mode="default")
    settings._compile_all_devices = (
        True  # transformers compiles for GPUs by itself, for a CPU when told so
    )
    ways, what = {}, (model, tokenizer, prompts, uniforms)
    for batch in args.batch:
        ways[f"recipes {batch}"] = partial(
            ours,
            accelerator,
            model,
            model,
            tokenizer,
            prompts,
            batch,
            size,
            1.0,
            uniforms,
        )
        ways[f"plain {batch}"] = partial(plain, *what, batch)
        ways[f"static {batch}"] = partial(
            plain, *what, batch, cache_implementation="static", disable_compile=True
        )
        ways[f"compiled {batch}"] = partial(
            plain, *what, batch, cache_implementation="static", compile_config=settings
        )
    ways["continuous"] = partial(continuous, paged, tokenizer, prompts, size)
    seconds, responses = {name: [] for name in ways}, {}
    with torch.no_grad():
        for _ in range(args.runs + 1):  # the first is not counted
            for name, way in ways.items():
                begun = time.perf_counter()
                responses[name] = way()
                seconds[name].append(time.perf_counter() - begun)
    print(
        f"{len(prompts)} prompts of {np.mean([len(prompt) for prompt in prompts]):.0f} tokens on average, {torch.get_num_threads()} threads"
    )
    base = responses[f"plain {args.batch[0]}"]
    for name, times in seconds.items():
        same = sum(one == other for one, other in zip(responses[name], base))
        length = np.mean([len(response) for response in responses[name]])
        print(
            f"{name:12} {statistics.median(times[1:]):6.2f} s ({min(times[1:]):.2f} to {max(times[1:]):.2f}), {length:.0f} tokens a response, "
            f"{same} as plain {args.batch[0]}"
        )


if __name__ == "__main__":
    main()
