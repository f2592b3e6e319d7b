"""What a checkpoint costs: the time to save one of a model, and the time to write as many bytes with safetensors and fsync, alternately.

    python benchmarks/saving.py [--parameters 100] [--runs 5] [--folder FOLDER]

Prints medians, their ratio and the bytes. One process, fp32, AdamW with its two moments.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, get_scheduler

from common import ASSETS, checkpoint, folders, optim
from common.checkpoint import Run
from common.metrics import Means
from common.models import prepare
from common.models.logprobs import LogProbModel
from common.progress import Progress


class NoMetrics:
    """What of the metrics a checkpoint asks for."""

    def __init__(self):
        self.last_update, self.file, self.open = {}, Path("/nonexistent"), Means(None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=100, help="millions")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--folder", default=None, help="where to write; default: the temporary directory"
    )
    args = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    layers = max(
        1, round((args.parameters * 1e6 - 2 * 32000 * 512) / (4 * 512**2 + 3 * 512 * 1376))
    )
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=layers,
        num_attention_heads=8,
    )
    policy = LogProbModel(LlamaForCausalLM(config))
    optimizer = torch.optim.AdamW(optim.parameter_groups(policy, 0.0), lr=1e-5)
    scheduler = get_scheduler("linear", optimizer, 0, 1000)
    model, optimizer = prepare.for_training(accelerator, policy, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters, {accelerator.device}, torch {torch.__version__}"
    )
    ours, plain = [], []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        settings = argparse.Namespace(output_dir=folder, save_total_limit=1)
        run = Run(
            accelerator=accelerator,
            args=settings,
            model=model,
            unwrapped=policy,
            optimizer=optimizer,
            scheduler=scheduler,
            tokenizer=AutoTokenizer.from_pretrained(ASSETS / "model"),
            progress=Progress(100, 10, 1, 0),
            metrics=NoMetrics(),
            data_fingerprint="",
        )
        for number in range(args.runs + 1):
            os.sync()
            run.progress.global_step = number
            start = time.perf_counter()
            checkpoint.save(run)
            ours.append(time.perf_counter() - start)
            files = [
                path
                for path in (run.folder / f"global_step_{number:06d}").rglob("*")
                if path.is_file()
            ]
            size = sum(path.stat().st_size for path in files)
            tensors = {"bytes": torch.randint(0, 255, (size,), dtype=torch.uint8)}
            os.sync()
            start = time.perf_counter()
            save_file(tensors, f"{folder}/plain.safetensors")
            folders.flush(Path(f"{folder}/plain.safetensors"))
            plain.append(time.perf_counter() - start)
            Path(f"{folder}/plain.safetensors").unlink()
            print(
                f"checkpoint {ours[-1]:.2f} s, save_file and fsync {plain[-1]:.2f} s{' (not counted)' if number == 0 else ''}",
                flush=True,
            )
        shutil.rmtree(run.folder)
    one, other = statistics.median(ours[1:]), statistics.median(plain[1:])
    ratios = sorted(a / b for a, b in zip(ours[1:], plain[1:]))
    print(
        f"{size / 1e9:.2f} GB: checkpoint {one:.2f} s, save_file and fsync {other:.2f} s: {one / other:.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


if __name__ == "__main__":
    main()
