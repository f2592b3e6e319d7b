"""Memory, speed and the largest micro-batch of SFT and DPO on one GPU: fp32, fp32 with TF32, bf16 autocast, bf16 and fp16 by DeepSpeed.

    python benchmarks/precision.py [--models 0.5B 3B] [--recipes sft dpo] [--length 1024] [--updates 8] [--micro 2 4 8 ...]

Runs the recipes themselves, by `accelerate launch`, on random weights and rows of exactly `--length` tokens, two micro-batches an update, and
reads their metrics.jsonl. A run is killed after its last line: its actor need not be written. DPO keeps its reference in memory and runs it
in every micro-batch, its default. fp32 is tried from the smallest micro-batch on, the others from the largest that fitted fp32; then
the largest that should fit by the memory so far, and on until what fitted is next to an out-of-memory error. One Markdown table for each
recipe and model. After `--budget` seconds no run is started: with `--folder`, the same command given again goes on, and prints all.
Without a GPU (or with `--tiny`) a model of a million parameters takes the same path on the CPU.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from common import ASSETS, ROOT

GIB = 2**30
OOM = "out of memory"
OOM_SIGNS = (
    "OutOfMemoryError: ",
    "CUDA error: out of memory",
    "STATUS_ALLOC_FAILED",
)  # of torch, of CUDA, of its libraries
MODELS = {  # the dimensions of Qwen2.5-0.5B and Qwen2.5-3B
    "0.5B": dict(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        vocab_size=151936,
    ),
    "3B": dict(
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        vocab_size=151936,
    ),
    "tiny": dict(
        hidden_size=128,
        intermediate_size=688,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=264,
    ),
}
LAUNCHES = {  # config and flags, which peak of PEAKS
    "fp32": (["single_gpu.yaml", "--mixed_precision", "no"], 0),
    "fp32, TF32": (["single_gpu.yaml", "--mixed_precision", "no"], 1),
    "bf16 autocast": (["single_gpu.yaml"], 2),
    "bf16, ds_zero2": (["ds_zero2.yaml"], 2),
    "fp16, ds_fp16": (["ds_fp16.yaml"], 2),
}
# FLOP/s in fp32, TF32 and half precision by part of the GPU's name, without sparsity. NVIDIA's data sheets of H100, H200 (SXM) and A100;
# those of H100 and H200 give TF32 and half precision with sparsity, which is twice this. Other forms of Hopper are slower.
PEAKS = {
    "H100": (67e12, 494e12, 989e12),
    "H200": (67e12, 494e12, 989e12),
    "A100": (19.5e12, 156e12, 312e12),
}
SLOWER = ("H100 PCIe", "NVL", "MIG")
HEADER = (
    "precision",
    "micro-batch",
    "peak",
    "tokens/s",
    "x fp32",
    "MFU",
)
LEGEND = """
Memory in GiB. peak: the most that torch had allocated at once since the process began (torch.cuda.max_memory_allocated; nothing resets it between
log lines), in the last line. The largest micro-batch depends on the CUDA context and on what the allocator holds unused, too. A micro-batch of dpo is of pairs, two rows each.
tokens/s: median over the second half of the updates. x fp32: of fp32's best. MFU: 6 FLOP for each parameter and token (8 in dpo, with the reference's
forward) of the GPU's peak in that precision; the products of attention are not counted."""


# ============================================================ models, rows, one run
def prepare(names: list[str], folder: Path) -> tuple[str | None, int]:
    """Makes the models that are not there yet; the GPU's name and bytes. In a process of its own, whose end frees the GPU."""
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "model")
    for name in names:
        if not (folder / name / "tokenizer.json").is_file():  # written last
            config = AutoConfig.for_model(
                "qwen2",
                **MODELS[name],
                num_key_value_heads=2,
                tie_word_embeddings=True,
                max_position_embeddings=32768,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
            with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
                AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
                    folder / name
                )
            tokenizer.save_pretrained(folder / name)
    if not torch.cuda.is_available():
        return None, 0
    device = torch.cuda.get_device_properties(0)
    return device.name, device.total_memory


def write_rows(path: Path, recipe: str, rows: int, length: int) -> None:
    """One window. The embedded tokenizer makes a token of every letter; what is too long is cut to `--max_length`."""
    draw = random.Random(0)
    text = lambda: "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=length))
    row = lambda: (
        {"text": text()}
        if recipe == "sft"
        else {"prompt": "a", "chosen": text(), "rejected": text()}
    )
    path.write_text("".join(json.dumps(row()) + "\n" for _ in range(rows)), encoding="utf-8")


def run(args, model: str, recipe: str, precision: str, micro: int) -> dict:
    """`{speed, peak, skipped}` of one run of a recipe, or `{problem}`; taken from the folder if it was made before."""
    out = (
        args.folder
        / f"{model}-{recipe}-{precision}-{micro}-{args.length}-{args.updates}".replace(
            ", ", "-"
        ).replace(" ", "-")
    )
    result, log, rows = (
        out.with_suffix(".json"),
        out.with_suffix(".log"),
        args.folder / f"{recipe}-{micro}-{args.length}.jsonl",
    )
    if result.is_file():
        return json.loads(result.read_text())
    if time.monotonic() > args.end:
        return {"problem": "not run, --budget is used up"}
    shutil.rmtree(out, ignore_errors=True)
    write_rows(rows, recipe, 2 * micro, args.length)
    (config, *flags), tf32 = LAUNCHES[precision][0], str(int(precision == "fp32, TF32"))
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        ROOT / "accelerate_configs" / config,
        *flags,
        "--num_processes",
        1,
        "--main_process_port",
        0,
        ROOT / "recipes" / f"{recipe}.py",
        "--model_name_or_path",
        args.folder / model,
        "--dataset_name",
        rows,
        "--output_dir",
        out,
        "--train_batch_size",
        2 * micro,
        "--micro_train_batch_size",
        micro,
        "--max_length",
        args.length,
        "--max_steps",
        args.updates,
        "--report_to",
        "none",
    ]
    # torch's own default is no TF32, which NVIDIA's containers change by this variable.
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_DATASETS_CACHE": str(args.folder / "datasets"),
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": tf32,
        **({"CUDA_VISIBLE_DEVICES": ""} if args.tiny else {}),
    }
    lines, deadline = [], time.monotonic() + 300
    with open(log, "w", encoding="utf-8") as file:
        launcher = psutil.Popen(
            [*map(str, command)], cwd=ROOT, env=environment, stdout=file, stderr=file
        )
    try:
        while len(lines) < args.updates and time.monotonic() < deadline:
            ended = launcher.poll() is not None
            with contextlib.suppress(
                FileNotFoundError, json.JSONDecodeError
            ):  # not there yet, half a line
                lines = [
                    json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()
                ]
            if ended:
                break
            time.sleep(0.2)
    finally:  # SIGTERM would make the recipe write a checkpoint, and torchrun gives its workers a session of their own
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = [*launcher.children(recursive=True), launcher]
            for process in processes:
                process.kill()
            psutil.wait_procs(processes)
    if len(lines) >= args.updates:
        speeds = [line["perf/tokens_per_second"] for line in lines[-(args.updates // 2) :]]
        found = {
            "speed": statistics.median(speeds),
            "peak": lines[-1].get("perf/peak_memory_gib"),
            "skipped": lines[-1]["skipped_steps"],
        }
    else:
        text = log.read_text(errors="replace")
        found = {
            "problem": OOM if any(sign in text for sign in OOM_SIGNS) else f"failed, see {log}"
        }
        if found["problem"] != OOM:
            print(text[-3000:], file=sys.stderr)
    shutil.rmtree(out, ignore_errors=True)  # part of an actor may be there
    print(f"{out.name}: {found}", file=sys.stderr, flush=True)
    if found.get("problem", OOM) == OOM:
        result.write_text(json.dumps(found))
    return found


def search(run_one, sizes: list[int], start: int, room: float) -> dict[int, dict]:
    """Results by micro-batch size, up to the largest of `sizes` that fits and the next, which does not.

    Args:
        room: GiB of the GPU, 0 where none is known.
    """
    done, size = {}, start
    while size:
        done[size] = run_one(size)
        if done[size].get("problem", OOM) != OOM:
            break
        fits = max((s for s, found in done.items() if "speed" in found), default=0)
        untried = [
            s
            for s in sizes
            if s > fits and all(s < bad for bad, found in done.items() if "problem" in found)
        ]
        if fits and room:  # memory grows with the rows by less than in proportion
            most = room / max(done[fits]["peak"], 1e-9) * fits
            size = max((s for s in untried if s <= most), default=min(untried, default=0))
        else:
            size = (min if fits else max)(untried, default=0)
    return dict(sorted(done.items()))


# ============================================================ tables
def compare(args, model: str, recipe: str, gpu: str | None, memory: int) -> bool:
    """Runs, and prints a table as it grows, then what is to be seen in it; False where something is missing."""
    with torch.device("meta"):
        shape = AutoConfig.from_pretrained(args.folder / model)
        parameters = AutoModelForCausalLM.from_config(shape).num_parameters()
    flop = 6 if recipe == "sft" else 8
    peaks = next(
        (
            peaks
            for key, peaks in PEAKS.items()
            if key in (gpu or "") and not any(name in gpu for name in SLOWER)
        ),
        None,
    )
    print(f"\n### {recipe}, {model}: {parameters:,} parameters, rows of {args.length} tokens\n")
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}")
    everything, fitted, notes = {}, {}, []
    for precision, (_, kind) in LAUNCHES.items():
        start = max(fitted.get("fp32", {}), default=args.micro[0])
        one = partial(run, args, model, recipe, precision)
        everything[precision] = results = search(one, args.micro, start, memory / GIB)
        fitted[precision] = fits = {
            size: result for size, result in results.items() if "speed" in result
        }
        fastest = max((result["speed"] for result in fitted["fp32"].values()), default=float("nan"))
        for size, result in results.items():
            cells = [result.get("problem", ""), *["-"] * (len(HEADER) - 3)]
            if size in fits:
                if result["peak"]:
                    cells[0] = f"{result['peak']:.1f}"
                used = f"{flop * parameters * result['speed'] / peaks[kind]:.1%}" if peaks else "-"
                cells[0] = cells[0] or "-"
                cells[1:] = [f"{result['speed']:,.0f}", f"{result['speed'] / fastest:.2f}", used]
            skipped = f" ({result['skipped']} skipped)" if result.get("skipped") else ""
            print(f"| {precision}{skipped} | {size} | {' | '.join(cells)} |", flush=True)
        note = f"- {precision}: largest micro-batch that fitted {max(fits, default='none')}, tried {', '.join(map(str, results))}"
        common = max(fits.keys() & fitted["fp32"].keys(), default=0)
        if common and precision != "fp32":
            note += f"; best tokens/s {max(result['speed'] for result in fits.values()) / fastest:.2f} x fp32's best{' (goal: 1.5)' if memory else ''}"
            if memory:
                share = fits[common]["peak"] / fitted["fp32"][common]["peak"]
                note += f"; peak at micro-batch {common} {share:.2f} of fp32's"
        notes.append(note)
    print("", *notes, sep="\n", flush=True)
    return all(
        result.get("problem", OOM) == OOM
        for results in everything.values()
        for result in results.values()
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["0.5B", "3B"])
    parser.add_argument("--recipes", nargs="+", choices=["sft", "dpo"], default=["sft", "dpo"])
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument(
        "--micro",
        nargs="+",
        type=int,
        default=[2, 4, 8, 16, 32, 64, 128],
        help="micro-batch sizes to choose from",
    )
    parser.add_argument(
        "--budget", type=float, default=480, help="seconds after which no run is started"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="keeps models and results, which another call takes up; default: a temporary one",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a model of a million parameters on the CPU"
    )
    args = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # so that a run in progress is ended, too
    args.end, args.tiny, args.micro = (
        time.monotonic() + args.budget,
        args.tiny or not torch.cuda.is_available(),
        sorted(args.micro),
    )
    if args.tiny:
        args.models, args.length, args.updates, args.micro = ["tiny"], 64, 4, [2]
    with contextlib.ExitStack() as stack:
        args.folder = (
            args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ).resolve()
        args.folder.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            gpu, memory = pool.submit(prepare, args.models, args.folder).result()
        print(
            ", ".join(
                f"{name} {version(name)}"
                for name in ("torch", "transformers", "accelerate", "deepspeed")
            ),
            end="; ",
        )
        if args.tiny:
            gpu, memory = None, 0
            print(
                "CPU\n\n**No figure here is a measurement of a GPU**: a tiny model, half precision emulated, to see that the script runs."
            )
        else:
            print(f"{gpu}, {memory / GIB:.0f} GiB")
        complete = [
            compare(args, model, recipe, gpu, memory)
            for model in args.models
            for recipe in args.recipes
        ]
        print(LEGEND)
    sys.exit(not all(complete))


if __name__ == "__main__":
    main()
