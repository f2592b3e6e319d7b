"""Five updates of SGD at learning rate 1 on a loss whose gradient is 0.5 + 2^-13, under DeepSpeed with a loss scale that
grows after every second one. Prints what each took from a weight, the norm that DeepSpeed reports, times the root of the
number of weights, and the scale: with the project's guard, and without it.
"""

import sys
import types

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

update_scale = DynamicLossScaler.update_scale

from common import engine, launch  # noqa: E402

SIZES = dict(train_batch_size=2, micro_train_batch_size=1, micro_train_tokens=0)
args = types.SimpleNamespace(
    **SIZES, max_grad_norm=0.0, output_dir=sys.argv[1], run_name=None, resume="never", seed=0
)
accelerator = launch.make_accelerator(args, "growth")


class Weights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((16,), 8.0))
        self.config = types.SimpleNamespace(hidden_size=16)

    def forward(self, factor):
        return (self.weight * factor).sum()


def updates() -> list[tuple[float, float, float]]:
    weights = Weights()
    accelerator.deepspeed_engine_wrapped = None  # it holds one engine
    model, optimizer = accelerator.prepare(weights, torch.optim.SGD(weights.parameters(), lr=1.0))
    found, before = [], 8.0
    for _ in range(5):
        engine.begin_update(accelerator, [0, 1])
        scale = engine.loss_scale(accelerator)
        for factor in (1, 2**-12):  # in half precision their sum is 1
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.tensor(factor, dtype=torch.float16)))
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        after = accelerator.get_state_dict(model)["weight"][0].item()
        found.append((before - after, float(norm) / 4, scale))
        before = after
    return found


print("guarded", updates())
DynamicLossScaler.update_scale = update_scale
print("unguarded", updates())
