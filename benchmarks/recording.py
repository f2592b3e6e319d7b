"""Generation by our decoding step, which a GPU records, and by transformers' `generate`, alternately.

    python benchmarks/recording.py MODEL [--rows 128] [--prompt_tokens 64] [--new_tokens 256] [--rounds 3]

Prints as JSON: tokens a second of both; how many recordings a batch made, and their seconds;
which share of the sampled tokens is equal up to the first that differs in its row, and by how much
their log-probs differ at most. The control is the same with batches of another size.

Without a GPU nothing is recorded: the same steps run one by one.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

from preference_recipes.rollouts import decoding, generation
from preference_recipes.rollouts.context import SamplingContext
from preference_recipes.rollouts.samples import repeat_each

ON_GPU = torch.cuda.is_available()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a folder, such as of make_model.py")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--prompt_tokens", type=int, default=64)
    parser.add_argument("--new_tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=("no", "bf16"), default="no")
    parser.add_argument("--report", type=Path, help="a file to write instead")
    args = parser.parse_args()
    accelerator = Accelerator(mixed_precision=args.precision)
    found = json.dumps(measure(accelerator, args), indent=1)
    if args.report:
        args.report.write_text(found, encoding="utf-8")
    else:
        print(found)


def measure(accelerator: Accelerator, args) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    wrapper = torch.nn.Module()
    wrapper.model = model.to(accelerator.device)
    wrapper.config = model.config
    wrapper.vocab_size = len(tokenizer)
    settings = SimpleNamespace(generate_batch_size=0)
    run = SimpleNamespace(accelerator=accelerator, args=settings)
    policy = SamplingContext(run, wrapper, tokenizer)
    random = np.random.default_rng(0)
    # Each prompt eight times, as a group of GRPO.
    distinct = random.integers(0, len(tokenizer), (args.rows // 8, args.prompt_tokens)).tolist()
    prompts = repeat_each(distinct, 8)
    uniforms = random.random((len(prompts), args.new_tokens))

    def draw(way: str, batch_size: int = 0) -> tuple[list, float]:
        decoding.has_fixed_step = ways[way]
        start = time.perf_counter()
        responses = generation.generate(
            policy,
            prompts,
            args.new_tokens,
            batch_size=batch_size,
            temperature=1.0,
            uniforms=uniforms,
        )
        return responses, time.perf_counter() - start

    ways = {"by steps": decoding.has_fixed_step, "by generate": lambda sampler, cache: False}
    recordings = note_recordings()
    for way in ways:
        draw(way)  # the first of a process is slower
    recordings.clear()
    seconds = {way: [] for way in ways}
    drawn = {}
    for _ in range(args.rounds):
        for way in ways:
            drawn[way], spent = draw(way)
            seconds[way].append(spent)
    tokens = sum(len(response.ids) for response in drawn["by generate"])
    others, _ = draw("by generate", batch_size=len(prompts) // 2)
    return {
        "tokens a second": {way: [tokens / each for each in seconds[way]] for way in ways},
        "recordings a batch": len(recordings) / args.rounds,
        "seconds of a recording": sum(recordings) / max(1, len(recordings)),
        "steps against generate": compare(drawn["by steps"], drawn["by generate"]),
        "half the rows at once against all": compare(others, drawn["by generate"]),
    }


def note_recordings() -> list[float]:
    """Returns a list to which the seconds of each recording are added."""
    seconds = []
    if ON_GPU:
        capture = torch.cuda.graph

        class Timed(capture):
            def __enter__(self):
                self.start = time.perf_counter()
                return super().__enter__()

            def __exit__(self, *error):
                super().__exit__(*error)
                seconds.append(time.perf_counter() - self.start)

        torch.cuda.graph = Timed
    return seconds


def compare(responses: list, others: list) -> dict:
    """Compares the tokens of each row up to the first that differs."""
    n_equal = 0
    n_tokens = 0
    largest = 0.0
    for response, other in zip(responses, others):
        differs = [one != two for one, two in zip(response.ids, other.ids)]
        equal = differs.index(True) if True in differs else len(differs)
        apart = np.subtract(response.logps[:equal], other.logps[:equal])
        largest = max([largest, *np.abs(apart)])
        n_equal += equal
        n_tokens += len(other.ids)
    return {"equal tokens": n_equal / n_tokens, "log-probs differ by": float(largest)}


if __name__ == "__main__":
    main()
