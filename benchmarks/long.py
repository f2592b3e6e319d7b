"""What long rows take: peak memory and CPU time of one micro-batch of SFT or DPO, one thread, fp32.

    python benchmarks/long.py [--works sft dpo] [--vocabularies 151936 262144]
        [--tokens 2048 4096 8192 16384] [--layouts chosen] [--width 256] [--layers 4]

SFT: one row of so many tokens. DPO: a pair whose prompt and two answers have so many, in the
`chosen` layout of `packing.py`, or with prompts `shared` or `padded` whatever that costs. Answers
have 512 tokens each, so that the output layer takes the same for all lengths. Layers are computed
again in the backward pass. Each measurement has a process of its own.

The floor is the process before it has a model; 16 bytes a parameter, and 4 of a reference; the
inputs of all layers and what autograd keeps of one; and a chunk of logits. The exponents are of
what grows with the length, in memory and in the time outside of attention: log2 of how much more
the last doubling adds than the one before. That of memory is too high where the peak moves from
the output layer to the others; `--vocabularies 4096` keeps it out of the way.
"""

import argparse
import copy
import itertools
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from head import resident

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))
ANSWER = 512
LAYOUTS = {"chosen": {}, "shared": {"width": 10**9}, "padded": {"share": False}}
DPO = SimpleNamespace(beta=0.1, loss_type="sigmoid", label_smoothing=0.0, gamma=0.0)


def made(width: int, layers: int, vocabulary: int) -> torch.nn.Module:
    """Returns a random model with log-probs as its output."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from preference_recipes.models.logprobs import LogProbModel

    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=2**16,
    )
    return LogProbModel(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def measure(args, work: str, vocabulary: int, tokens: int, layout: str) -> dict:
    """Runs a micro-batch forward and backward, after a small one, and returns what it took."""
    import dpo
    import sft

    from preference_recipes.models import logprobs, onednn
    from preference_recipes.models.packing import Packer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    onednn.use_onednn()
    before = resident("VmRSS")
    model = made(args.width, args.layers, vocabulary)
    reference = copy.deepcopy(model).eval() if work == "dpo" else None
    model.train().model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    packer = Packer(torch.device("cpu"), **{"share": True, "width": args.width, **LAYOUTS[layout]})

    def update(tokens: int, answer: int) -> dict:
        n_answers = 2 if work == "dpo" else 1
        ids = torch.randint(vocabulary, (tokens,)).tolist()
        prompts = [ids[: tokens - n_answers * answer]] * n_answers
        answers = [ids[len(prompts[0]) :][n * answer : (n + 1) * answer] for n in range(n_answers)]
        batch = packer.make_batch(prompts, answers)
        if reference is None:
            losses, _ = sft.token_losses(model, batch, "nll")
        else:
            with torch.no_grad():
                batch["ref_logps"] = reference(batch)["logps"].sum(1)
            losses, _ = dpo.pair_losses(model, reference, batch, DPO)
        losses.mean().backward()
        return batch["inputs"]

    update(64, 16)
    optimizer.step()
    optimizer.zero_grad()
    start = time.process_time()
    inputs = update(tokens, ANSWER)
    seconds = time.process_time() - start
    peak = resident("VmHWM")
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    n_logits = min(logprobs.CHUNK_ELEMENTS, ANSWER * (1 if reference is None else 2) * vocabulary)
    floor = n_parameters * (16 if reference is None else 20) + 4 * n_logits
    floor += args.layers * 4 * args.width * inputs["input_ids"].numel()
    floor += kept_bytes(made(args.width, 1, 512), inputs)
    forward, backward = attention_seconds(args.width // 64, inputs)
    n_forwards = 2 if reference is None else 3  # the model's layers twice
    return {
        "rows": "x".join(map(str, inputs["input_ids"].shape)),
        "MiB": peak,
        "floor": before + floor / 2**20,
        "seconds": seconds,
        "rest": seconds - args.layers * (n_forwards * forward + backward),
    }


def kept_bytes(model: torch.nn.Module, inputs: dict) -> int:
    """Returns the bytes that autograd keeps of a model's backbone, the mask left out."""
    sizes = {}

    def note(tensor):
        if tensor.dtype.is_floating_point and not isinstance(tensor, torch.nn.Parameter):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = inputs["input_ids"] % 512
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.model.model(**inputs | {"input_ids": ids}, use_cache=False)
    return sum(sizes.values())


def attention_seconds(heads: int, inputs: dict) -> tuple[float, float]:
    """Returns the CPU seconds of one layer's attention, forward and backward."""
    rows, length = inputs["input_ids"].shape
    mask = inputs.get("attention_mask")
    states = [torch.randn(rows, heads, length, 64, requires_grad=True) for _ in range(3)]
    start = time.process_time()
    output = torch.nn.functional.scaled_dot_product_attention(
        *states, attn_mask=mask, is_causal=mask is None
    )
    middle = time.process_time()
    output.sum().backward()
    return middle - start, time.process_time() - middle


def exponent(values: list[float]) -> float:
    """Returns p of `a + b * length^p`, by the last three of lengths that double."""
    return math.log2((values[-1] - values[-2]) / (values[-2] - values[-3]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--works", nargs="+", choices=["sft", "dpo"], default=["sft", "dpo"])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[151_936, 262_144])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["chosen"])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args, *args.one)))
        return
    print(
        "| work | vocabulary | tokens | rows | MiB | of the floor | seconds | outside of attention |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for work, vocabulary, layout in itertools.product(args.works, args.vocabularies, args.layouts):
        name = work if layout == "chosen" else f"{work}, {layout}"
        found = []
        for tokens in args.tokens:
            one = ["--one", json.dumps([work, vocabulary, tokens, layout])]
            command = [sys.executable, __file__, *sys.argv[1:], *one]
            said = subprocess.check_output(command, env=environment, text=True)
            found.append(json.loads(said.splitlines()[-1]))
            each = SimpleNamespace(**found[-1])
            print(
                f"| {name} | {vocabulary:,} | {tokens:,} | {each.rows} | {each.MiB:,.0f} "
                f"| {each.MiB / each.floor:.2f} | {each.seconds:.1f} | {each.rest:.1f} |",
                flush=True,
            )
        if len(found) > 2:
            memory, rest = (exponent([each[key] for each in found]) for key in ("MiB", "rest"))
            print(
                f"{name}, {vocabulary:,}: exponent of memory {memory:.2f}, of the rest {rest:.2f}"
            )


if __name__ == "__main__":
    main()
