"""Runs in a vLLM server's worker processes, so that a training run can give it new weights.

vLLM mixes the class into its worker, see docs/vllm.md, and a run calls the methods by `POST
/collective_rpc`. Nothing else of this repository is imported here: the server's environment has
neither accelerate nor DeepSpeed.
"""

from typing import Any


class Weights:
    """Methods that are added to a worker."""

    model_runner: Any  # this and `device` are the worker's own
    device: Any
    version: str | None = None  # the last call of `note_version` since the server's start

    def describe(self) -> dict:
        """Returns the model's dtype, its maximum length, and the version of its weights."""
        config = self.model_runner.model_config
        dtype = str(config.dtype).removeprefix("torch.")
        return {"dtype": dtype, "max_model_len": config.max_model_len, "version": self.version}

    def load(self, folder: str) -> None:
        """Replaces the model's weights by those in a Hugging Face folder."""
        runner = self.model_runner
        runner.reload_weights(weights_path=folder)
        if self.device.type == "cpu" and runner.model_config.hf_text_config.tie_word_embeddings:
            # On a CPU matrices are packed when they are loaded. A tied head's packed matrix is not
            # made again, so it would keep the old weights.
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(runner.get_model().lm_head, remove_weight=False)

    def note_version(self, version: str) -> None:
        """Stores the version of the weights that the server has now."""
        self.version = version
