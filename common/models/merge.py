"""Makes a whole model of an adapter's folder, by adding the adapter to its base.

python -m common.models.merge ADAPTER OUT
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils.peft_utils import find_adapter_config_file

from common import REPOSITORY, distributed, folders
from common.models import load, lora

# What a launcher tells its processes begins with one of these.
OF_LAUNCHER = (
    "ACCELERATE_",
    "FSDP_",
    "MASTER_",
    "RANK",
    "LOCAL_",
    "WORLD_",
    "GROUP_",
    "TORCHELASTIC_",
)


def whole_model(accelerator, name: str | None, output_dir: str, folder: str = "base") -> str | None:
    """Returns the name of a whole model: `name`, unless that is the folder of an adapter.

    An adapter is merged into its base, once, in `<output_dir>/<folder>`. All processes must call
    it.

    Args:
        name: a folder or a hub name. None stands for no model.

    Raises:
        SystemExit: the adapter could not be merged.
    """
    if name is None:
        return None
    place = Path(output_dir).resolve() / folder
    return distributed.on_main_process(accelerator, find_or_write, name, place)


def find_or_write(name: str, place: Path) -> str:
    """Does the work of `whole_model` on one process."""
    if not is_adapter(name):
        return name
    if place.exists():  # a resumed run; the folder is whole, or it would not be there
        return str(place)
    print(f"{name} is an adapter: merged into its base, in {place}", flush=True)
    # In a process without a launcher: in this one transformers might cut the weights for ZeRO-3 or
    # FSDP2, and wait for the other processes.
    temporary = place.with_name(f".{place.name}.writing")
    local_name = str(Path(name).resolve()) if Path(name).is_dir() else name
    result = subprocess.run(
        [sys.executable, "-m", "common.models.merge", local_name, str(temporary)],
        cwd=REPOSITORY,
        env={key: value for key, value in os.environ.items() if not key.startswith(OF_LAUNCHER)},
        capture_output=True,
        text=True,
    )
    if result.returncode:
        last_line = [result.stdout + result.stderr, *result.stderr.strip().splitlines()][-1]
        sys.exit(last_line)
    folders.replace(temporary, place)
    return str(place)


def is_adapter(name: str) -> bool:
    """Whether a folder or a hub name holds an adapter instead of a whole model."""
    if Path(name).is_dir():
        return (Path(name) / "adapter_config.json").is_file()
    try:
        return find_adapter_config_file(name) is not None
    except Exception:  # no such name, or no network: whoever loads it says so
        return False


def write(adapter: str | Path, out: Path) -> None:
    """Writes the model that an adapter makes of its base to a folder, in fp32, with its tokenizer.

    Args:
        adapter: a folder or a hub name.
        out: a folder that is replaced if it is there.

    Raises:
        SystemExit: the base is not there, is an adapter itself, or does not fit.
    """
    peft = lora.import_library("peft", needed_by=f"the adapter {str(adapter)!r}", extra="lora")
    base_name = None
    try:
        config = peft.PeftConfig.from_pretrained(str(adapter))
        base_name = config.base_model_name_or_path
        if is_adapter(base_name):
            raise ValueError("the base is an adapter itself: merge that one first")
        if config.task_type == "SEQ_CLS":
            base = AutoModelForSequenceClassification.from_pretrained(
                base_name, num_labels=1, dtype=torch.float32
            )
        else:
            base = AutoModelForCausalLM.from_pretrained(base_name, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(base, str(adapter))
        merged = model.merge_and_unload(safe_merge=True)  # it looks for what is not finite
        tokenizer = tokenizer_of(str(adapter), base_name)
    except Exception as error:  # whatever peft and transformers raise
        reason = str(error).strip().splitlines()[0]
        sys.exit(f"the adapter {str(adapter)!r} of {base_name!r} cannot be merged: {reason}")

    moments = Path(adapter) / lora.MOMENTS_FILE
    if moments.is_file():
        merged.config.update(json.loads(moments.read_text(encoding="utf-8")))
    if merged.can_generate():
        published = generation_config_of(str(adapter), merged).to_dict()
        merged.generation_config = load.PublishedGenerationConfig.from_dict(published)
    shutil.rmtree(out, ignore_errors=True)
    merged.save_pretrained(out)
    tokenizer.save_pretrained(out)


def tokenizer_of(adapter: str, base: str):
    """Returns the tokenizer beside an adapter, or else that of its base."""
    try:
        return AutoTokenizer.from_pretrained(adapter)
    except Exception:  # whatever says that there is none
        return AutoTokenizer.from_pretrained(base)


def generation_config_of(adapter: str, base) -> GenerationConfig:
    """Returns the generation config beside an adapter, or else that of its base."""
    try:
        return GenerationConfig.from_pretrained(adapter)
    except OSError:  # there is none
        return base.generation_config


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
