"""The environment of `make card`, see docs/environments.md."""


class Card:
    """A card with a digit on it, which is shown after a wrong guess.

    A first guess is right once in ten times. What is learned is to read the environment's answer.
    """

    def reset(self, answer, **columns):
        self.digit = answer
        self.is_right = False

    def step(self, message):
        self.is_right = message["content"][:1] == self.digit
        return None if self.is_right else [{"role": "user", "content": self.digit}]

    def get_reward(self):
        return float(self.is_right)
