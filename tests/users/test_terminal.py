"""What a run shows in a terminal and in a file: whole numbers, what they mean, and what to do next."""

import fcntl
import os
import re
import struct
import termios
import threading
import types

import pytest

import runs
from common import display

NUMBER = r"-?(\d\.\d\d|\d\d\.\d|\d{3}|0\.\d{3,})k?"  # three digits, and no exponent
ITEM = rf"update \d+/\d+|\d\d:\d\d<\d\d:\d\d|(loss|acc) {NUMBER}|{NUMBER} tok/s"


def flags(folder) -> list[str]:
    """The demo of SFT, with few rows."""
    runs.first_rows(folder / "rows.jsonl", runs.ASSETS / "sft_train.jsonl", 20)
    runs.first_rows(folder / "held_out.jsonl", runs.ASSETS / "sft_eval.jsonl", 6)
    given = dict(dataset_name="rows.jsonl", eval_dataset_name="held_out.jsonl", output_dir="out")
    given |= dict(max_steps=12, eval_steps=4, train_batch_size=8, micro_train_batch_size=8)
    return [runs.ASSETS / "sft.yaml", *runs.flags_of(given)]


def in_terminal(width: int, folder, *words) -> str:
    """What a command writes to a terminal of so many columns."""
    here, there = os.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    parts = []

    def read():
        while part := os.read(here, 65536):
            parts.append(part)
            if b"from_pretrained" in b"".join(parts[-2:]):
                break

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    process = runs.start([], *words, output=os.ttyname(there), cwd=folder)
    assert process.wait(200) == 0
    reader.join(20)
    os.close(there)
    return b"".join(parts).decode()


@pytest.mark.parametrize("width", [80, 100])
def test_in_a_terminal_no_number_is_cut_and_lines_break_between_words(tmp_path, width):
    said = in_terminal(width, tmp_path, runs.recipe("sft"), *flags(tmp_path))
    drawn = [line.strip() for line in re.split(r"[\r\n]+", said)]
    block = said[said.index("  model  ") : said.index("evaluation at")]
    assert max(map(len, drawn)) <= width, max(drawn, key=len)
    bars = [line for line in drawn if line.startswith("update") and "/12" in line]
    assert len(bars) > 3
    for line in bars:
        assert all(re.fullmatch(ITEM, item) for item in re.split("  +", line)), line
    assert re.search(rf"loss {NUMBER}  acc {NUMBER}  {NUMBER} tok/s$", bars[-1])
    assert "million parameters, 0.8255 million trained data" in " ".join(block.split())


def test_in_a_file_there_are_plain_lines_and_the_last_block_has_the_result(tmp_path):
    """Its figures are those of metrics.jsonl, its answers those of samples.jsonl."""
    said = runs.launch([], runs.recipe("sft"), *flags(tmp_path), cwd=tmp_path).stdout
    out = tmp_path / "out"
    assert "\r" not in said
    last = runs.training_lines(out)[-1]
    (bar,) = [line for line in said.splitlines() if line.startswith("update 12/12")]
    assert f"  loss {display.number(last['loss'])}  acc " in bar
    block = said[said.index("\ndone: ") :]
    for metric in ("eval/loss", "eval/exact_match"):
        assert display.progress_of(metric, runs.evaluation_lines(out)) in block
    page = "http://localhost:6006/?smoothing=0#custom_scalars&_smoothingWeight=0"
    assert f"tensorboard --logdir out  and open {page} (untick Ignore outliers)\n" in block
    assert block.endswith('  model   AutoModelForCausalLM.from_pretrained("out/actor")\n')
    for sample in runs.samples(out)[:3]:
        worth = "right" if sample["right"] else f"wrong: {sample['answer']}"
        assert f"  {sample['prompt']} -> {sample['response']}  {worth}\n" in said


def test_numbers_have_three_digits_and_no_exponent():
    shown = {3243.9: "3.24k", 0.5: "0.500", 12.34: "12.3", 999.7: "1.00k", -1234.5: "-1.23k"}
    shown |= {0.0123: "0.0123", 0: "0.00", 123.4: "123", float("nan"): "nan", 2.5e6: "2.50M"}
    assert {value: display.number(value) for value in shown} == shown


def test_what_does_not_fit_into_a_line_is_left_out():
    accelerator = types.SimpleNamespace(is_main_process=False)
    run = types.SimpleNamespace(global_step=1, total_steps=240, accelerator=accelerator)
    bar = display.Bar(run)
    run.global_step = 160
    bar.show({"loss": 0.8613, "kl/reverse": 0.04, "perf/tokens_per_second": 3243.9})
    bar.show({"loss": 0.75})  # what a rollout measured stays until the next one
    whole = ["update 160/240", "00:00<00:00", "loss 0.750", "kl/reverse 0.0400", "3.24k tok/s"]
    for width in range(100):
        line = bar.line(width)
        kept = line.split("  ")
        assert kept == whole[: len(kept)] and (len(line) < width or len(kept) == 1)
    assert bar.line(100).split("  ") == whole


def test_an_evaluation_says_what_it_means():
    lines = [
        {"global_step": 0, "eval/exact_match": 0.504, "eval/loss": 0.7, "eval/logps/chosen": -2.0}
    ]
    lines.append({**lines[0], "global_step": 220, "eval/exact_match": 0.95, "eval/loss": 0.3})
    lines.append({**lines[0], "global_step": 240, "eval/exact_match": 0.942, "eval/loss": 0.25})
    for line, accuracy in zip(lines, (0.75, 0.5, 0.25)):
        line["eval/accuracy"] = accuracy
    said = {name: display.progress_of(name, lines) for name in lines[0] if name != "global_step"}
    assert said == {
        "eval/exact_match": "0.942    (0.504 at the start, best 0.95 at 220)",
        "eval/loss": "0.25     the best (0.7 at the start)",
        "eval/logps/chosen": "-2       (-2 at the start)",
        "eval/accuracy": "0.25     (0.75 at the start, the best)",
    }
