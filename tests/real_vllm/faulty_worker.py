"""The worker of a real vLLM server, which a test can make lose weights on their way."""

from preference_recipes.rollouts.vllm_worker import Weights


class Faulty(Weights):
    """Attributes:
    loses: whether it passes over the weights that it should load.
    """

    loses = False

    def lose(self, is_on: bool) -> None:
        self.loses = is_on

    def load(self, folder: str) -> None:
        if not self.loses:
            super().load(folder)
